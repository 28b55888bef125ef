"""What stands against preparing a model, found before anything is changed."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.jit import ScriptModule

from mezzo.cast.model.boundaries import Within
from mezzo.cast.model.outputs import GivesOut
from mezzo.cast.model.places import NORM, is_large, sharded_otherwise, stored_tensors
from mezzo.errors import (
    MezzoError,
    PolicyError,
    StateError,
    UnsupportedError,
    closest,
    nearest,
    raise_together,
    some_of,
)
from mezzo.hooks import owner_of
from mezzo.policy import Policy, Rule
from mezzo.policy.ops import OPS, QUANTISED, callables, functions
from mezzo.policy.rules import both, exact, matches
from mezzo.sharded import flags_of_all, is_distributed, local
from mezzo.tensors import CASTABLE, LOW, dtype_name
from mezzo.weights.halves import Halves
from mezzo.weights.models import Form, of_halves

# The autograd nodes that add up a parameter's gradients, and whether anything but the parameter keeps one.

_MARK: Final = "mezzo.cast.model.checks"


def marks(leaf: Tensor) -> dict[str, Any]:
    """Return what can be noted on a leaf's node; it is gone with the node, which dies at once if nothing keeps it."""
    node: Any = get_gradient_edge(leaf).node  # torch declares metadata as a method, and it is a property
    metadata: dict[str, Any] = node.metadata
    return metadata


