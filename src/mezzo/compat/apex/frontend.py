"""``initialize``, ``scale_loss`` and their like: what a training script calls, and what its options come to."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast.device import default_device_types
from mezzo.cast.model.prepare import prepare
from mezzo.compat.apex.functions import REGISTERED
from mezzo.errors import PolicyError, StateError, message, nearest, not_switches, raise_together, shown, some_of
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.session.attach import AttachedPrecision
from mezzo.session.calls import Calls
from mezzo.session.session import engine_of, weights_of
from mezzo.tensors import dtype_of

# The options of ``amp.initialize`` as a policy, and what they contradict each other in.

_LEVELS: Final = ("O0", "O1", "O2", "O3")
_YES_OR_NO: Final = {"True": True, "False": False, True: True, False: False, None: None}
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


def policy_of(
    opt_level: Any, cast_model_type: Any = None, patch_torch_functions: Any = None, keep_batchnorm_fp32: Any = None,
    master_weights: Any = None, loss_scale: Any = None, cast_model_outputs: Any = None,
    min_loss_scale: Any = None, max_loss_scale: Any = 2.0**24,
) -> Policy:  # fmt: skip
    """Return the policy that apex's options mean; the options are those of :func:`mezzo.compat.apex.initialize`.

    Raises:
        PolicyError: Options that are unknown, or cannot go together; one message lists all.
    """
    if opt_level not in _LEVELS:
        raise PolicyError(
            f"unknown opt_level {shown(opt_level)}",
            where="amp.initialize",
            why=nearest(str(opt_level), _LEVELS),
            write='opt_level="O1"; in bfloat16, opt_level="O2", cast_model_type=torch.bfloat16, '
            'or mezzo.MixedPrecision(model, optimizer, "O1,dtype=bfloat16")',
        )
    cast_model_type, cast_model_outputs = dtype_of(cast_model_type), dtype_of(cast_model_outputs)
    problems = [
        *_conflicts(opt_level, cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights),
        *_wrong_dtype("cast_model_outputs", cast_model_outputs),
        *([] if patch_torch_functions is None else not_switches(patch_torch_functions=patch_torch_functions)),
        *([] if master_weights is None else not_switches(master_weights=master_weights)),
    ]
    if not _is_known(keep_batchnorm_fp32):
        problem = f"keep_batchnorm_fp32 is {shown(keep_batchnorm_fp32)}"
        problems.append(
            PolicyError(problem, write='keep_batchnorm_fp32=True or False, or the strings "True" and "False"')
        )
    raise_together(problems)
    options = {
        "loss_scale": _loss_scale(opt_level, loss_scale, min_loss_scale, max_loss_scale),
        "output_dtype": cast_model_outputs,
    }
    if opt_level in ("O2", "O3"):
        norms = _YES_OR_NO[keep_batchnorm_fp32]
        options["keep_batchnorm_fp32"] = opt_level == "O2" if norms is None else norms
    fields = {name: value for name, value in options.items() if value is not None}
    if opt_level == "O1" and patch_torch_functions in (None, True):
        return Policy.O1(**fields)  # which has all of apex's lists
    if opt_level in ("O0", "O1"):
        return Policy.O0(**fields)
    has_masters = opt_level == "O2" if master_weights is None else master_weights
    make = Policy.O2 if has_masters else Policy.O3  # with which weights, loss scale and norms is what the options say
    return make(cast_model_type or torch.float16, **{"output_dtype": torch.float32, **fields})


def _is_known(value: Any) -> bool:
    return isinstance(value, bool | str | None) and value in _YES_OR_NO


def _conflicts(level: str, cast: Any, patch: Any, norms: Any, masters: Any) -> Iterator[PolicyError]:
    """Yield what an option asks for that the level cannot have."""
    is_low = level in ("O2", "O3")
    reasons = (
        ("cast_model_type", cast, level == "O1" and cast not in (None, False, torch.float32),
         "O1 casts at ops; the model's weights stay FP32", 'opt_level="O2", cast_model_type=…'),
        ("cast_model_type", cast, level == "O0" and cast not in (None, False, torch.float32),
         "O0 is FP32 training", 'opt_level="O3", cast_model_type=…'),
        ("cast_model_type", cast, is_low and cast not in (None, torch.float16, torch.bfloat16),
         f"{level} computes in 16 bits", 'torch.float16 or torch.bfloat16; or opt_level="O0", which is FP32'),
        ("patch_torch_functions", patch, level != "O1" and bool(patch),
         "casts at ops are what O1 is", 'opt_level="O1"'),
        ("keep_batchnorm_fp32", norms, level == "O1" and norms is not None,
         "the model's weights stay FP32, batch norm's too", "amp.initialize(…) without keep_batchnorm_fp32"),
        ("master_weights", masters, level == "O1" and masters is not None,
         "the model's weights are FP32 themselves", "amp.initialize(…) without master_weights"),
        ("master_weights", masters, level == "O0" and bool(masters),
         "the model's weights are FP32 themselves", 'opt_level="O2"'),
    )  # fmt: skip
    for name, value, contradicts, why, write in reasons:
        if contradicts:
            where = f"amp.initialize(opt_level={level!r}, {name}={shown(value)})"
            yield PolicyError(
                f"{level} and {name}={shown(value)} contradict each other", where=where, why=why, write=write
            )


def _wrong_dtype(name: str, value: Any) -> Iterator[PolicyError]:
    if value is not None and value not in _DTYPES:
        yield PolicyError(f"{name} is {shown(value)}", write=" or ".join(map(str, _DTYPES)))


def _loss_scale(level: str, value: Any, least: Any, most: Any) -> LossScale:
    if value is None:
        value = "dynamic" if level in ("O1", "O2") else 1.0
    if value != "dynamic":
        try:
            number = float("" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            raise PolicyError(
                f"loss_scale is {shown(value)}", where="amp.initialize", write='loss_scale="dynamic", 128.0 or "128.0"'
            ) from None
        return LossScale.constant(number)
    bounds = {name: bound for name, bound in (("floor", least), ("ceiling", most)) if bound is not None}
    init = LossScale.like("apex").init
    if isinstance(most, int | float) and most > 0:
        init = min(init, float(most))
    if isinstance(least, int | float):
        init = max(init, float(least))
    return LossScale.like("apex", init=init, **({"ceiling": None} | bounds))


logger = logging.getLogger(__name__)

_SCALER: Final = "loss_scaler"
_INITIALIZE_CALL: Final = "model, optimizer = amp.initialize(model, optimizer, opt_level=…)"


class _Session(AttachedPrecision):
    """What :func:`initialize` begins: a backward pass is the session's where :func:`scale_loss` has scaled its loss."""

    _binds: ClassVar[tuple[str, ...]] = ("calls",)


