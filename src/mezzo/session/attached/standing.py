"""A session that stands between two calls of the user's, for call styles in which nothing holds a session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast import Prepared, fp32, prepare
from mezzo.cast.held import HeldRegion
from mezzo.cast.nested import cast_batches
from mezzo.errors import PolicyError, StateError
from mezzo.optim.hypers import changes_nothing
from mezzo.policy import Policy
from mezzo.session.attached.attached import Attached
from mezzo.session.session import MixedPrecision
from mezzo.session.weights.words import Words
from mezzo.tensors import LOW

__all__ = ["Standing"]


class Standing:
    """Train models as a policy says while ``optimizer.step()`` stays what the program calls, until :meth:`end`.

    Where the policy casts at ops, that holds for the thread, inside modules and outside. State dicts of models whose
    weights have masters hold FP32 values. Optimizers may update parameters that no model has, a criterion's for
    instance: these stay FP32.

    Args:
        models: The models.
        optimizers: The optimizers; none for inference.
        policy: The policy.
        words: What a program writes, for errors and warnings.
        num_losses: How many losses have a scale of their own.
        casts_batches: Whether models cast whatever is floating in their inputs, float64 and batches of the user's own
            classes included; where the policy casts at ops, float64 alone.
        begin: Begins the session, and is given what holds parameters of no model; then nothing is cast but where that
            session says. It is made here when omitted.

    Attributes:
        policy: The policy.
        optimizers: The optimizers.
        unscales: Whether gradients are other than the optimizers need them until they are unscaled.

    Raises:
        MezzoError: As :class:`MixedPrecision`, or :func:`mezzo.prepare`. Nothing was changed.

    **Cost**: that of the session.
    """

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        policy: Policy,
        *,
        words: Words,
        num_losses: int = 1,
        casts_batches: bool = False,
        begin: Callable[[list[nn.Module]], MixedPrecision] | None = None,
    ) -> None:
        self.policy, self.optimizers, self._words = policy, optimizers, words
        self._attached: Attached | None = None
        self._held: HeldRegion | None = None
        scale = policy.loss_scale
        self.unscales = policy.master_weights or scale.mode == "dynamic" or scale.init != 1.0
        with contextlib.ExitStack() as undo:
            if optimizers:
                strays = list(_strays(models, optimizers))
                amp = (
                    MixedPrecision([*models, *strays], optimizers, policy, num_losses=num_losses)
                    if begin is None
                    else begin(strays)
                )
                undo.callback(MixedPrecision.close, amp)
                self._attached = Attached(amp, keeps_plain=True)
                self.attached.core.weights.words = words
                if begin is not None:
                    self.attached.core.keep_left()  # a program's own loop may clear gradients only before its next loss
                undo.callback(self.attached.give_back)
                for optimizer in optimizers:
                    self.attached.take_over(optimizer, self.step)
                if policy.param_dtype in LOW if begin else policy.master_weights:
                    self.attached.save_as(torch.float32)
                region = amp.autocast()
            else:
                handles = list[Prepared]()
                for model in models:
                    handles.append(prepare(model, policy))
                    undo.callback(handles[-1].remove)
                region = handles[0].autocast(*handles[1:])
            for model in models if casts_batches else ():
                undo.callback(cast_batches(model, policy.param_dtype, float64_alone=policy.autocast).remove)
            if policy.autocast and begin is None:
                self._held = HeldRegion(region, models)
                undo.callback(self._held.leave)
            self._undo = undo.pop_all()

    @property
    def attached(self) -> Attached:
        """The session, which stands where there are optimizers."""
        assert self._attached is not None, "there is an optimizer"
        return self._attached

    @property
    def casts(self) -> bool:
        """Whether ops are cast now, in this thread."""
        return self._held is not None and self._held.casts

    def off(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which nothing is cast."""
        return contextlib.nullcontext() if self._held is None else self._held.off()

    def replace(self, place: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute of the user's, until the end.

        Args:
            place: The module or class that has it.
            name: Its name.
            make: Returns what replaces it.
        """
        plain = vars(place).get(name)  # as it is there: a static method is not what getattr returns
        self._undo.callback(*((delattr, place, name) if plain is None else (setattr, place, name, plain)))
        made = make(getattr(place, name))
        setattr(place, name, staticmethod(made) if isinstance(plain, staticmethod) else made)

    def end(self) -> None:
        """Undo everything.

        Raises:
            StateError: In another thread than the one that casts hold for; nothing was undone.
        """
        if self._held is not None:
            self._held.require_here()
        self._undo.close()

    # The loop -----------------------------------------------------------------------------------------------

    def scaled(self, loss: Any, loss_id: int, optimizers: list[Optimizer]) -> Tensor:
        """Return a scaled loss; see :meth:`Attached.scaled`.

        Raises:
            PolicyError: No floating tensor, no such loss, or an optimizer of others.
            StateError: There are no optimizers.
        """
        if not self.optimizers:
            raise StateError("a loss is scaled without optimizers", why="the models were given alone, for inference")
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            kind = str(loss.dtype) if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise PolicyError(f"the loss is {kind}, and no floating tensor", write=self._words.backward)
        return self.attached.scaled(loss, loss_id, optimizers)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step with one optimizer, or skip: what ``optimizer.step()`` is meanwhile.

        Args:
            optimizer: The optimizer.
            closure: Evaluates the loss.

        Returns:
            What the closure returned first.

        Raises:
            StateError: The gradients are none of the session's.
        """
        with self.off():  # an optimizer's own products are not to be cast
            if closure is not None:
                returned = list[Any]()

                def evaluate() -> Any:  # its losses are computed where ops are cast
                    with contextlib.nullcontext() if self._held is None else self._held.on():
                        returned.append(closure())
                    return returned[-1]

                self.attached.amp.step(optimizer, evaluate)
                return returned[0]
            match self.attached.gradients_of(optimizer):
                case "none":
                    return self.attached.plain_step(optimizer)()
                case "dropped":
                    raise StateError(
                        "an optimizer steps for which no loss was scaled",
                        where=type(optimizer).__name__,
                        why="losses reached its parameters, but were scaled for other optimizers only, and left "
                        "its gradients as they were",
                        write=f"{self._words.backward}\nwith all optimizers whose parameters the loss trains",
                    )
                case "foreign":
                    params = (param for group in optimizer.param_groups for param in group["params"])
                    if changes_nothing(optimizer.param_groups, (p.grad for p in params if p.grad is not None)):
                        return self.attached.plain_step(optimizer)()  # as where torch.distributed.checkpoint loads
                    raise StateError(
                        "these gradients were made by a backward pass whose loss was not scaled",
                        where=f"{type(optimizer).__name__}.step()",
                        why="a plain loss.backward() made them, or an earlier step has taken them already",
                        write=self._words.backward,
                    )
            self.attached.amp.step(optimizer)
        return None

    def unscale(self, optimizers: list[Optimizer]) -> None:
        """Unscale the gradients of some optimizers, where there are such: for what clips them.

        Args:
            optimizers: Which.
        """
        if scaled := [each for each in optimizers if self.attached.gradients_of(each) == "scaled"]:
            self.attached.amp.unscale_(scaled)


@fp32
class _StaysFP32(nn.Module):
    """Parameters that stay in FP32 at every level.

    Args:
        params: The parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)


def _strays(models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[nn.Module]:
    """Yield what holds parameters that are no model's, if there are such."""
    known = {id(param) for model in models for param in model.parameters()}
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    every = {id(param): param for group in groups for param in group["params"] if isinstance(param, nn.Parameter)}
    if strays := [param for key, param in every.items() if key not in known]:
        holder = nn.Module()
        holder.no_model = _StaysFP32(strays)
        yield holder
