"""``prepare``: a model under a policy, converted and hooked, and put back."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo import sharded
from mezzo.cast.model.boundaries import HeldRegion, TakesIn, Within, keep_dtypes
from mezzo.cast.model.checks import Stored, changes_since, out_of_reach, require_module, wanted_storage
from mezzo.cast.model.outputs import GivesOut
from mezzo.cast.model.places import (
    Devices,
    RuledParams,
    called_modules,
    entry_modules,
    own_params,
    region_paths,
    ruled_fp32,
    stored_tensors,
)
from mezzo.cast.model.storing import store_as
from mezzo.cast.pins import PIN
from mezzo.cast.region import Region, autocast
from mezzo.compiling import compiled_inside_alone, forget_compiled
from mezzo.errors import StateError, printable, raise_together
from mezzo.policy import Policy, PolicyLike, Rule
from mezzo.policy.ops import QUANTISABLE, QUANTISED
from mezzo.policy.rules import exact
from mezzo.sharded import restore_data, set_data
from mezzo.tensors import LOW, dtype_name
from mezzo.weights.exports import mark_fp32
from mezzo.weights.models import halves, hide_storage, of_halves, store, store_plainly

logger = logging.getLogger(__name__)

#: The handle of each model that was prepared, a session's too.
_HANDLES: Final[weakref.WeakKeyDictionary[nn.Module, weakref.ref[Prepared]]] = weakref.WeakKeyDictionary()


def prepare(model: nn.Module, policy: PolicyLike) -> Prepared:
    """Apply a policy's module and parameter rules to a model and, in O2, store its weights in halves.

    Under O2 every parameter is FP32 to everybody as before, and stays the object that it is. Those with two or more
    dimensions longer than one are stored in two halves (:class:`mezzo.weights.Halves`), of which products read the high
    one without a cast; smaller ones, those of a class of their own, and buffers are plain, unless ``low_param=`` and
    ``fp32_param=`` say otherwise. :func:`mezzo.weights.halves` tells how many bytes lie where. Optimizers, checkpoints,
    averages and wrappers need no case of their own. Under O3 it is ``model.to(dtype)`` but for what rules keep in FP32.

    A rule on a parameter speaks about the tensor that stands in its place when the model is called, so about those of
    ``torch.func.functional_call(model, …)`` too; not where only a submodule without a rule is called with others.

    Args:
        model: The model; changed in place, or not at all when this raises.
        policy: A policy, its text, a dtype (O1 in it), or the path of a policy file.

    A model can be prepared before it is wrapped, and get its optimizer after: ``MixedPrecision(prepared, optimizer)``.

    Returns:
        A handle, whose ``autocast()`` is the region to run the model in and whose ``remove()`` undoes it.

    Raises:
        PolicyError: A rule whose module or parameter glob matches nothing; two rules that store one tied parameter
            differently.
        UnsupportedError: Parameters in float64; weights beyond FP16's range; a device without the format.
        StateError: The model is prepared already, wrapped by DDP before conversion, or holds gradients.

    **Cost**: in O2 4 bytes for a weight that is stored in halves, as for one that is not. Where the policy differs from
    torch on this device, two hooks on each module, some 2 µs a call, so that recomputed parts run in the policy's
    region again.

    Example:
        >>> import mezzo
        >>> from torch import nn
        >>> model = nn.Linear(4, 2)
        >>> handle = mezzo.prepare(model, "O2,dtype=bfloat16")
        >>> model.weight.dtype, model.weight.hi.dtype, model.weight.lo.dtype
        (torch.float32, torch.bfloat16, torch.int16)
        >>> handle.remove()
        >>> type(model.weight)
        <class 'torch.nn.parameter.Parameter'>
    """
    require_module(model)
    return Prepared(model, Policy.of(policy), expects_session=True)


def handle_of(model: nn.Module) -> Prepared | None:
    """Return the handle of a model that is prepared, by :func:`prepare` or for a session; ``None`` for others."""
    handle = _HANDLES[model]() if model in _HANDLES else None
    return None if handle is None or handle.is_removed else handle


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preparation:
    """How a policy is carried out on a model: planned, and nothing of the model changed.

    Attributes:
        given_policy: The policy, as it was given.
        policy: The policy with what the model's classes add to it, and its low ends.
        storage: How the model's tensors are stored.
        params: The parameters that rules speak about.
        regions: The modules in which a region has something to do, the model itself first.
    """

    given_policy: Policy
    policy: Policy
    storage: Stored
    params: RuledParams
    regions: list[tuple[nn.Module, Within]]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        given_policy: Policy,
        devices: Devices,
        *,
        expects_session: bool = False,
        came_as: Mapping[Tensor, torch.dtype] | None = None,
    ) -> Preparation:
        """Plan it, or raise all that stands against it.

        Args:
            model: The model.
            given_policy: The policy.
            devices: The devices of the model's tensors.
            expects_session: Whether a session is to find the model prepared.
            came_as: Of a model that is prepared already, and is to be under another policy: the dtypes that its tensors
                had before. Nothing is asked of other ranks then, and of values.
        """
        policy = with_low_ends(model, with_pinned_classes(model, as_named(model, given_policy)))
        storage = wanted_storage(model, policy, converts=True, expects_session=expects_session, came_as=came_as)
        # Planning the regions may find that the device cannot honour the policy: before anything is changed.
        params = RuledParams.of(model, policy, gathers=came_as is None)
        regions = [*_planned_regions(model, policy, params, devices)]
        return cls(given_policy=given_policy, policy=policy, storage=storage, params=params, regions=regions)


class Prepared:
    """A model under a policy, as :func:`prepare` returns it.

    Args:
        model: The model.
        policy: The policy to prepare it with.
        logs_unreached_rules: Whether rules that do not reach inside what they mean are logged.
        expects_session: Whether a session may come later, which finds the handle by its model.

    Attributes:
        model: The model.
        in_session: Whether a session has the model, and is not closed yet.
        is_removed: Whether :meth:`remove` was called.
        devices: The devices of its tensors, which its regions cover.
        plan: How the policy is carried out.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, *, logs_unreached_rules: bool = True, expects_session: bool = False
    ) -> None:
        require_module(model)
        self.model, self.in_session, self.is_removed = model, False, False
        sharded.reshard(sharded.units(model))
        self.devices = Devices(model)
        self.plan = Preparation.of(model, policy, self.devices, expects_session=expects_session)
        self._draws = torch.zeros((), dtype=torch.int64)  # of products below sixteen bits, under former policies
        self._before: dict[Tensor, Tensor] = {}  # what O3 has rounded, until nothing can fail any more
        self._dtypes: dict[Tensor, torch.dtype] = {}  # that tensors go back to
        self._dtypes_at: dict[str, torch.dtype] = {}  # and those that took their places: model.to() makes new buffers
        for line in out_of_reach(model, self.policy) if logs_unreached_rules else ():
            logger.warning("%s", printable(line))
        self._hooks: list[RemovableHandle] = []
        self._first_hook = RemovableHandle(OrderedDict()).id  # those of before have smaller numbers
        self._region_models: tuple[Prepared, ...] | None = None  # the models whose parameters its region knows as well
        self._entered, self._undo = ExitStack(), ExitStack()
        try:
            self._store()
            self._enter()
            if expects_session:
                for module in model.modules():
                    handles = vars(module).setdefault("_mezzo_prepared", [])
                    handles.append(self)
                    self._undo.callback(_forget, module, handles, self)
                self.keep_conversion()
        except BaseException:
            self.remove()
            raise
        _HANDLES[model] = weakref.ref(self)

    def __repr__(self) -> str:
        return f"<mezzo.prepare({type(self.model).__name__}, {str(self.given_policy)!r}): {halves(self.model)}>"

    @property
    def policy(self) -> Policy:
        """The policy that is carried out: with what the model's classes add to it."""
        return self.plan.policy

    @property
    def given_policy(self) -> Policy:
        """The policy, as it was given."""
        return self.plan.given_policy

    @property
    def params(self) -> RuledParams:
        """The parameters that rules speak about."""
        return self.plan.params

    # Carrying out -----------------------------------------------------------------------------------------

    def _store(self) -> None:
        names, storage = {param: name for name, param in self.model.named_parameters()}, self.plan.storage
        self._dtypes.update({param: param.dtype for param in storage.halves if param.dtype in LOW})
        store(storage.halves, names)
        for tensor, dtype in storage.plain.items():
            if tensor.dtype != dtype:
                self._before[tensor], self._dtypes[tensor] = tensor.data, tensor.dtype
                set_data(tensor, tensor.data.to(dtype))
        self._dtypes_at = {path: self._dtypes[it] for it, path, _ in stored_tensors(self.model) if it in self._before}
        if storage.halves or self._dtypes:
            sharded.refresh(self.model)
            self.params.find_gathered(self.model)

    def keep_conversion(self) -> None:
        """Free the original values, which undo a conversion bit for bit: no later step of it can raise."""
        self._before.clear()
        if self.policy.halves:  # whose weights have more bits from here on than a model that came low
            self._dtypes.clear()
            self._dtypes_at.clear()

    def _enter(self) -> None:
        """Carry the policy out on the model's modules."""
        policy, model, self._region_models = self.policy, self.model, None
        self._halves = {}
        for name, param in model.named_parameters():
            if param in self.plan.storage.halves:
                self._halves[name] = self.plan.storage.halves[param]
        self._entered.callback(mark_fp32(ruled_fp32(model, policy)))
        self._entered.callback(hide_storage(model, is_low=policy.param_dtype in LOW))
        if policy.casts:
            self._entered.callback(keep_dtypes(self))
        tables: list[Any] = []
        for module in model.modules():
            tables += module._forward_pre_hooks, module._forward_hooks
        later_hooks = [[number for number in table if number > self._first_hook] for table in tables]
        for module, within in self.plan.regions:
            within.begin(module)
        for module, dtype in self._taking_in() if policy.param_dtype != torch.float32 else ():
            self._hooks.append(module.register_forward_pre_hook(TakesIn(dtype).enter, with_kwargs=True))
        out = policy.output_dtype
        for module, last in () if out is None else ((module, GivesOut(out)) for module in entry_modules(model)):
            self._hooks.append(module.register_forward_pre_hook(last.enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(last.exit))
        for table, numbers in zip(tables, later_hooks, strict=True):
            for number in numbers:  # what came after the first policy's hooks comes after another's, too
                table.move_to_end(number)
        self._forget_compiled()

    def _leave(self) -> None:
        """Undo what :meth:`_enter` did."""
        self._entered.close()
        for hook in self._hooks:
            hook.remove()
        for _, within in self.plan.regions:
            within.end()
        self._forget_compiled()
        self._hooks.clear()

    def _forget_compiled(self) -> None:
        if self._hooks or self.plan.regions or self.plan.storage.halves:
            forget_compiled()

    def _taking_in(self) -> Iterator[tuple[nn.Module, torch.dtype]]:
        """Yield the modules of an O3 model that cast their inputs, each with the dtype of what it computes with."""
        paths, plain = region_paths(self.model, self.policy), self.plan.storage.plain
        for path, module in called_modules(self.model):
            rule = self.policy.module_rule(path)
            stored = {plain[param] for param in own_params(module) if param in plain}
            if rule is not None and (stored or paths[path] == path):
                yield module, torch.float32 if rule.treatment == "fp32" else self.policy.dtype
            elif low_dtypes := stored & {*LOW}:
                yield module, next(iter(low_dtypes))

    # Another policy -------------------------------------------------------------------------------------------

    def came_as(self) -> dict[Tensor, torch.dtype]:
        """Return the dtypes that the model's tensors go back to; FP32 of those in halves, which have all its bits."""
        came_as = {tensor: self._dtypes_at.get(path, tensor.dtype) for tensor, path, _ in stored_tensors(self.model)}
        return came_as | {tensor: dtype for tensor, dtype in self._dtypes.items() if tensor in came_as}

    def change(self, plan: Preparation, undo: ExitStack) -> None:
        """Carry out another plan from now on; tensors and modules stay the same objects.

        Args:
            plan: What :meth:`Preparation.of` has made of :meth:`came_as`, for this model.
            undo: Gets what undoes it, in the order in which it was done: also where this raises.

        Raises:
            UnsupportedError: Something in C++ refers to a tensor that is to be stored otherwise.

        **Cost**: a pass over each tensor that is stored otherwise from now on. Those that lose bits are kept until
        ``undo`` is dropped.
        """
        before, dtypes = self.plan, (self._dtypes, self._dtypes_at)

        def go_back() -> None:
            self.plan, (self._dtypes, self._dtypes_at) = before, dtypes
            self._enter()

        came_as = self.came_as()
        undo.callback(go_back)
        self._leave()
        undo.callback(sharded.refresh, self.model)
        store_as(plan.storage, self.model, undo)
        undo.callback(self._leave)
        sharded.refresh(self.model)
        self.plan = plan
        lowered = [(it, path) for it, path, _ in stored_tensors(self.model) if it.dtype != came_as[it]]
        self._dtypes = {} if plan.policy.halves else {tensor: came_as[tensor] for tensor, _ in lowered}
        self._dtypes_at = {} if plan.policy.halves else {path: came_as[tensor] for tensor, path in lowered}
        self._enter()

    def remember(self, before: Preparation) -> None:
        """Load what products below sixteen bits have remembered under the plan before.

        Histories go on where they are as long, and random draws: no noise comes twice.
        """
        memory, now = before.params.memory, self.params.memory
        if memory is not None:
            self._draws = memory.draws
        if now is not None:
            histories = dict[int, Tensor]()
            if memory is not None and memory.history.shape[-1] == now.history.shape[-1]:
                histories = {id(weight): history for weight, history in memory.histories()}
            now.load(histories, int(self._draws))

    @compiled_inside_alone
    def autocast(self, *others: Prepared) -> autocast:
        """Return a region for this model's policy: what to run the forward pass and the loss in.

        Args:
            *others: Models prepared with the same policy, whose parameter rules the region knows as well.
        """
        if torch.compiler.is_compiling():
            device_types = tuple(
                dict.fromkeys(device_type for handle in (self, *others) for device_type in handle.devices.kinds())
            )
            facts = RuledParams.facts_of([handle.params for handle in (self, *others)])
            if len(device_types) == 1 and not facts.pinned and not facts.memories:
                return autocast(self.policy, device_types[0])  # which knows how to be traced
            return autocast.of(Region.inside(self.policy, "", facts, device_types))
        if self._region_models is None or others != self._region_models:
            handles = (self, *others)
            self._region = HeldRegion(self.policy, "", [e.params for e in handles], [e.devices for e in handles])
            self._region_models = others
        return autocast.of(self._region.now())

    def prepare_for_session(self) -> None:
        """Refuse a session where the model is not what it was prepared to be.

        Raises:
            StateError: Another session has it; it was removed; its tensors were cast or replaced, or hold gradients.
        """
        model_name = type(self.model).__name__
        if self.is_removed:
            raise StateError(
                "the preparation was removed", where=model_name, write="mezzo.prepare(model, policy) again"
            )
        if self.in_session:
            raise StateError(
                "the prepared model belongs to a session", where=model_name, write="amp.close() of that one first"
            )
        sharded.reshard(sharded.units(self.model))
        self.convert_shards()
        raise_together(changes_since(self.model))

    def convert_shards(self) -> None:
        """Store in halves the shards by which ``fully_shard`` has replaced parameters since."""
        names = {param: name for name, param in self.model.named_parameters()}
        parts = {param: self._halves[name] for param, name in names.items() if name in self._halves}
        parts = {param: dtype for param, dtype in parts.items() if sharded.is_distributed(param)}
        if not all(map(of_halves, parts)):
            store(parts, names)
            sharded.refresh(self.model)
        self.params.find_gathered(self.model)

    def join(self) -> None:
        """Mark the model as a session's, until :meth:`leave`."""
        self.in_session = True
        self.keep_conversion()

    def leave(self) -> None:
        """Release the model from its session: another one may take it, or :meth:`remove`."""
        self.in_session = False

    def remove(self) -> None:
        """Remove the hooks and store every tensor plainly, in the dtype it had; in O2 in FP32, bit for bit.

        Called again after an interrupt, it finishes what is left.

        Raises:
            StateError: A session has the model, and would go on without it.
        """
        if self.in_session:
            raise StateError(
                "the prepared model belongs to a session",
                where=type(self.model).__name__,
                write="amp.close(), then prepared.remove()",
            )
        self.is_removed = True
        self._undo.close()
        self._leave()
        if self.plan.storage.halves:
            store_plainly(self.model.parameters())
        for tensor, dtype in self._dtypes.items():
            restore_data(tensor, self._before.get(tensor, tensor.data).to(dtype))
        for tensor, path, _ in stored_tensors(self.model):
            if tensor not in self._dtypes and tensor.dtype != (dtype := self._dtypes_at.get(path, tensor.dtype)):
                restore_data(tensor, tensor.data.to(dtype))
        if self.plan.storage.halves or self._dtypes:
            sharded.refresh(self.model)
        self._dtypes.clear()
        self._dtypes_at.clear()


def _planned_regions(
    model: nn.Module, policy: Policy, params: RuledParams, devices: Devices
) -> Iterator[tuple[nn.Module, Within]]:
    """Yield the modules in which a region has something to do, the model itself first."""
    paths = region_paths(model, policy)
    is_low = policy.param_dtype != torch.float32
    for path, module in called_modules(model):
        is_own = paths[path] == path and (path != "" or len(params) > 0)
        rule = policy.module_rule(path) if paths[path] else None
        dtype = torch.float32 if rule is not None and rule.treatment == "fp32" else policy.dtype
        within = Within(
            policy, path, paths[path], params, devices, is_own=is_own,
            inputs=None if is_low or rule is None else dtype,
        )  # fmt: skip
        if within.is_needed:
            yield module, within


def _forget(module: nn.Module, handles: list[Prepared], mine: Prepared) -> None:
    handles.remove(mine)
    if not handles:
        vars(module).pop("_mezzo_prepared", None)


def as_named(model: nn.Module, policy: Policy) -> Policy:
    """Read globs that spell the name of a module or parameter, brackets and all, as that name."""
    modules = [path for path, _ in model.named_modules(remove_duplicate=False)]
    tensors = [path for _, path, _ in stored_tensors(model)]
    rules = tuple(rule.as_named(modules, tensors) for rule in policy.rules)
    return policy if rules == policy.rules else policy.evolve(rules=rules)


def with_pinned_classes(model: nn.Module, policy: Policy) -> Policy:
    """Store modules of classes that ``@mezzo.fp32`` pins in FP32, unless a rule of the policy says otherwise."""
    if policy.param_dtype == torch.float32 and not policy.halves:
        return policy
    pinned = [path for path, module in model.named_modules() if path and getattr(type(module), PIN, None) == "fp32"]
    rules = (Rule("fp32", module=exact(path), reason="its class is pinned by @mezzo.fp32") for path in pinned)
    selectors = {rule.selector for rule in policy.rules}
    return policy.evolve(rules=(*policy.rules, *(rule for rule in rules if rule.selector not in selectors)))


def with_low_ends(model: nn.Module, policy: Policy) -> Policy:
    """Keep products of a model's first and last layer in the policy's dtype, unless a glob other than ``*`` names them.

    Layers are modules with a matrix of their own, an embedding among them, in the order in which the model has them.

    References:
        Micikevicius et al. 2022 (FP8), section 4; arXiv 2509.25149 (NVFP4), section 4: both keep them.
    """
    if not any(rule.treatment in QUANTISED for rule in policy.rules):
        return policy
    layers = [path for path, module in model.named_modules() if path and any(p.dim() > 1 for p in own_params(module))]
    end_layers = {layers[-1]: "last", layers[0]: "first"} if layers else {}
    rules = []
    for layer, position in end_layers.items():
        names = [name for name, _ in model.get_submodule(layer).named_parameters(layer, recurse=False)]
        by_param = [rule for name in names if (rule := policy.product_rule(name)) is not None]
        deciding = {op: policy.explain(op, layer).rule for op in QUANTISABLE}
        rules_asking_low = [*by_param, *(rule for rule in deciding.values() if rule and rule.treatment in QUANTISED)]
        if all(rule.module in (None, "*") and rule.param in (None, "*") for rule in rules_asking_low):
            why = f"the {position} layer stays in {dtype_name(policy.dtype)}, unless a rule names it"
            low_ops = [op for op, rule in deciding.items() if by_param or rule in rules_asking_low]
            rules += [Rule("low", op=op, module=exact(layer), reason=why) for op in low_ops]
    selectors = {rule.selector for rule in policy.rules}
    return policy.evolve(rules=(*(rule for rule in rules if rule.selector not in selectors), *policy.rules))
