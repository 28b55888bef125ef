"""Mixed precision for Lightning's Fabric: a class in its place, and behind it a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast import Prepared, autocast, prepare
from mezzo.cast.nested import cast_floating
from mezzo.errors import PolicyError, StateError, UnsupportedError, require_extra
from mezzo.integrations.logs import ToldPrecision, check_options, explain_to
from mezzo.integrations.trainer_and_fabric import check_gathers, parts_of
from mezzo.policy import Policy
from mezzo.session.attached import Attached, Standing, Words
from mezzo.session.attached.own_loop.copies import Copies
from mezzo.session.attached.own_loop.schedules import Schedules
from mezzo.tensors import LOW

require_extra("lightning", "mixed precision for Fabric needs lightning", "lightning.fabric")

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins.precision import Precision  # noqa: E402
from lightning.fabric.strategies.dp import DataParallelStrategy  # noqa: E402
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy  # noqa: E402

__all__ = ["MezzoFabric"]

_WORDS: Final = Words(begin="fabric.setup", updated="fabric.session.master_params()", backward="fabric.backward(loss)")
_SETUP: Final = "model, optimizer = fabric.setup(model, optimizer), for all of them before the first forward pass"
#: Where a session's state stands among what a program saves.
_KEY: Final = "mezzo"


class MezzoFabric(Fabric):
    """Train under a policy with Lightning's Fabric: ``fabric = MezzoFabric("O2,dtype=bfloat16", accelerator="cpu")``.

    A plugin of Fabric's is never told of optimizers, which a session is made of; so this stands in the place of
    ``Fabric``, and the program stays as it is:

    - what ``fabric.setup``, ``setup_module`` and ``setup_optimizers`` were given by the first forward pass is one
      session: several models and optimizers too, in ``strategy="ddp"`` too;
    - calls of the models run in the policy's region, and return FP32; ``fabric.autocast()`` is that region;
    - ``fabric.backward`` scales the loss; ``fabric.clip_gradients`` sees unscaled gradients, and those of masters where
      there are any: a norm that is not finite is no error, as its step is skipped, unless ``error_if_nonfinite=True``;
    - ``optimizer.step()`` checks, unscales, and updates or skips; a scheduler that was given to ``fabric.setup`` waits
      where the step was skipped, which ``fabric.session.last_step.skipped`` tells others;
    - ``fabric.save`` saves the session's state beside FP32 weights, as ``"mezzo"``, and ``fabric.load`` of an optimizer
      goes on bit for bit;
    - ``fabric.log`` and ``log_dict`` tell the loggers ``mezzo/scale``, the loss scale, and ``mezzo/skipped``, a count
      of steps.

    Args:
        policy: A policy, its text, or the path of a policy file.
        on_overflow: As for :class:`mezzo.MixedPrecision`; what ``"explain"`` finds is logged with the next values, as
            ``mezzo/overflow``.
        restore_buffers: As for :class:`mezzo.MixedPrecision`.
        hold_schedulers: Whether schedulers wait.
        plugins: Fabric's others.
        **kwargs: Fabric's.

    Attributes:
        policy: The policy.

    Raises:
        PolicyError: A wrong policy or option.
        UnsupportedError: lightning is not installed, or too old; or ``strategy="dp"``.

    **Cost**: that of the session. ``hold_schedulers`` costs one host sync a step where there is such a scheduler,
    logging and saving one as well.

    Example:
        >>> import torch
        >>> from mezzo.integrations.lightning import MezzoFabric
        >>> fabric = MezzoFabric("O2,dtype=bfloat16", accelerator="cpu", devices=1)
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> fabric.backward(model(torch.ones(4, 8)).square().mean())
        >>> _ = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> fabric.session.metrics()
        {'mezzo/scale': 1.0, 'mezzo/skipped': 0}
        >>> fabric.close()
    """

    def __init__(
        self,
        policy: Policy | str | os.PathLike[str] = "O1",
        *,
        on_overflow: Literal["skip", "explain", "raise"] = "skip",
        restore_buffers: bool = False,
        hold_schedulers: bool = True,
        plugins: Any = None,
        **kwargs: Any,
    ) -> None:
        check_options(on_overflow, restore_buffers=restore_buffers, hold_schedulers=hold_schedulers)
        self.policy = Policy.of(policy)
        options = {"on_overflow": on_overflow, "restore_buffers": restore_buffers}
        self._plugin = _SessionPlugin(self.policy, options, Schedules() if hold_schedulers else None)
        others = [] if plugins is None else plugins if isinstance(plugins, Iterable) else [plugins]
        super().__init__(plugins=[*others, self._plugin], **kwargs)
        if isinstance(self.strategy, DataParallelStrategy):
            raise UnsupportedError(
                'Fabric runs with strategy="dp"',
                why="it copies the model for each batch, without what the session has made of it",
                write='MezzoFabric(policy, strategy="ddp")',
            )
        self._plugin.shards = isinstance(self.strategy, ModelParallelStrategy)

    @property
    def session(self) -> ToldPrecision | None:
        """The session, from the first forward pass with an optimizer to :meth:`close`; ``None`` at other times."""
        return self._plugin.session

    def close(self) -> None:
        """End the session: FP32 weights, optimizers as they were built, and a Fabric that trains in FP32."""
        self._plugin.close()

    def setup(self, module: nn.Module, *optimizers: Optimizer, **kwargs: Any) -> Any:
        """Set up a model and its optimizers; see ``Fabric.setup``."""
        with self._plugin.setting_up(optimizers, kwargs.get("scheduler"), module):
            made = super().setup(module, *optimizers, **kwargs)
        return _handed_on(made)

    def setup_module(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Set up a model; see ``Fabric.setup_module``."""
        with self._plugin.setting_up():
            return super().setup_module(module, *args, **kwargs)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Set up optimizers of models that were set up; see ``Fabric.setup_optimizers``."""
        with self._plugin.setting_up(optimizers):
            made = super().setup_optimizers(*optimizers)
        return _handed_on(made)

    def clip_gradients(
        self,
        module: Any,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Clip unscaled gradients; see ``Fabric.clip_gradients``."""
        return super().clip_gradients(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)

    def save(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a state, and the session's with it; see ``Fabric.save``."""
        if _KEY in state:
            raise PolicyError(
                f"the state has an entry {_KEY!r}",
                why="fabric.save writes the session's state there",
                write="another name for it",
            )
        attached = self._plugin.begin()
        if attached is not None:
            check_gathers(self.strategy, self._plugin.optimizers)
        super().save(path, state if attached is None else {**state, _KEY: attached.state_dict()}, *args, **kwargs)

    def load(self, path: Any, state: dict[str, Any] | None = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a state, and with optimizers the session's; see ``Fabric.load``."""
        attached = self._plugin.begin()
        rest = super().load(path, state, *args, **kwargs)
        if state:
            taken = rest.pop(_KEY, None)
            if attached is not None and taken and any(isinstance(each, Optimizer) for each in state.values()):
                attached.load_state_dict(taken)
        return rest

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values, and those of the session; see ``Fabric.log_dict``."""
        own = {} if self.session is None else self.session.metrics()
        if text := own.pop("mezzo/overflow", None):
            explain_to(self.loggers, str(text), step)
        super().log_dict({**own, **metrics}, step)


class _SessionPlugin(Precision):
    """What Fabric asks when it sets up, runs and steps.

    Args:
        policy: The policy.
        options: Of the session.
        schedules: What schedulers ask, if they wait.

    Attributes:
        session: The session, while there is one.
        shards: Whether the strategy shards models.
        optimizers: Those that were set up.
    """

    def __init__(self, policy: Policy, options: dict[str, Any], schedules: Schedules | None) -> None:
        self.session: ToldPrecision | None = None
        self.shards = False
        self._policy, self._options, self._schedules = policy, options, schedules
        self._modules: dict[nn.Module, Prepared] = {}
        self._copies: dict[nn.Module, Copies] = {}
        self._sharded: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self._standing: Standing | None = None
        self._undo = ExitStack()
        self._is_closed = False

    # A session begins and ends ------------------------------------------------------------------------

    @contextmanager
    def setting_up(
        self, optimizers: Iterable[Optimizer] = (), scheduler: Any = None, module: nn.Module | None = None
    ) -> Iterator[None]:
        """Take in what is set up inside, or nothing of it if that fails."""
        known, given = list(self._modules), [] if self._is_closed else list(optimizers)
        if self._standing is not None and module is not None and given:
            raise StateError(
                "a model is set up for training after the first forward pass",
                where=type(module).__name__,
                why="each loss is scaled by one session, which has begun with the models that there were",
                write=_SETUP,
            )
        try:
            yield
            while self._sharded:
                self._prepare(self._sharded.pop())
            if self._standing is not None and given:
                assert self.session is not None
                self.session.add(given)
                self._take_over(given)
        except BaseException:
            self._sharded.clear()
            for each in [each for each in self._modules if each not in known]:
                self._copies.pop(each).leave()
                self._modules.pop(each).remove()
            raise
        self.optimizers += given
        if scheduler is not None and self._schedules is not None:
            self._undo.callback(setattr, scheduler, "__class__", type(scheduler))
            _hold(scheduler, self._schedules)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare a model, before it is moved and wrapped; where it is sharded, that comes first."""
        if self.shards and not self._is_closed:
            self._sharded.append(module)
        elif not self._is_closed:
            self._prepare(module)
        return module

    def _prepare(self, module: nn.Module) -> None:
        is_called_by_methods = hasattr(module, "training_step")
        handle = prepare(parts_of(module) if is_called_by_methods else module, self._policy)
        self._modules[module] = handle
        self._copies[module] = Copies([module], lambda: self._exact(handle))

    def _exact(self, handle: Prepared) -> Callable[[Tensor], Tensor | None]:
        """Return what gives the FP32 value of a model's tensors, before the session and under it."""
        return handle.kept.value_of if self._standing is None else self._standing.attached.exact()

    def __deepcopy__(self, memo: Any) -> _SessionPlugin:
        """Return itself: a LightningModule is copied with its Fabric, and a session cannot be."""
        return self

    def begin(self) -> Attached | None:
        """Return what stands behind the program's calls; it begins with the first call that has an optimizer."""
        if self._standing is None and self.optimizers:
            handles = list(self._modules.values())

            def begun(strays: list[nn.Module]) -> ToldPrecision:
                return ToldPrecision([*handles, *strays], self.optimizers, self._policy, **self._options)

            models = [handle.model for handle in handles]
            standing = Standing(models, self.optimizers, self._policy, words=_WORDS, begin=begun)
            if self._policy.param_dtype in LOW:
                own = [module for module, handle in self._modules.items() if handle.model is not module]
                standing.attached.save_as(torch.float32, own)
            amp = standing.attached.amp
            assert isinstance(amp, ToldPrecision)
            self._standing, self.session = standing, amp
        return None if self._standing is None else self._standing.attached

    def _take_over(self, optimizers: list[Optimizer]) -> None:
        assert self._standing is not None
        for optimizer in optimizers:
            self._standing.attached.take_over(optimizer, self._standing.step)

    def close(self) -> None:
        """End the session, and give all models their FP32 weights back."""
        if self._standing is not None:
            self._standing.end()
        for copies in self._copies.values():
            copies.leave()
        for handle in self._modules.values():
            handle.remove()
        self._undo.close()
        self._modules, self._copies, self.optimizers = {}, {}, []
        self._standing = self.session = None
        self._is_closed = True

    # A step -------------------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the policy's region."""
        if (attached := self.begin()) is not None:
            return attached.amp.autocast()
        handles = list(self._modules.values())
        if handles:
            return handles[0].autocast(*handles[1:])
        return nullcontext() if self._is_closed else autocast(self._policy)

    def convert_output(self, data: Any) -> Any:
        """Return what a model returns in FP32, unless the policy says otherwise."""
        is_plain = self._is_closed or self._policy.dtype not in LOW or self._policy.output_dtype is not None
        return data if is_plain else cast_floating(data, torch.float32)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of the scaled loss."""
        if self._is_closed:
            super().backward(tensor, model, *args, **kwargs)
            return
        attached = self.begin()
        if attached is None:
            raise StateError("a backward pass begins without an optimizer", write=_SETUP)
        if args:
            raise PolicyError(
                "a backward pass takes one loss here",
                why="it is scaled as a whole",
                write="fabric.backward(loss, retain_graph=True)",
            )
        attached.amp.backward(tensor, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step or skip, as the optimizer's own ``step`` does meanwhile, and let schedulers know."""
        before = None if self.session is None else self.session.last_step
        result = super().optimizer_step(optimizer, **kwargs)
        taken = None if self.session is None else self.session.last_step
        if self._schedules is not None and taken is not None and taken is not before:
            self._schedules.note([optimizer], taken.skipped)
        return result

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale gradients, where there are such: what clipping asks for."""
        if self._standing is not None:
            self._standing.unscale([optimizer])

    def main_params(self, optimizer: Optimizer) -> Any:
        """Yield what an optimizer updates: FP32 masters, or the parameters themselves."""
        return super().main_params(optimizer) if self.session is None else self.session.master_params(optimizer)


def _handed_on(made: Any) -> Any:
    """Let Fabric's wrappers of optimizers ask these, which a session has bound, and not their class.

    Args:
        made: What Fabric returns of a setup.
    """
    for each in made if isinstance(made, tuple) else (made,):
        if isinstance(each, Optimizer):
            vars(each).update({name: partial(_call, each, name) for name in ("zero_grad", "add_param_group")})
    return made


def _call(wrapper: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(wrapper.optimizer, name)(*args, **kwargs)


def _hold(scheduler: Any, schedules: Schedules) -> None:
    """Let a scheduler ask before it steps: by its class, since what an instance has is part of its state dict."""
    kind = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not schedules.waits(self):
            kind.step(self, *args, **kwargs)

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
