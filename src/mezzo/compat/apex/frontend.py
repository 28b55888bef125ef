"""``initialize``, ``scale_loss`` and their like: what a training script calls."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final, ParamSpec

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.compat.apex.functions import REGISTERED, others, with_rules
from mezzo.compat.apex.options import policy_of
from mezzo.compat.apex.refusals import listed, unfit
from mezzo.compat.apex.running import NOW
from mezzo.errors import StateError, not_switches, raise_together, shown, some_of
from mezzo.session.attached import Attached, Standing, Words

__all__ = [
    "deinitialize", "disable_casts", "initialize", "load_state_dict", "master_params", "scale_loss", "state_dict",
]  # fmt: skip

P = ParamSpec("P")
logger = logging.getLogger(__name__)

_BEGIN: Final = "amp.initialize"
_SCALER: Final = "loss_scaler"
_BACKWARD: Final = "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()"
_WORDS: Final = Words(begin=_BEGIN, updated="amp.master_params(optimizer)", backward=_BACKWARD)


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Begin mixed precision training of some models and optimizers, in place.

    =========  =======  ============  ==========  =======  ==========
    opt_level  weights  casts at ops  batch norm  masters  loss scale
    =========  =======  ============  ==========  =======  ==========
    ``O0``     FP32     no            FP32        no       1.0
    ``O1``     FP32     yes           FP32        no       dynamic
    ``O2``     FP16     no            FP32        yes      dynamic
    ``O3``     FP16     no            FP16        no       1.0
    =========  =======  ============  ==========  =======  ==========

    Args:
        models: A model, or a list of models; with FP32 weights, and not yet wrapped for several GPUs.
        optimizers: An optimizer, or a list of them; ``None`` for inference.
        enabled: With False this call, and every other one of amp, does nothing.
        opt_level: See above. Each option that follows overrides one property of it, unless it is ``None``.
        cast_model_type: What O2 and O3 store: ``torch.float16`` or ``torch.bfloat16``.
        patch_torch_functions: With False O1 casts nothing; no function of torch's is replaced in any case.
        keep_batchnorm_fp32: Of O2 and O3; the strings ``"True"`` and ``"False"`` too.
        master_weights: Of O2 and O3.
        loss_scale: ``"dynamic"``, a number, or a number as text. A dynamic one starts at 2^16, is halved by an
            overflow, and doubled by 2000 passes without.
        cast_model_outputs: The dtype of the models' floating outputs.
        num_losses: How many losses have a scale of their own, chosen by the ``loss_id`` of :func:`scale_loss`.
        verbosity: From 1 on the log says what was chosen. Skipped steps are logged by the session in any case.
        min_loss_scale: The least that a dynamic scale falls to.
        max_loss_scale: The most that a dynamic scale grows to.

    Returns:
        Models and optimizers, which are those that were given, each as it was given: one alone, or a list. Without
        optimizers the models alone.

    Raises:
        StateError: Amp is initialised already.
        PolicyError: Options that contradict each other; half-precision parameters; an optimizer that is none.
        UnsupportedError: A policy that cannot be carried out. Whatever is raised, nothing was changed.

    **Cost**: that of the session, and two passes over the gradients where :func:`scale_loss` unscales. No host sync.

    Example:
        >>> import torch
        >>> from mezzo.compat.apex import amp
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
        >>> loss = model(torch.ones(4, 8)).square().mean()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        >>> optimizer.step()
        >>> amp.deinitialize()
    """
    if NOW.standing is not None:
        raise StateError(
            "amp is initialised already",
            why="one call of amp.initialize takes all models and optimizers, which share the loss scales",
            write="amp.initialize([model, other], [optimizer, another], …); or amp.deinitialize() first",
        )
    if wrong := not_switches(enabled=enabled):  # "False", as a command line may say it, would be true
        raise wrong[0]
    if not enabled:
        NOW.is_disabled = True
        return models if optimizers is None else (models, optimizers)
    all_models, all_optimizers = listed(models, nn.Module, _BEGIN), listed(optimizers, Optimizer, _BEGIN)
    policy = policy_of(
        opt_level, cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale,
        cast_model_outputs, min_loss_scale, max_loss_scale,
    )  # fmt: skip
    raise_together([problem for model in all_models for problem in unfit(model, _BEGIN, stores_low=opt_level > "O1")])
    policy = with_rules(policy) if policy.autocast else policy
    standing = Standing(all_models, all_optimizers, policy, words=_WORDS, num_losses=num_losses, casts_batches=True)
    try:
        for each in others() if policy.autocast else ():
            standing.replace(*each)
    except BaseException:
        standing.end()
        raise
    NOW.standing, NOW.is_disabled = standing, False
    if verbosity:
        logger.info("amp %s is %s", opt_level, policy)
    shapes = [every if isinstance(given, list | tuple) else every[0] if every else None
              for given, every in ((models, all_models), (optimizers, all_optimizers))]  # fmt: skip
    return shapes[0] if optimizers is None else tuple(shapes)


def deinitialize() -> None:
    """End amp: FP32 models with the values they have by now, and everything that was taken over is given back.

    What ``register_float_function`` and its like were told is forgotten. Without :func:`initialize` nothing happens.

    Raises:
        StateError: At O1 in another thread than :func:`initialize`; nothing was undone.
    """
    if NOW.standing is not None:
        NOW.standing.end()
    NOW.standing, NOW.is_disabled = None, False
    REGISTERED.clear()