def kept(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return those leaves whose nodes something keeps: the graph of a loss or an output, or a data-parallel wrapper.

    Args:
        leaves: Parameters; those that do not require a gradient have no such node.
    """
    alive = _alive([leaf for leaf in leaves if leaf.requires_grad])
    if alive:
        gc.collect()  # what is only part of a cycle is not kept by anything
        alive = _alive(alive)
    return alive


def _alive(leaves: list[Tensor]) -> list[Tensor]:
    for leaf in leaves:
        marks(leaf)[_MARK] = True
    return [leaf for leaf in leaves if marks(leaf).pop(_MARK, False)]


#: Modules whose forward is one call into C++, and the ops that a rule would not find there.
_ATOMIC: Final[dict[type[nn.Module], frozenset[str]]] = {
    **dict.fromkeys((nn.RNNBase, nn.RNNCellBase), frozenset("linear addmm mm tanh sigmoid relu mul add".split())),
    # With need_weights=False attention is one fused call; with weights its softmax is reached.
    nn.MultiheadAttention: frozenset({"softmax"}),
}
_NEVER_CALLED: Final = (nn.modules.linear.NonDynamicallyQuantizableLinear,)
_CONVERTS_NOTHING: Final = "O1 without rules for parameters, which converts nothing"


def require_module(model: Any) -> None:
    """Refuse to prepare what is no model."""
    if not isinstance(model, nn.Module):
        raise PolicyError(
            f"a model must be an nn.Module, not {type(model).__name__}",
            write='mezzo.prepare(model, "O1"): the model first, then the policy; one call for each model',
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """How a policy stores a model.

    Attributes:
        halves: The parameters that are stored in halves, each with the dtype of its high half.
        plain: The tensors that a policy gives a dtype, each with that.
    """

    halves: dict[nn.Parameter, torch.dtype] = field(default_factory=dict)
    plain: dict[Tensor, torch.dtype] = field(default_factory=dict)

    def moves(self) -> dict[Tensor, Form]:
        """Return the tensors that are stored otherwise now, each with the form that it is to have."""
        forms: dict[Tensor, Form] = {tensor: Form(dtype, True) for tensor, dtype in self.halves.items()}
        forms |= {tensor: Form(dtype, False) for tensor, dtype in self.plain.items()}
        return {tensor: form for tensor, form in forms.items() if form != Form.of(tensor)}


def wanted_storage(
    model: nn.Module,
    policy: Policy,
    *,
    converts: bool = False,
    expects_session: bool = False,
    came_as: Mapping[Tensor, torch.dtype] | None = None,
) -> Stored:
    """Decide every tensor's storage, or raise all that stands against the decision.

    Args:
        model: The model.
        policy: The policy.
        converts: Whether the decision is to be carried out: what stands against that is raised as well.
        expects_session: Whether a session is to find the model prepared, which it must be only once then.
        came_as: The dtypes that the tensors of a prepared model had before; each gets a storage then, and whether that
            loses values is asked by :func:`lost_by` alone.
    """
    if came_as is None and ((expects_session and preparations_in(model)) or _is_hooked(model)):
        raise StateError(
            "the model is prepared already",
            where=type(model).__name__,
            write="handle.remove() (or session.close()) before preparing it again;\n"
            "of models that share modules: one session, mezzo.MixedPrecision([first, second], optimizer, policy);\n"
            "of a copy, by copy.deepcopy or pickle: build the model anew and load_state_dict(copy.state_dict())",
        )
    raise_together([*unfit(model), *_idle_rules(model, policy)])
    problems: list[MezzoError] = []
    wanted: dict[Tensor, torch.dtype] = {}
    deciding: dict[Tensor, tuple[Rule | None, str]] = {}
    for tensor, path, module in stored_tensors(model):
        dtype, rule = policy.storage(path, path.rpartition(".")[0], is_norm=isinstance(module, NORM))
        before = deciding.get(tensor, (None, ""))
        if rule is not None and before[0] is not None and wanted[tensor] != dtype:
            problems.append(
                PolicyError(
                    f"the tied parameter {path} is given two storage dtypes",
                    where=f"{before[1]} by {before[0]}, {path} by {rule}",
                    write=f"one rule for both: {both(f'fp32_param={exact(before[1])}+{exact(path)}')}",
                )
            )
        if tensor not in wanted or rule is not None:
            wanted[tensor], deciding[tensor] = dtype, (rule, path)
    stored = _sorted(policy, wanted, {tensor: rule for tensor, (rule, _) in deciding.items()}, came_as)
    if converts:
        problems += sharded_otherwise(model, policy)
        if not problems and came_as is None:
            problems += _cannot_convert(model, policy, stored)
    raise_together(problems)
    return stored


def _sorted(
    policy: Policy,
    wanted: Mapping[Tensor, torch.dtype],
    rules: Mapping[Tensor, Rule | None],
    came_as: Mapping[Tensor, torch.dtype] | None,
) -> Stored:
    """Split tensors into those to store in halves, and those to store plainly."""
    stored = Stored()
    for tensor, dtype in wanted.items():
        before = tensor.dtype if came_as is None else came_as[tensor]
        rule = rules[tensor]
        by_name = rule is not None and rule.param is not None
        if policy.param_dtype != torch.float32:
            stored.plain[tensor] = dtype
        elif dtype in LOW and isinstance(tensor, nn.Parameter) and is_plain(tensor) and (by_name or is_large(tensor)):
            stored.halves[tensor] = dtype
        elif before in LOW and (rule is not None or policy.halves):
            stored.plain[tensor] = torch.float32  # it came low; other policies leave a model as it came
        elif came_as is not None:
            stored.plain[tensor] = before
    return stored


def is_plain(param: nn.Parameter) -> bool:
    """Whether a parameter is torch's own, or a DTensor of such: one of a class of its own is left as it is."""
    return type(param) is nn.Parameter or isinstance(param, Halves) or is_distributed(param)


def _is_hooked(model: nn.Module) -> bool:
    """Whether a model, or one in it, was prepared: not whether it shares a module with such a one."""
    hooks = [owner_of(hook) for module in model.modules() for hook in module._forward_hooks.values()]
    return any(
        isinstance(hook, GivesOut) or (isinstance(hook, Within) and hook.is_own and hook.path != "") for hook in hooks
    )


def out_of_reach(model: nn.Module, policy: Policy) -> Iterator[str]:
    """Return which rules cannot reach inside composites that torch runs as one kernel."""
    rules = [rule for rule in policy.rules if rule.treatment not in QUANTISED]  # which are for no such parts
    for rule in rules:
        for cls, parts in _ATOMIC.items():
            inside = sorted(set(rule.ops) & parts)
            candidates = [(path, module) for path, module in model.named_modules() if isinstance(module, cls)]
            paths = [path for path, module in candidates if _names_any(rule, module, path)]
            if inside and paths:
                yield (
                    f"the rule {rule} does not reach {', '.join(inside)} inside {some_of(paths)}: torch runs "
                    f"{cls.__name__} as one function; mezzo explain shows what it does"
                )


def _names_any(rule: Rule, module: nn.Module, path: str) -> bool:
    """Whether a rule is for a module, or for one inside it."""
    return rule.module is None or any(rule.matches_module(name) for name, _ in module.named_modules(prefix=path))


def changes_since(model: nn.Module) -> Iterator[StateError]:
    """Yield what stands against a session over a model that was prepared before."""
    if with_gradients := [path for path, param in model.named_parameters() if param.grad is not None]:
        yield StateError(
            "parameters of a prepared model hold gradients",
            where=some_of(with_gradients),
            why="they carry no loss scale, and were made before the session",
            write="optimizer.zero_grad(set_to_none=True) first",
        )


def unfit(model: nn.Module) -> Iterator[UnsupportedError]:
    """Yield what keeps a model from being trained in mixed precision, whatever the policy."""
    params = list(model.named_parameters())
    lazy = [name for name, p in params if isinstance(p, nn.parameter.UninitializedParameter)]
    wide = [f"{name} (float64)" for name, p in params if p.dtype == torch.float64]
    scripted = [path or type(m).__name__ for path, m in model.named_modules() if isinstance(m, ScriptModule)]
    for names, problem, why, write in (
        (lazy, "lazy parameters have no values yet",
         "there is nothing to store, and no shape to store it in",
         "model(one_batch) first, then prepare it"),
        (wide, "float64 parameters cannot be trained in mixed precision",
         "they are never cast, so every op that reads them would run in their own precision",
         "model.float() first, or leave this model outside mezzo"),
        (scripted, "torch.jit has compiled a module of the model",
         "hooks and casts of Python do not reach TorchScript",
         "the module without torch.jit.script or torch.jit.trace; or torch.compile(model)"),
    ):  # fmt: skip
        if names:
            yield UnsupportedError(problem, where=some_of(names), why=why, write=write)


def _idle_rules(model: nn.Module, policy: Policy) -> Iterator[PolicyError]:
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    modules = [name for name, _ in named]
    tensors = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    halved = [name for name, p in model.named_parameters(remove_duplicate=False) if is_plain(p) and p.dtype in CASTABLE]
    for rule in policy.rules:
        if rule.module is not None and not any(map(rule.matches_module, modules)):
            problem, near_name = f"the module glob {rule.module!r} matches no module", closest(rule.module, modules)
            is_param = rule.op is None and any(matches(name, rule.module) for name in tensors)
            meant = (
                f"{rule.treatment}_param={rule.module}"
                if is_param
                else near_name and replace(rule, module=exact(near_name))
            )
            yield _idle(problem, rule, nearest(rule.module, modules), meant)
        # Attention reads this projection's weight, and never calls it: a rule on the module would do nothing.
        silent = [name for name, m in named if rule.matches_module(name) and isinstance(m, _NEVER_CALLED)]
        if silent and not any(rule.matches_module(name.rpartition(".")[0]) for name in silent):
            parent = silent[0].rpartition(".")[0]
            yield PolicyError(
                f"the module glob {rule.module!r} matches a module that is never called",
                where=some_of(silent),
                why="attention reads its weight directly, so nothing would enter its region",
                write="; or ".join(
                    map(both, [f"fp32_module={exact(parent)}", f"fp32_param={exact(silent[0])}.weight"])
                ),
            )
        if rule.op is not None and not any(map(_can_be_called, (*rule.ops, rule.op))):
            problem, near_name = f"the op glob {rule.op!r} matches no op that could be cast", closest(rule.op, OPS)
            why = "views and what torch lacks are cast nowhere" if rule.ops else nearest(rule.op, OPS)
            yield _idle(problem, rule, why, near_name and not rule.ops and replace(rule, op=near_name))
        if rule.param is not None and any(map(rule.matches_param, tensors)):
            is_stored = any(map(rule.matches_param, halved)) or policy.param_dtype != torch.float32
            if rule.treatment == "low" and not is_stored:
                problem = f"the parameter glob {rule.param!r} matches nothing that can be stored in halves"
                why = "only floating parameters of torch's own class can; buffers are FP32"
                yield _idle(problem, rule, why, False)
        elif rule.param is not None:
            problem, near_name = (
                f"the parameter glob {rule.param!r} matches no parameter or buffer",
                closest(rule.param, tensors),
            )
            is_module = any(matches(name, rule.param) for name in modules)
            meant = (
                f"{rule.treatment}_module={rule.param}"
                if is_module
                else near_name and replace(rule, param=exact(near_name))
            )
            yield _idle(problem, rule, nearest(rule.param, tensors), meant)


def _idle(problem: str, rule: Rule, why: str, meant: Rule | str | bool) -> PolicyError:
    """Build the error of a rule that matches nothing in this model, with the rule that may be meant."""
    write = both(str(meant)) if meant else f"the policy without {rule}"
    return PolicyError(problem, where=f"rule {rule}", why=why, write=write)


def _can_be_called(op: str) -> bool:
    """Whether a rule may speak of an op: one that can be cast, or a classified one that this version of torch lacks."""
    return "::" in op or bool(functions(op)) or (op in OPS and not callables(op))


def _cannot_convert(model: nn.Module, policy: Policy, stored: Stored) -> Iterator[MezzoError]:
    """Yield the reasons why a model's tensors cannot be stored as a policy says.

    Args:
        model: The model that they are of.
        policy: The policy that says so.
        stored: How.

    **Cost**: a pass over the tensors, and one host sync.
    """
    names = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    plain = {tensor: dtype for tensor, dtype in stored.plain.items() if tensor.dtype != dtype}
    halves = {param: dtype for param, dtype in stored.halves.items() if not of_halves(param)}
    new_dtypes: dict[Tensor, torch.dtype] = dict((*plain.items(), *halves.items()))
    narrowed = {t: dtype for t, dtype in new_dtypes.items() if dtype not in (t.dtype, torch.float32) and not t.is_meta}
    if narrowed and (lost := _lost(narrowed)):
        yield do_not_fit([names[t] for t in lost], narrowed[lost[0]])
    converted = [t for t in new_dtypes if isinstance(t, nn.Parameter)]
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()) and converted:
        yield StateError(
            f"{policy.level} cannot convert a model that DistributedDataParallel already wraps",
            why="it knows the parameters as they were",
            write=f"prepare first, then DistributedDataParallel(model); or {_CONVERTS_NOTHING}",
        )
    elif dist.is_available() and dist.is_initialized() and (collected := kept(t for t in converted if is_alone(t))):
        yield StateError(
            f"{policy.level} cannot convert parameters whose gradients are collected already",
            where=some_of([names[t] for t in collected]),
            why="a wrapper around this model, such as DistributedDataParallel, was made for them as they were and "
            "would reduce no gradient;\nor a loss or output of an earlier forward pass is kept",
            write="prepare first, then DistributedDataParallel(model), and the session with the model inside;\n"
            f"del loss, output; or {_CONVERTS_NOTHING}",
        )
    if with_gradients := [names[t] for t in converted if t.grad is not None and is_alone(t)]:
        yield StateError(
            "parameters hold gradients from before they are converted",
            where=some_of(with_gradients),
            write="optimizer.zero_grad(set_to_none=True) first",
        )