class _Amp:
    """The state of amp: one for the process, as in apex.

    Attributes:
        session: The session; ``None`` where there is none, or models alone, for inference.
        is_disabled: Whether it was initialised with ``enabled=False``: every call does nothing.
    """

    def __init__(self) -> None:
        self.session: _Session | None = None
        self.is_disabled = self.has_warned = False
        self._undo: contextlib.ExitStack | None = None

    def begin(self, models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> None:
        """Begin mixed precision training, or inference where there are no optimizers."""
        with contextlib.ExitStack() as undo:
            session = _Session(models, optimizers, policy, hold_schedulers=False) if optimizers else None
            if session is not None:
                undo.callback(session.close)
            for model in models if session is None else ():
                handle = prepare(model, policy)
                undo.callback(handle.remove)
                undo.callback(Calls([model], policy, handle.autocast).close)
            if policy.casts:
                REGISTERED.replace_others(undo)
            REGISTERED.begin()
            self.session, self._undo = session, undo.pop_all()

    @property
    def is_running(self) -> bool:
        """Whether ``amp.initialize`` was called, and amp has not ended."""
        return self._undo is not None

    def end(self) -> None:
        """Undo everything."""
        undo, self._undo, self.session = self._undo, None, None
        self.is_disabled = self.has_warned = False
        REGISTERED.forget()
        if undo is not None:
            undo.close()

    def require_session(self, caller: str) -> _Session | None:
        """Return the session; ``None`` where amp is not enabled.

        Raises:
            StateError: ``amp.initialize`` was not called, or was called without an optimizer.
        """
        if self.session is None and not self.is_disabled:
            problem = f"{caller} without an optimizer" if self.is_running else f"{caller} before amp.initialize"
            raise StateError(problem, write=_INITIALIZE_CALL)
        return self.session

    def warn_of_shared_scale(self) -> None:
        """Warn once that all losses share one scale."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                message(
                    "all losses share one loss scale",
                    where="num_losses, loss_id",
                    why="an overflow of any of them skips the step, and lowers the scale of all",
                    write="nothing: it trains as it is; num_losses and loss_id can go",
                ),
                UserWarning,
                stacklevel=3,
            )


_AMP: Final = _Amp()


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | str | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Begin mixed precision training of some models and optimizers, in place.

    =========  ===============  ============  ==========  =======  ==========
    opt_level  weights          casts at ops  batch norm  outputs  loss scale
    =========  ===============  ============  ==========  =======  ==========
    ``O0``     FP32             no            FP32        as is    1.0
    ``O1``     FP32             yes           FP32        as is    dynamic
    ``O2``     FP32, in halves  yes           FP32        FP32     dynamic
    ``O3``     FP16             no            FP16        FP32     1.0
    =========  ===============  ============  ==========  =======  ==========

    Args:
        models: A model, or a list of models; with FP32 weights, and not yet wrapped for several GPUs.
        optimizers: An optimizer, or a list of them; ``None`` for inference.
        enabled: With False this call, and every other one of amp, does nothing.
        opt_level: See above. Each option that follows overrides one property of it, unless it is ``None``.
        cast_model_type: What O2 and O3 compute in: ``torch.float16`` or ``torch.bfloat16``.
        patch_torch_functions: With False O1 casts nothing; no function of torch's is replaced in any case.
        keep_batchnorm_fp32: Of O2, where it is FP32 in any case, and O3; the strings ``"True"`` and ``"False"`` too.
        master_weights: Of O2 and O3: True stores weights as O2 does, and False as O3 does.
        loss_scale: ``"dynamic"``, a number, or a number as text. A dynamic one starts at 2^16, is halved by an
            overflow, and doubled by 2000 steps without.
        cast_model_outputs: The dtype of the models' floating outputs; when omitted that of the table.
        num_losses: Accepted: all losses share one scale, and a warning says so once.
        verbosity: From 1 on the log says what was chosen.
        min_loss_scale: The least that a dynamic scale falls to.
        max_loss_scale: The most that a dynamic scale grows to.

    Returns:
        Models and optimizers, which are those that were given, each as it was given: one alone, or a list, also an
        optimizer in ``apex.parallel.LARC``. Without optimizers the models alone.

    Raises:
        StateError: Amp is initialised already.
        PolicyError: Options that contradict each other; an optimizer that is none.
        UnsupportedError: A policy that cannot be carried out. Whatever is raised, nothing was changed.

    **Cost**: that of :func:`mezzo.attach`. No host sync.

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
    if _AMP.is_running:
        raise StateError(
            "amp is initialised already",
            why="one call of amp.initialize takes all models and optimizers, which share the loss scale",
            write="amp.initialize([model, other], [optimizer, another], …); or amp.deinitialize() first",
        )
    raise_together(not_switches(enabled=enabled))  # "False", as a command line may say it, would be true
    _AMP.is_disabled = not enabled
    if enabled:
        policy = policy_of(
            opt_level, cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale,
            cast_model_outputs, min_loss_scale, max_loss_scale,
        )  # fmt: skip
        policy = REGISTERED.with_rules(policy) if policy.casts else policy
        model_list, optimizer_list = _listed(models, nn.Module), [*map(_unwrapped_larc, _listed(optimizers, Optimizer))]
        if num_losses > 1:
            _AMP.warn_of_shared_scale()
        _AMP.begin(model_list, optimizer_list, policy)
        if verbosity:
            logger.info("amp %s is %s", opt_level, policy)
    return models if optimizers is None else (models, optimizers)


def _listed(argument: Any, cls: type) -> list[Any]:
    values = list(argument) if isinstance(argument, list | tuple) else [] if argument is None else [argument]
    wrong_values = [shown(value) for value in values if not isinstance(_unwrapped_larc(value), cls)]
    if wrong_values or (not values and cls is nn.Module):
        problem = f"amp.initialize takes {cls.__name__}s, one or a list"
        raise PolicyError(problem, where=some_of(wrong_values) or "None", write=_INITIALIZE_CALL)
    return values


def _unwrapped_larc(optimizer: Any) -> Any:
    """Return the optimizer that apex's LARC has in it: it changes gradients, and calls that one's step."""
    return inner if isinstance(inner := getattr(optimizer, "optim", None), Optimizer) else optimizer


def deinitialize() -> None:
    """End amp: FP32 models with the values they have by now, and everything that was taken over is given back.

    What ``register_float_function`` and its like were told is forgotten. Without :func:`initialize` nothing happens.
    """
    _AMP.end()


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield the loss times its scale; when its backward pass ends, gradients are FP32 and plain.

    Look at them, clip them on the model or on ``master_params``, or step. Blocks can follow each other before a step,
    for micro-batches or other losses; their gradients are summed in FP32, unscaled. Where gradients are not finite the
    next step is skipped, and the scale is halved.

    Args:
        loss: A floating tensor.
        optimizers: Those whose parameters get gradients from this loss.
        loss_id: Accepted: all losses share one scale.
        model: Not used, as in apex.
        delay_unscale: Accepted: gradients are unscaled after each pass, and their sums are FP32.
        delay_overflow_check: Accepted: the scale moves with the step.

    Yields:
        The scaled loss, for ``scaled_loss.backward()`` or any other call that differentiates it.

    Raises:
        StateError: Before :func:`initialize`.
        PolicyError: An optimizer that it does not know.

    **Cost**: a pass over the gradients. No host sync.
    """
    if (session := _AMP.require_session(caller="amp.scale_loss")) is None:
        yield loss
        return
    named = [*optimizers] if isinstance(optimizers, Iterable) else [optimizers]
    if foreign := [
        type(optimizer).__name__
        for optimizer in named
        if _unwrapped_larc(optimizer) not in weights_of(session).optimizers
    ]:
        problem = "amp.scale_loss was given an optimizer that amp.initialize was not"
        raise PolicyError(problem, where=some_of(foreign), write="amp.initialize(model, [optimizer, another], …)")
    if loss_id:
        _AMP.warn_of_shared_scale()
    yield engine_of(session).scale(loss)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Cast nothing in here: for a part of a model's forward pass at O1 and O2."""
    with contextlib.ExitStack() as stack:
        for device_type in dict.fromkeys(("cpu", *default_device_types())) if _AMP.is_running else ():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what an optimizer updates: the models' parameters, which but in O3 are FP32 themselves.

    Args:
        optimizer: An optimizer that :func:`initialize` returned, or any other.
    """
    return (param for group in optimizer.param_groups for param in group["params"])


# State --------------------------------------------------------------------------------------------------------


def state_dict(destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
    """Return the loss scale in apex's own form, which apex loads as well.

    Save it beside ``model.state_dict()``, which holds FP32 values at every level but O3, and
    ``optimizer.state_dict()``: the three together go on bit for bit.

    Args:
        destination: What to write to; a new mapping when omitted.

    **Cost**: a host sync.
    """
    saved: MutableMapping[str, Any] = OrderedDict() if destination is None else destination
    if (session := _AMP.require_session(caller="amp.state_dict")) is not None:
        engine_of(session).update()  # what the last step has found counts
        state = engine_of(session).scaler.state_dict()
        saved[f"{_SCALER}0"] = {"loss_scale": state["scale"], "unskipped": state["clean_steps"]}
    return saved


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what :func:`state_dict` returned, here or in apex; of several losses' scales the first.

    A constant scale stays what :func:`initialize` was told.

    Args:
        state_dict: The state.

    Raises:
        StateError: No such state. Nothing was loaded.
    """
    if (session := _AMP.require_session(caller="amp.load_state_dict")) is None:
        return
    first = state_dict.get(f"{_SCALER}0") if isinstance(state_dict, Mapping) else None
    if not isinstance(first, Mapping) or not {"loss_scale", "unskipped"} <= first.keys():
        raise StateError(
            "this is no state of amp",
            where=f"its keys are {some_of(list(map(shown, state_dict)))}" if isinstance(state_dict, Mapping) else "",
            why=f"{_SCALER}0 has a loss_scale and a count, unskipped",
            write='amp.load_state_dict(checkpoint["amp"])',
        )
    if len(state_dict) > 1:
        _AMP.warn_of_shared_scale()
    if session.policy.loss_scale.mode == "dynamic":
        session.load_state_dict(state_dict)
