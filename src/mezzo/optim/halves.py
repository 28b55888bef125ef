"""The FP32 values of low-precision parameters: taken over from a session, written, loaded, and given back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mezzo.cast.model.sharding import flags_of_all
from mezzo.errors import NumericsError, some_of
from mezzo.optim.edits import Edits, take_over
from mezzo.optim.state import EXTRAS
from mezzo.shards import placed, sharded_as
from mezzo.step.split import judged_together
from mezzo.step.storage import KAHAN, SPLIT, Storage, storage
from mezzo.step.update import RULES, UpdateRule, rule
from mezzo.tensors import LOW, is_distributed, local

__all__ = ["Group", "HalvesOptimizer", "Joined"]

Group: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """What a session has changed, and how it was before: ``master=`` of the defaults and of each group."""

    masters: bool
    own: list[Any]


class HalvesOptimizer(Optimizer):
    """An optimizer that keeps the other half of low-precision weights, for itself or for a session."""

    _rule: ClassVar[str]

    def _start(self) -> None:
        """Know nothing yet of what the state is for."""
        self._edits = Edits()
        self._joined: Joined | None = None
        self._awaiting = set[Tensor]()  # weights whose remainder was loaded, and belongs to weights yet to come
        self._ready: dict[int, Any] = {}  # what was prepared for the state as it is

    @property
    def keeps_masters(self) -> bool:
        """Whether every group keeps FP32 values of low-precision parameters."""
        return all(group["master"] is not None for group in self.param_groups)

    def rule_of(self, group: Group) -> UpdateRule:
        """Return a group's update rule."""
        return rule(self._rule, *(option for option in sorted(RULES[self._rule].options) if group[option]))

    def _storage(self, group: Group, param: Tensor) -> Storage:
        return storage(group["master"], param.dtype, rounding=group["rounding"])

    def _pairs(self) -> Iterator[tuple[Group, Tensor]]:
        """Yield each parameter with its group."""
        return ((group, param) for group in self.param_groups for param in group["params"])

    def _form_of(self, param: Tensor) -> Storage:
        return next(self._storage(group, each) for group, each in self._pairs() if each is param)

    def _low(self) -> Iterator[tuple[Tensor, Storage]]:
        """Yield the low-precision parameters, and how each is stored."""
        return ((param, self._storage(group, param)) for group, param in self._pairs() if param.dtype in LOW)

    @torch.no_grad()
    def adopt(self, originals: Mapping[Tensor, Tensor], name_of: Callable[[Tensor], str]) -> None:
        """Take over FP32 values of parameters that are about to be, or were just, rounded to low precision.

        A parameter whose other half is here already has been trained, or loaded, since: it keeps what it stands for.

        Args:
            originals: The FP32 values, by parameter; the parameters are low-precision by now.
            name_of: Gives a parameter's name, for errors.

        Raises:
            NumericsError: A value that split storage cannot hold; nothing was changed.
        """
        forms = {
            param: form
            for param, form in self._low()
            if param in originals and form.extra not in self.state.get(param, {})
        }

        def make() -> list[tuple[Tensor, Storage, Tensor, Tensor | None]]:
            return [
                (param, form, *form.make(local(originals[param]).float(), param.dtype, name_of(param)))
                for param, form in forms.items()
            ]

        with judged_together() as counts:
            made = make()
        if lost := _lost([param for param, form in forms.items() if form is SPLIT], counts):
            make()  # which raises, and says where, unless it is on another rank
            raise NumericsError(
                "weights of another rank are too large for split storage",
                where=some_of(list(map(name_of, lost))),
                why="beyond the range of their dtype the low-precision weight would be infinite",
                write=f"policy.keep_fp32(params=[{name_of(lost[0])!r}]), or bfloat16, whose range is FP32's",
            )
        for param, form, weight, extra in made:
            local(param).data.copy_(weight)
            if extra is not None and form.extra is not None:
                self.state[param][form.extra] = sharded_as(extra, param)
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
        self._joined = Joined(masters, [each["master"] for each in options])
        for each in () if masters else options:
            each["master"] = None
        self._ready.clear()
        self._make_state()

    def stored(self, *, in_fp32: bool = False) -> list[Tensor]:
        """Return the low-precision parameters whose other half is kept here, or will be with their first step.

        Args:
            in_fp32: Whether to leave out those with a compensation, which is no half of a FP32 value.
        """
        return [
            param
            for param, form in self._low()
            if form.extra is not None
            and not (in_fp32 and form.extra == KAHAN.extra)
            and ((self._joined is not None and param.requires_grad) or form.extra in self.state.get(param, {}))
        ]

    @torch.no_grad()
    def write(self, param: Tensor, value: Tensor, *, refines: bool = False) -> None:
        """Give a parameter another value.

        A value in the parameter's own dtype leaves a full master that rounds to it, and a remainder where it is the
        value that the remainder is beside. A remainder that was loaded since the last step belongs to whatever value
        comes next: the states of a model and of its optimizer load in any order.

        Args:
            param: One of :meth:`stored`.
            value: Of its shape, in FP32 or in the parameter's own dtype; a DTensor, or whole, for a DTensor.
            refines: Whether the parameter was rounded from it: beside a tie it is rounded anew.

        Raises:
            NumericsError: A value that split storage cannot hold; nothing was changed.
        """
        if refines:
            self.take_edits()
            self.state[param].pop(self._form_of(param).extra, None)
            self.adopt({param: value}, lambda each: f"a parameter of shape {tuple(each.shape)}")
            return
        state, value, here = self.state[param], placed(value, param), local(param)
        if value.dtype == param.dtype and (param in self._awaiting or "master" in state):
            param.copy_(value)
            if param in self._awaiting:
                self._awaiting.discard(param)
            else:
                take_over(here, local(state["master"]))
                self._edits.see([param])
            return
        value = local(value)
        if value.dtype == param.dtype:
            value = torch.where(here == value, local(self.master_of(param)), value.to(param.device, torch.float32))
        form, value = self._form_of(param), value.to(param.device, torch.float32)
        weight, extra = form.make(value, param.dtype, None)
        if "remainder" in state and extra is not None:
            # Halves that stand for this value already stay: beside a tie FP16 has two pairs for one value.
            kept = local(state["remainder"])
            same = form.read(form.parts(here.detach(), kept)) == value
            weight, extra = torch.where(same, here, weight), torch.where(same, kept, extra)
        param.copy_(sharded_as(weight, param))
        if form.extra is not None and extra is not None:
            if form.extra in state:
                local(state[form.extra]).copy_(extra)
            else:
                state[form.extra] = sharded_as(extra, param)
        self._edits.see([param])
        self._awaiting.discard(param)

    @torch.no_grad()
    def master_of(self, param: Tensor) -> Tensor:
        """Return the FP32 value of a parameter, as a new tensor.

        **Cost**: 4 bytes a weight; a pass over the parameter.
        """
        if param.dtype in LOW and (held := self.state.get(param, {})):
            form = self._form_of(param)
            if form.extra in held:
                value = form.read(form.parts(local(param).detach(), local(held[form.extra])))
                return sharded_as(value, param) if is_distributed(param) else value.clone()
        return param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)

    @torch.no_grad()
    def settle_ties(self) -> None:
        """Keep every weight as a copy of this optimizer would that is only told its FP32 value.

        Beside a tie FP16 has two pairs of halves for one value, and an update may have left either. No value changes.

        **Cost**: a pass over weights in FP16.
        """
        for param, form in self._low():
            held = self.state.get(param, {})
            if param.dtype == torch.float16 and "remainder" in held:
                weight, extra = form.make(local(self.master_of(param)), param.dtype, None)
                if extra is not None:
                    local(param).copy_(weight)
                    local(held["remainder"]).copy_(extra)

    def release(self) -> dict[Tensor, Tensor]:
        """Give up the other halves of all weights, and return the FP32 values that had one."""
        held: dict[Tensor, Tensor] = {}
        for param, form in self._low():
            if form.extra is not None and form.extra in self.state.get(param, {}):
                held[param] = self.master_of(param)
                del self.state[param][form.extra]
        self._ready.clear()
        return held

    def leave(self) -> None:
        """Serve no session any more, with ``master=`` as it was before; weights that are FP32 by now need no half."""
        for _, param in self._pairs():
            for name in EXTRAS if param.dtype == torch.float32 else ():
                self.state.get(param, {}).pop(name, None)
        if self._joined is not None:
            for each, master in zip((self.defaults, *self.param_groups), self._joined.own, strict=True):
                each["master"] = master
            self._joined = None
        self._ready.clear()

    # State --------------------------------------------------------------------------------------

    def take_edits(self, params: Iterable[Tensor] | None = None) -> None:
        """Let full masters take over weights that were changed in place since the last step, as a step does first.

        Where ``master="split"`` an edited weight keeps its remainder, at most half a spacing of its dtype. What goes
        through ``param.data`` is not seen. No host sync.

        Args:
            params: Which weights; all when omitted.
        """
        looked_at = self._with_masters() if params is None else [p for p in params if "master" in self.state.get(p, {})]
        for param in self._edits.since(looked_at):
            take_over(local(param), local(self.state[param]["master"]))
            self._edits.see([param])

    def _with_masters(self) -> list[Tensor]:
        """Return the parameters that have a full master."""
        groups = [group for group in self.param_groups if group["master"] == "full"]
        params = [param for group in groups for param in group["params"] if param.dtype in LOW]
        kept = [self.state.get(param, {}).get("master") for param in params]
        pairs = zip(params, kept, strict=True)
        return [param for param, master in pairs if master is not None and master.shape == param.shape]

    def _complete(self) -> None:
        """In a session, make the state of every parameter that requires a gradient and has none yet."""
        if self._joined is not None:
            self._make_state()

    @torch.no_grad()
    def _make_state(self) -> None:
        for group in self.param_groups:
            training = [param for param in group["params"] if param.requires_grad and not is_lazy(param)]
            self._give_state(group, training, self.rule_of(group))

    def _give_state(self, group: Group, params: list[Tensor], update_rule: UpdateRule) -> None:
        """Make what parameters lack: a count that all new ones share, zeros, and the other half of a weight."""
        fresh: dict[torch.device, Tensor] = {}
        for param in params:
            state = self.state[param]
            missing = [name for name in update_rule.states if name not in state]
            # Momentum that is turned on in mid-run begins as the gradient itself, as torch's does: at a count of one.
            if "step" not in state or (missing and update_rule.name == "sgd"):
                state["step"] = fresh.setdefault(param.device, torch.zeros((), dtype=torch.int64, device=param.device))
            dtype = getattr(torch, group["state_dtype"])
            for name in missing:
                state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            form = self._storage(group, param)
            if form.extra is not None and form.extra not in state:
                with judged_together():  # a low-precision weight is never too large for its own dtype: no wait
                    extra = form.make(local(param).detach().float(), param.dtype, None)[1]
                assert extra is not None, "a storage with an extra makes one"
                state[form.extra] = sharded_as(extra, param)
                self._edits.see([param])


def _lost(params: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters of which some rank holds values that are too large: one host sync.

    Args:
        params: The parameters.
        counts: How many there are of each on this rank.
    """
    if not counts:
        return []
    flags = torch.stack([count.to(counts[0].device).ne(0) for count in counts])
    found = flags_of_all(flags, params).cpu().tolist()
    return [param for param, is_lost in zip(params, found, strict=True) if is_lost]