class _Block:
    """A context that says so where it is taken for the loss that it gives.

    Args:
        context: The context.
    """

    def __init__(self, context: contextlib.AbstractContextManager[Tensor]) -> None:
        self._context = context

    def __enter__(self) -> Tensor:
        return self._context.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        return self._context.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise StateError("amp.scale_loss is called without with", where=f".{name}", write=_BACKWARD)


def _block(make: Callable[P, contextlib.AbstractContextManager[Tensor]]) -> Callable[P, _Block]:
    return functools.wraps(make)(lambda *args, **kwargs: _Block(make(*args, **kwargs)))


@_block
@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Give the loss times its scale, and unscale the gradients that its backward pass has made.

    After the block gradients are unscaled and, where there are masters, FP32, on the model's parameters and on
    ``master_params``: look at them, clip them, or step. Blocks can follow each other before a step, for micro-batches
    or other losses; their gradients are summed in FP32, unscaled each by its own scale. Where gradients are not finite
    the next step of these optimizers is skipped, and the scale is halved. Nothing is cast inside the block.

    Args:
        loss: A floating tensor.
        optimizers: Those whose parameters get gradients from this loss. Gradients of others are left as they are.
        loss_id: Which of the ``num_losses`` losses this is.
        model: Not used, as in apex.
        delay_unscale: Leave the gradients scaled, which saves two passes over them where more are to be added; the
            last block, or the step, unscales all.
        delay_overflow_check: Let the scale move with the step, and not with the block.

    Yields:
        The scaled loss, for ``scaled_loss.backward()`` or any other call that differentiates it.

    Raises:
        StateError: Before :func:`initialize`.
        PolicyError: An optimizer that it does not know, or no such ``loss_id``.

    **Cost**: two passes over the gradients, unless nothing is scaled. No host sync.
    """
    if (standing := _standing("amp.scale_loss")) is None:
        yield loss
        return
    named = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    scaled = standing.scaled(loss, loss_id, named)
    with standing.off():
        yield scaled
    if standing.unscales and not delay_unscale:
        standing.attached.judge(named, adapts=not delay_overflow_check)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Cast nothing in here, in this thread."""
    with contextlib.nullcontext() if NOW.standing is None else NOW.standing.off():
        yield


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what an optimizer updates: FP32 masters, or the parameters themselves; their gradients are unscaled FP32.

    Args:
        optimizer: An optimizer that :func:`initialize` returned, or any other.
    """
    return (param for group in optimizer.param_groups for param in group["params"])


# State --------------------------------------------------------------------------------------------------------


def state_dict(destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
    """Return the loss scales in apex's own form, which apex loads as well.

    Save it beside ``model.state_dict()``, which holds FP32 values at every level but O3, and
    ``optimizer.state_dict()``: the three together go on bit for bit.

    Args:
        destination: What to write to; a new mapping when omitted.

    **Cost**: a host sync.
    """
    found: MutableMapping[str, Any] = OrderedDict() if destination is None else destination
    attached = _attached("amp.state_dict")
    found.update({} if attached is None else _scales(attached))
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what :func:`state_dict` returned, here or in apex.

    A constant scale stays what :func:`initialize` was told. Where another number of losses was saved, those that both
    have are loaded; the log tells both.

    Args:
        state_dict: The state.

    Raises:
        StateError: No such state, or a step is under way. Nothing was loaded.
    """
    if (attached := _attached("amp.load_state_dict")) is None:
        return
    if not isinstance(state_dict, Mapping) or (unknown := [key for key in state_dict if _SCALER not in str(key)]):
        raise StateError(
            "this is no state of amp",
            where=f"unknown keys {some_of(list(map(shown, unknown)))}" if isinstance(state_dict, Mapping) else "",
            why=f"its keys are {_SCALER}0, {_SCALER}1 and so on",
            write='amp.load_state_dict(checkpoint["amp"])',
        )
    now = _scales(attached)
    if len(state_dict) != len(now):
        logger.warning("the state of amp has %d losses, and num_losses is %d", len(state_dict), len(now))
    config = attached.amp.policy.loss_scale
    if config.mode != "dynamic":
        logger.info("the state of amp is not loaded: the loss scale is %s", config)
        return
    attached.amp.load_state_dict({key: state_dict.get(key, own) for key, own in now.items()})


def _scales(attached: Attached) -> dict[str, Any]:
    """Return the loss scales in apex's form."""
    pairs = enumerate(attached.scales())
    return {f"{_SCALER}{n}": {"loss_scale": each["scale"], "unskipped": each["clean_steps"]} for n, each in pairs}


def _standing(call: str) -> Standing | None:
    """Return the session; ``None`` where amp is not enabled."""
    if NOW.standing is None and not NOW.is_disabled:
        write = "model, optimizer = amp.initialize(model, optimizer, opt_level=…)"
        raise StateError(f"{call} before amp.initialize", write=write)
    return NOW.standing


def _attached(call: str) -> Attached | None:
    """Return the session that optimizers are attached to, if there is one."""
    standing = _standing(call)
    return standing.attached if standing is not None and standing.optimizers else None
