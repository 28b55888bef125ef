"""The FP32 values of low-precision parameters: taken over from a session, written, loaded, and given back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.optim.edits import Edits, take_over
from mezzo.optim.saving import SavedOptimizer
from mezzo.optim.state import EXTRAS
from mezzo.step.split import judged_together
from mezzo.step.storage import KAHAN, Storage
from mezzo.step.whole import at_once
from mezzo.tensors import LOW

__all__ = ["HalvesOptimizer", "Joined"]


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """What a session has changed, and how it was before: ``master=`` of the defaults and of each group."""

    masters: bool
    own: list[Any]


class HalvesOptimizer(SavedOptimizer):
    """An optimizer that keeps the other half of low-precision weights, for itself or for a session."""

    _edits: Edits
    _joined: Joined | None
    #: Weights whose remainder was loaded, and belongs to weights yet to come.
    _awaiting: set[Tensor]
    #: What was prepared for the state as it is.
    _ready: dict[int, Any]

    @abstractmethod
    def _make_state(self) -> None:
        """Make the state of every parameter that requires a gradient and has none yet."""

    @abstractmethod
    def _with_masters(self) -> list[Tensor]:
        """Return the parameters that have a full master."""

    @property
    def keeps_masters(self) -> bool:
        """Whether every group keeps FP32 values of low-precision parameters."""
        return all(group["master"] is not None for group in self.param_groups)

    @torch.no_grad()
    def adopt(self, originals: Mapping[Tensor, Tensor], name_of: Callable[[Tensor], str]) -> None:
        """Take over FP32 values of parameters that are about to be, or were just, rounded to low precision.

        Args:
            originals: The FP32 values, by parameter; the parameters are low-precision by now.
            name_of: Gives a parameter's name, for errors.

        Raises:
            NumericsError: A value that split storage cannot hold; nothing was changed.
        """
        pairs = ((group, param) for group in self.param_groups for param in group["params"])
        forms = {
            param: self._storage(group, param) for group, param in pairs if param in originals and param.dtype in LOW
        }

        def make() -> list[tuple[Tensor, Storage, Tensor, Tensor | None]]:
            return [
                (param, form, *form.make(originals[param].float(), param.dtype, name_of(param)))
                for param, form in forms.items()
            ]

        with judged_together() as counts:
            made = make()
        devices = {count.device for count in counts}
        if any(torch.stack([count for count in counts if count.device == device]).any() for device in devices):
            make()  # which raises, and says where
        for param, form, weight, extra in made:
            param.data.copy_(weight)
            if form.extra is not None:
                self.state[param][form.extra] = extra
        self._edits.see(self._with_masters())
        self._ready.clear()

    @torch.no_grad()
    def join(self, *, masters: bool) -> None:
        """Begin to serve a session: whatever trains has state from now on, before its first gradient comes.

        Parameters that do not require a gradient get theirs with the first step, saving or backward pass after they do.

        Args:
            masters: Whether the session's policy keeps FP32 values; if not, no group does until :meth:`leave`.

        **Cost**: the memory of the state; one kernel for each tensor of it.
        """
        options = (self.defaults, *self.param_groups)
        joined = Joined(masters, [each["master"] for each in options])
        without = [] if masters else [partial(setitem, each, "master", None) for each in options]
        # Between the two, weights that are about to lose their masters would seem to have halves.
        at_once(partial(setattr, self, "_joined", joined), *without)
        self._ready.clear()
        self._make_state()

    def stored(self, *, in_fp32: bool = False) -> list[Tensor]:
        """Return the low-precision parameters whose other half is kept here, or will be with their first step.

        Args:
            in_fp32: Whether to leave out those with a compensation, which is no half of a FP32 value.
        """
        extras = EXTRAS if not in_fp32 else [name for name in EXTRAS if name != KAHAN.extra]
        return [
            param
            for group in self.param_groups
            for param in group["params"]
            if param.dtype in LOW
            and (extra := self._storage(group, param).extra) in extras
            and ((self._joined is not None and param.requires_grad) or extra in self.state.get(param, {}))
        ]

    @torch.no_grad()
    def write(self, param: Tensor, value: Tensor) -> None:
        """Give a parameter another value.

        A value in the parameter's own dtype leaves a full master that rounds to it, and a remainder where it is the
        value that the remainder is beside. A remainder that was loaded since the last step belongs to whatever value
        comes next: the states of a model and of its optimizer load in any order.

        Args:
            param: One of :meth:`stored`.
            value: Of its shape, in FP32 or in the parameter's own dtype.

        Raises:
            NumericsError: A value that split storage cannot hold; nothing was changed.
        """
        state = self.state[param]
        if value.dtype != param.dtype:
            self._write_whole(param, value.to(param.device, torch.float32))
        elif param in self._awaiting:
            param.copy_(value)
            self._awaiting.discard(param)
        elif "master" in state:
            param.copy_(value)
            take_over(param, state["master"])
            self._edits.see([param])
        else:
            wide = value.to(param.device, torch.float32)
            self._write_whole(param, torch.where(param == value, self.master_of(param), wide))

    def _write_whole(self, param: Tensor, value: Tensor) -> None:
        group = next(group for group in self.param_groups if any(param is each for each in group["params"]))
        form = self._storage(group, param)
        weight, extra = form.make(value, param.dtype, None)
        kept = self.state[param].get(form.extra) if form.extra == "remainder" else None
        if kept is not None and extra is not None:
            # Halves that stand for this value already stay: beside a tie FP16 has two pairs for one value.
            same = form.read(form.parts(param.detach(), kept)) == value
            weight, extra = torch.where(same, param, weight), torch.where(same, kept, extra)
        param.copy_(weight)
        if form.extra is not None and extra is not None:
            if form.extra in self.state[param]:
                self.state[param][form.extra].copy_(extra)
            else:
                self.state[param][form.extra] = extra
        self._edits.see([param])
        self._awaiting.discard(param)

    @torch.no_grad()
    def master_of(self, param: Tensor) -> Tensor:
        """Return the FP32 value of a parameter, as a new tensor.

        **Cost**: 4 bytes a weight; a pass over the parameter.
        """
        for group in self.param_groups:
            if any(param is each for each in group["params"]) and param.dtype in LOW:
                form = self._storage(group, param)
                extra = self.state.get(param, {}).get(form.extra) if form.extra else None
                if extra is not None:
                    return form.read(form.parts(param.detach(), extra)).clone()
        return param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)

    def release(self) -> dict[Tensor, Tensor]:
        """Give up the other halves of all weights, and return the FP32 values that had one."""
        held: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for param in group["params"]:
                form = self._storage(group, param)
                if form.extra is not None and form.extra in self.state.get(param, {}):
                    held[param] = self.master_of(param)
                    del self.state[param][form.extra]
        self._ready.clear()
        return held

    def leave(self) -> None:
        """Serve no session any more, with ``master=`` as it was before; weights that are FP32 by now need no half."""
        for group in self.param_groups:
            for param in group["params"]:
                for name in EXTRAS if param.dtype == torch.float32 else ():
                    self.state.get(param, {}).pop(name, None)
        if self._joined is not None:
            for each, master in zip((self.defaults, *self.param_groups), self._joined.own, strict=True):
                each["master"] = master
            self._joined = None
        self._ready.clear()

    def model_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a model's state dict with the FP32 values of the parameters that this optimizer updates.

        Args:
            model: The model; other low-precision tensors are widened.
        """
        known = {param for group in self.param_groups for param in group["params"]}
        return {
            name: self.master_of(tensor) if tensor in known else tensor.detach().float()
            if tensor.dtype in LOW else tensor.detach()
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }  # fmt: skip
