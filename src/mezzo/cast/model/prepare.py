"""``prepare``: a model under a policy, converted and hooked, and put back."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mezzo import sharded
from mezzo.cast.device import Kinds
from mezzo.cast.model.buffers import Buffers, Frozen
from mezzo.cast.model.calls import GivesOut, MadeLow, TakesIn, Within
from mezzo.cast.model.mismatch import explain
from mezzo.cast.model.places import (
    NORM,
    RuledParams,
    called,
    made_weights,
    outermost,
    owned,
    region_paths,
    sharded_otherwise,
    stored_tensors,
)
from mezzo.cast.model.refusals import changes_since, out_of_reach, require_module, wanted_storage
from mezzo.cast.pins import PIN
from mezzo.cast.region import Region, autocast
from mezzo.compiling import compiled_inside_alone, forget_compiled
from mezzo.errors import StateError, printable, raise_together
from mezzo.policy import Policy, Rule
from mezzo.policy.ops import QUANTISABLE, QUANTISED
from mezzo.tensors import LOW, dtype_name
from mezzo.weights.halves import Halves, give, give_back
from mezzo.weights.models import show_fp32
from mezzo.weights.views import adopt

logger = logging.getLogger(__name__)


def prepare(model: nn.Module, policy: Policy | str | os.PathLike[str]) -> Prepared:
    """Apply a policy's module rules to a model and, in O2 and O3, store it in low precision.

    Parameters keep their identity (an optimizer built before stays valid, tied ones stay tied) and change
    their dtype. Norms with running statistics keep FP32 weights while ``policy.keep_batchnorm_fp32``, and FP32
    statistics always; weights that a parametrization makes are made in FP32. Other persistent floating buffers go low,
    until a forward pass writes them (:class:`Buffers`); non-persistent ones stay.

    A module that owns low parameters casts its floating inputs to their dtype, whatever calls it, and what ``model(…)``
    returns is FP32. So a part of the model, or any method, may be called by itself. Functions cast nothing: where FP32
    meets low in one, torch's error gets a note that names both tensors and what to write.

    A rule on a parameter speaks about the tensor that stands in its place when the model is called, so about those of
    ``torch.func.functional_call(model, …)`` too; not where only a submodule without a rule is called with others.

    Args:
        model: The model; changed in place, or not at all when this raises.
        policy: A policy, its text, or the path of a policy file.

    Low weights are stored in halves (:class:`mezzo.weights.Halves`), so that no bit is lost: state dicts hold FP32
    values, both ways, and copies are plain FP32 models. A model can be prepared before it is wrapped, and get its
    optimizer after: ``MixedPrecision(prepared, optimizer)``; or without a session, ``prepared.adopt(optimizer)``.

    Returns:
        A handle, whose ``autocast()`` is the region to run the model in and whose ``remove()`` undoes it.

    Raises:
        PolicyError: A rule whose module or parameter glob matches nothing; two rules that store one tied parameter
            differently.
        UnsupportedError: Parameters in float64 or another low precision; a device without the format.
        StateError: The model is prepared already, wrapped by DDP before conversion, or holds gradients.

    **Cost**: in O2 and O3 a hook on each module with weights that compares dtypes (below 1 µs), and 2 bytes a parameter
    for the low half, under O3 until an optimizer is adopted. Where the policy differs from torch on this device, two
    hooks on each module, some 2 µs a call, so that recomputed parts run in the policy's region again.

    Example:
        >>> import mezzo
        >>> from torch import nn
        >>> model = nn.Linear(4, 2)
        >>> handle = mezzo.prepare(model, "O2,dtype=bfloat16")
        >>> model.weight.dtype
        torch.bfloat16
        >>> handle.remove()
        >>> model.weight.dtype
        torch.float32
    """
    require_module(model)
    return Prepared(model, Policy.of(policy), waits=True)


class Prepared:
    """A model under a policy, as :func:`prepare` returns it.

    Args:
        model: The model.
        policy: The policy to prepare it with.
        tells: Whether rules that do not reach inside what they mean are logged.
        waits: Whether a session may come later, which finds the handle by its model.

    Attributes:
        model: The model.
        policy: The policy it was prepared with, and what the model's classes add to it.
        asked: That policy, as it was given.
        halves: Owns the FP32 values of what is stored low.
        in_session: Whether a session has adopted the model, and is not closed yet.
        kinds: The device types of its tensors, which its regions cover.
        params: The parameters that rules speak about.
        buffers: Those that a forward pass may write.
        frozen: Weights that were frozen when they were stored low.
    """

    def __init__(self, model: nn.Module, policy: Policy, *, tells: bool = True, waits: bool = False) -> None:
        require_module(model)
        self.asked, self.in_session, self._is_removed = policy, False, False
        policy = with_low_ends(model, with_pinned_classes(model, policy))
        self.model, self.policy = model, policy
        sharded.reshard(sharded.units(model))
        self._parts: dict[Tensor, sharded.Shard] = {part.param: part for part in sharded.shards(model)}
        storage = wanted_storage(model, policy, self._parts, waits=waits)
        self._storage = storage
        self._places = {t: (module, path.rpartition(".")[2]) for t, path, module in stored_tensors(model)}
        self.halves = Halves()
        self._widened: dict[Tensor, torch.dtype] = {}  # what came low, and is FP32 here
        for line in out_of_reach(model, policy) if tells else ():
            logger.warning("%s", printable(line))
        self._hooks: list[RemovableHandle] = []
        # Planning the regions may find that the device cannot honour the policy: before anything is changed.
        self.kinds = Kinds((*model.parameters(), *model.buffers()))
        self.params = RuledParams.of(model, policy)
        self._regions = [*self._plan_regions()]
        written = [] if policy.param_dtype == torch.float32 else [*self._maybe_written()]
        self.buffers = Buffers(written, self.halves)
        self.frozen = Frozen({})
        self._undo = ExitStack()
        try:
            self._carry_out()
            if waits:
                for module in model.modules():
                    handles = vars(module).setdefault("_mezzo_prepared", [])
                    handles.append(self)
                    self._undo.callback(_forget, module, handles, self)
        except BaseException:
            self.remove()
            raise

    def _carry_out(self) -> None:
        low = {t: dtype for t, dtype in self._storage.items() if dtype in LOW}
        self.halves.store(low)
        for tensor, dtype in self._storage.items():
            if dtype not in LOW and tensor.dtype != dtype:
                self._widened[tensor] = tensor.dtype
                give(tensor, tensor.data.to(dtype))
        frozen = ((name, p) for name, p in self.model.named_parameters() if p in low and not p.requires_grad)
        self.frozen = Frozen(dict(frozen))
        if not low.keys().isdisjoint(self._parts):
            sharded.refresh(self.model)
        self._undo.callback(show_fp32(self.model, self.halves))
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase) and low:
                module.flatten_parameters()
        self._hook()

    def _hook(self) -> None:
        policy, model = self.policy, self.model
        is_low = policy.param_dtype != torch.float32
        for module, within in self._regions:
            self._hooks.append(module.register_forward_pre_hook(within.enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(within.exit, always_call=True))
        for module, dtype in self._taking_in() if is_low else ():
            self._hooks.append(module.register_forward_pre_hook(TakesIn(dtype).enter, with_kwargs=True))
        for path, module in called(model) if is_low else ():
            if isinstance(module, ParametrizationList) and policy.module_rule(path) is None:
                self._hooks.append(module.register_forward_hook(GivesOut(policy.param_dtype).exit))
            if (names := made_weights(module)) and policy.module_rule(path) is None:
                self._hooks.append(module.register_forward_pre_hook(MadeLow(names, policy.param_dtype).enter))
        for module in {model, *self.buffers.owners()} if len(self.buffers) else ():
            self._hooks.append(module.register_forward_pre_hook(self.buffers.enter))
            self._hooks.append(module.register_forward_hook(self.buffers.exit, always_call=True))
        for module in outermost(model) if is_low or policy.output_dtype is not None else ():
            last = GivesOut(policy.output_dtype, self.explain, self.halves.settle)
            self._hooks.append(module.register_forward_pre_hook(last.enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(last.exit, always_call=True))
        if self._hooks:
            forget_compiled()

    def _plan_regions(self) -> Iterator[tuple[nn.Module, Within]]:
        """Yield the modules in which a region has something to do, the model itself first."""
        paths = region_paths(self.model, self.policy)
        low = self.policy.param_dtype != torch.float32
        for path, module in called(self.model):
            is_own = paths[path] == path and (path != "" or len(self.params) > 0)
            widens = low and not self.policy.keep_batchnorm_fp32 and isinstance(module, NORM)
            rule = self.policy.module_rule(path) if paths[path] else None
            dtype = torch.float32 if rule is not None and rule.treatment == "fp32" else self.policy.dtype
            within = Within(
                self.policy, path if widens else paths[path], self.params, self.kinds, is_own=is_own or widens,
                inputs=None if low or rule is None else dtype, widens_norm=widens,
            )  # fmt: skip
            if within.is_needed:
                yield module, within

    def _taking_in(self) -> Iterator[tuple[nn.Module, torch.dtype]]:
        """Yield the modules that cast their inputs, each with the dtype of what it computes with."""
        paths = region_paths(self.model, self.policy)
        for path, module in called(self.model):
            rule = self.policy.module_rule(path)
            own = owned(module)
            stored = {self._storage[param] for param in own if param in self._storage}
            if made_weights(module) or is_parametrized(module):
                stored.add(self.policy.param_dtype)
            if rule is not None and (stored or paths[path] == path):
                yield module, torch.float32 if rule.treatment == "fp32" else self.policy.dtype
            elif low := stored & {*LOW}:
                yield module, next(iter(low))

    def _maybe_written(self) -> Iterator[tuple[Tensor, nn.Module, str]]:
        """Yield the buffers that are stored low because no rule speaks about them."""
        for tensor, path, module in stored_tensors(self.model):
            is_buffer = not isinstance(tensor, nn.Parameter) and tensor in self._storage
            rule = self.policy.storage(path, path.rpartition(".")[0])[1]
            if is_buffer and self._storage[tensor] in LOW and (rule is None or rule.param is None):
                yield tensor, module, path

    def explain(self, error: BaseException) -> None:
        """Add to an error of torch's about dtypes what is known of it."""
        if self.policy.param_dtype != torch.float32:
            gathered = {*self.model.parameters()} if self._parts else set[Tensor]()
            explain(error, self.model, self.policy, {*self._storage, *gathered}, self.buffers.written)

    @compiled_inside_alone
    def autocast(self, *others: Prepared) -> autocast:
        """Return a region for this model's policy: what to run the forward pass and the loss in.

        Args:
            *others: Models prepared with the same policy, whose parameter rules the region knows as well.
        """
        every = (self, *others)
        kinds = tuple(dict.fromkeys(kind for each in every for kind in each.kinds()))
        known = RuledParams.known_of([each.params for each in every])
        if torch.compiler.is_compiling():
            if len(kinds) == 1 and not known.pinned and not known.memories:
                return autocast(self.policy, kinds[0])  # which knows how to be traced
            return autocast.of(Region.inside(self.policy, "", known, kinds))
        return _ModelRegion.around(Region.inside(self.policy, "", known, kinds), every)

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer update the FP32 values of the model's weights, without a session, until :meth:`remove`.

        ``optimizer.step()`` does it then: any of torch's optimizers sees FP32 views while it steps, mezzo's read and
        write both halves. Under a policy without masters (O3) low halves are given up, and it updates low weights.

        Args:
            optimizer: Over parameters of the model; schedulers and checkpoints go on as they do in torch.

        Raises:
            StateError: A session has the model, or the optimizer was adopted already.
            UnsupportedError: An optimizer that cannot see FP32: see :class:`mezzo.weights.views.Views`.

        Example:
            >>> import mezzo, torch
            >>> model = torch.nn.Linear(4, 2)
            >>> prepared = mezzo.prepare(model, "O2,dtype=bfloat16")
            >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            >>> prepared.adopt(optimizer)
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> optimizer.step()
            >>> optimizer.state[model.weight]["exp_avg"].dtype
            torch.float32
        """
        self.require_whole()
        self.keep_high_alone()
        self._undo.callback(adopt(optimizer, [self.halves]))

    def keep_high_alone(self) -> None:
        """Give up low halves where the policy keeps no masters."""
        if not self.policy.master_weights and self.policy.param_dtype != torch.float32:
            self.halves.drop()

    def require_whole(self) -> None:
        """Refuse a session where the model is not what it was prepared to be.

        Raises:
            StateError: Another session has it; it was removed; its tensors were cast or replaced, or hold gradients.
        """
        kind = type(self.model).__name__
        if self._is_removed:
            raise StateError("the preparation was removed", where=kind, write="mezzo.prepare(model, policy) again")
        if self.in_session:
            raise StateError(
                "the prepared model belongs to a session", where=kind, write="amp.close() of that one first"
            )
        sharded.reshard(sharded.units(self.model))
        self.follow()
        self.halves.settle()
        raise_together(changes_since(self.model, self.policy, self._storage))

    def follow(self) -> None:
        """Go over to the parts that ``fully_shard`` has put in the places of parameters since.

        Raises:
            MezzoError: It gathers them in other dtypes than the policy wants, or left some out.

        **Cost**: the first time, a copy of each part's low half.
        """
        parts: dict[Tensor, sharded.Shard] = {part.param: part for part in sharded.shards(self.model)}
        now = {t: module._parameters.get(name) for t, (module, name) in self._places.items()}
        moved = {t: part for t, part in now.items() if part is not None and part is not t and part in parts}
        if not moved:
            return
        storage = {moved.get(t, t): dtype for t, dtype in self._storage.items()}
        raise_together(sharded_otherwise(self.model, self.policy, storage, parts))
        self.halves.move({t: part for t, part in moved.items() if t in self.halves})
        self._storage, self._parts = storage, parts
        self._places = {moved.get(t, t): place for t, place in self._places.items()}
        self.params.find_gathered(self.model)

    def join(self) -> None:
        """Belong to a session, until :meth:`leave`."""
        self.in_session = True

    def leave(self) -> None:
        """Be as :func:`prepare` has returned it: another session may come, or :meth:`remove`."""
        self.in_session = False

    def remove(self) -> None:
        """Take the hooks off and store every tensor in the dtype it had, with all bits where nothing was written to it.

        Adopted optimizers are as they were built. Called again after an interrupt, it finishes what is left.

        Raises:
            StateError: A session has the model, and would go on without it.
        """
        if self.in_session:
            raise StateError(
                "the prepared model belongs to a session",
                where=type(self.model).__name__,
                write="amp.close(), then prepared.remove()",
            )
        self.follow()
        self._is_removed = True
        self._undo.close()
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            forget_compiled()
        self._hooks.clear()
        self.buffers.remove()
        is_sharded = any(tensor in self._parts for tensor in self.halves)
        self.halves.remove()
        for tensor, dtype in self._widened.items():
            give_back(tensor, tensor.data.to(dtype))
        self._widened.clear()
        if is_sharded:
            sharded.refresh(self.model)


class _ModelRegion(autocast):
    """The region around calls of models: what leaves it is explained, and what was written in it is noticed."""

    _models: tuple[Prepared, ...]

    @classmethod
    def around(cls, region: Region, models: tuple[Prepared, ...]) -> _ModelRegion:
        """Return what enters a region for some models."""
        made = cast(_ModelRegion, cls.of(region))
        made._models = models
        return made

    @compiled_inside_alone
    def __enter__(self) -> autocast:
        for each in self._models:
            each.halves.settle()
            each.buffers.note()
            each.frozen.look()
        return super().__enter__()

    @compiled_inside_alone
    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for each in self._models:
            each.buffers.settle()
            if len(exception) > 1 and exception[1] is not None:
                each.explain(exception[1])

    def _recreate_cm(self) -> _ModelRegion:
        return _ModelRegion.around(self.region, self._models)


def _forget(module: nn.Module, handles: list[Prepared], mine: Prepared) -> None:
    handles.remove(mine)
    if not handles:
        vars(module).pop("_mezzo_prepared", None)


def with_pinned_classes(model: nn.Module, policy: Policy) -> Policy:
    """Store modules of classes that ``@mezzo.fp32`` pins in FP32, unless a rule of the policy says otherwise."""
    if policy.param_dtype == torch.float32:
        return policy
    pinned = [path for path, module in model.named_modules() if path and getattr(type(module), PIN, None) == "fp32"]
    rules = (Rule("fp32", module=path, reason="its class is pinned by @mezzo.fp32") for path in pinned)
    said = {rule.selector for rule in policy.rules}
    return policy.evolve(rules=(*policy.rules, *(rule for rule in rules if rule.selector not in said)))


def with_low_ends(model: nn.Module, policy: Policy) -> Policy:
    """Keep products of a model's first and last layer in the policy's dtype, unless a glob other than ``*`` names them.

    Layers are modules with a matrix of their own, an embedding among them, in the order in which the model has them.

    References:
        Micikevicius et al. 2022 (FP8), section 4; arXiv 2509.25149 (NVFP4), section 4: both keep them.
    """
    if not any(rule.treatment in QUANTISED for rule in policy.rules):
        return policy
    layers = [path for path, module in model.named_modules() if path and any(p.dim() > 1 for p in owned(module))]
    ends = {layers[-1]: "last", layers[0]: "first"} if layers else {}
    rules = []
    for layer, end in ends.items():
        names = [name for name, _ in model.get_submodule(layer).named_parameters(layer, recurse=False)]
        by_param = [rule for name in names if (rule := policy.product_rule(name)) is not None]
        deciding = {op: policy.explain(op, layer).rule for op in QUANTISABLE}
        asked = [*by_param, *(rule for rule in deciding.values() if rule and rule.treatment in QUANTISED)]
        if all(rule.module in (None, "*") and rule.param in (None, "*") for rule in asked):
            why = f"the {end} layer stays in {dtype_name(policy.dtype)}, unless a rule names it"
            low = [op for op, rule in deciding.items() if by_param or rule in asked]
            rules += [Rule("low", op=op, module=layer, reason=why) for op in low]
    said = {rule.selector for rule in policy.rules}
    return policy.evolve(rules=(*(rule for rule in rules if rule.selector not in said), *policy.rules))