def lost_by(model: nn.Module, stored: Stored) -> Iterator[MezzoError]:
    """Yield an error if tensors of a model have finite values that another storage would make infinite.

    **Cost**: a pass over what is stored otherwise then, a host sync, and an exchange of the ranks that hold shards.
    """
    names = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    narrowed = {t: to.dtype for t, to in stored.moves().items() if to.dtype in LOW and not t.is_meta}
    if narrowed and (lost := _lost(narrowed)):
        yield do_not_fit([names[t] for t in lost], narrowed[lost[0]])


def is_alone(tensor: Tensor) -> bool:
    """Whether a tensor is no DTensor, whose gradients torch's FSDP and tensor parallelism see to."""
    return not is_distributed(tensor)


def _lost(narrowed: Mapping[Tensor, torch.dtype]) -> list[Tensor]:
    """Return the tensors with finite values that would become infinite."""
    narrowed_tensors = [*narrowed]
    flags = [is_lost(local(t.detach()), dtype) for t, dtype in narrowed.items()]
    # Of a sharded one every rank knows its own part.
    are_lost = flags_of_all(
        torch.stack([flag.to(narrowed_tensors[0].device) for flag in flags]), narrowed_tensors
    ).tolist()
    return [t for t, is_so in zip(narrowed_tensors, are_lost, strict=True) if is_so]


def is_lost(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return, as a 0-d bool on the device, whether finite values would become infinite in a dtype."""
    return (values.isfinite() & ~values.to(dtype).isfinite()).any()


def preparations_in(model: nn.Module) -> list[Any]:
    """Return the handles of all models that :func:`mezzo.prepare` has prepared in this one, or of parts of them."""
    handles = (handle for module in model.modules() for handle in vars(module).get("_mezzo_prepared", ()))
    return list({id(handle): handle for handle in handles}.values())


def do_not_fit(names: Sequence[str], dtype: torch.dtype) -> UnsupportedError:
    """Build the error of values that a lower precision cannot hold.

    Args:
        names: Whose values; none where other ranks hold them.
        dtype: The precision.
    """
    name = names[0] if names else "…"
    return UnsupportedError(
        f"values do not fit {dtype_name(dtype)}",
        where=some_of(names) or "weights of another rank",
        why=f"they are beyond {torch.finfo(dtype).max:g} and would become infinite",
        write=f"{both(f'fp32_param={exact(name)}')}; or {both('O2,dtype=bfloat16')}",
    )
