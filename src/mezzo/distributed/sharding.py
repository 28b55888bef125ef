"""``fully_shard``: torch's, in the dtypes that a policy says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from mezzo.cast.model.checks import preparations_in, require_module, wanted_storage
from mezzo.cast.model.places import has_forward
from mezzo.cast.model.prepare import Prepared, as_named, with_pinned_classes
from mezzo.errors import MezzoError, PolicyError, UnsupportedError, nearest, raise_together, shown, some_of
from mezzo.policy import Policy, PolicyLike
from mezzo.policy.rules import both, exact
from mezzo.sharded import units
from mezzo.tensors import LOW, dtype_name

M = TypeVar("M", bound=nn.Module)
Classes: TypeAlias = type[nn.Module] | Iterable[type[nn.Module]]


def fully_shard(model: M, policy: PolicyLike, *, wrap: Classes | None = None, **kwargs: Any) -> M:
    """Shard a model's parameters over ranks, as ``torch.distributed.fsdp.fully_shard`` does, in a policy's dtypes.

    Each rank keeps a part of every parameter; what a forward or backward pass needs is gathered, and let go. Under O2 a
    session stores each part in halves, and the high half is gathered, without a cast, whatever the optimizer. The low
    half follows where something reads FP32 values of a weight: an embedding, a norm by hand, calls outside of regions.
    That is a collective, in which all ranks that hold parts take part, as in all that is gathered. What is computed is
    what O1 computes over FP32 parts. Small parameters travel in FP32 in the same gather. Under O3 modules whose
    parameters stay FP32 are gathered apart. Inputs and outputs are cast by :class:`mezzo.MixedPrecision` or
    :func:`mezzo.prepare`: first ``fully_shard``, then the optimizer, then the session.

    Gradients are summed over ranks, and over the micro-batches of ``no_sync()``, in FP32. Beside tensor parallelism,
    ``parallelize_module`` comes first, over one axis of a mesh, and ``mesh=`` is the other.

    Args:
        model: The model, on any device; on the meta device its parts have no memory until ``model.to_empty(…)``.
        policy: A policy, its text, or the path of a policy file; the same on all ranks.
        wrap: The class of the modules to gather by themselves, so that only one of them is whole at a time, or several
            classes. When omitted, the children of the ``ModuleList`` that holds most.
        **kwargs: As torch's takes them, for every module: ``mesh``, ``reshard_after_forward``, ``shard_placement_fn``,
            ``offload_policy``, ``ignored_params``; but no ``mp_policy``, which follows from the policy.

    Returns:
        The model, whose parameters are ``DTensor`` now.

    Raises:
        PolicyError: A ``wrap`` or rule that matches nothing.
        TypeError: ``mp_policy``.
        UnsupportedError: Parameters of one module that O3 stores in two dtypes.
        StateError: The model is wrapped or prepared in a way that does not go with it.

    **Cost**: for each module in ``wrap``, each that O3 keeps in FP32, and the model, one all-gather before its forward
    and one before its backward pass, under O2 half the bytes of what is stored in halves, and of what is read in FP32
    one more for its low half; and one reduce-scatter in FP32. Without ``wrap`` and ``ModuleList`` the whole model is
    gathered at once.

    Example:
        >>> import mezzo, torch
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        >>> model = mezzo.fully_shard(model, "O2,dtype=bfloat16", wrap=torch.nn.Linear)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16")
        >>> with amp.autocast():
        ...     loss = model(torch.ones(4, 8)).square().mean()
        >>> amp.backward(loss)
        >>> bool(amp.step().skipped)
        False
        >>> torch.distributed.destroy_process_group()

    References:
        Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, VLDB 2023.
    """
    from torch.distributed.fsdp import fully_shard as plain

    require_module(model)
    given_policy = Policy.of(policy)
    policy = with_pinned_classes(model, as_named(model, given_policy))
    prepared: list[Prepared] = preparations_in(model)
    raise_together(_other_policy_errors(prepared, given_policy))
    storage = {} if prepared else wanted_storage(model, policy).plain  # which a preparation has carried out
    for unit in plan_units(model, storage, policy.param_dtype, modules_to_wrap(model, wrap)):
        plain(unit.module, mp_policy=_dtypes(unit.dtype), **kwargs)
    for handle in prepared:
        handle.convert_shards()
    return model


def _dtypes(dtype: torch.dtype) -> Any:
    """Return what torch is told of parameters that are gathered in a dtype.

    Inputs of inner modules stay as they are: what a policy casts, it casts where the model is entered.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    low = dtype in LOW
    return MixedPrecisionPolicy(dtype if low else None, torch.float32 if low else None, cast_forward_inputs=False)


def _other_policy_errors(handles: list[Prepared], policy: Policy) -> Iterator[MezzoError]:
    for handle in handles:
        if handle.given_policy != policy:
            yield PolicyError(
                "the model was prepared with another policy",
                where="\n".join([type(handle.model).__name__, *handle.given_policy.differences(policy)]),
                why="prepared → fully_shard",
                write="the same policy for both, or prepared.remove() first",
            )


# Modules that are gathered by themselves: those that a user asks for -----------------------------------------


def modules_to_wrap(model: nn.Module, wrap: Classes | None) -> set[nn.Module]:
    """Return the modules that a user wants to be gathered by themselves.

    Args:
        model: The model.
        wrap: See :func:`fully_shard`.

    Raises:
        PolicyError: No class, or one that no module of the model has.
    """
    if wrap is None:
        return _blocks(model)
    classes, modules = (wrap,) if isinstance(wrap, type | str) else tuple(wrap), list(model.modules())
    if wrong := [shown(cls) for cls in classes if not isinstance(cls, type)]:
        raise PolicyError("wrap= takes classes of modules", where=some_of(wrong), write="wrap=Block, or [Block, Head]")
    class_names = dict.fromkeys(type(module).__name__ for module in modules)
    raise_together(
        PolicyError(
            f"no module of the model is a {cls.__name__}", where="wrap=", why=nearest(cls.__name__, class_names)
        )
        for cls in classes
        if not any(isinstance(module, cls) for module in modules)
    )
    return {module for module in modules if isinstance(module, classes) and next(module.parameters(), None) is not None}


def _blocks(model: nn.Module) -> set[nn.Module]:
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(map(has_forward, module))
    ]
    sizes = [sum(param.numel() for child in children for param in child.parameters()) for children in lists]
    largest = max(zip(sizes, lists, strict=True), key=lambda pair: pair[0], default=(0, []))[1]
    return {child for child in largest if next(child.parameters(), None) is not None}


# Those that follow from dtypes -------------------------------------------------------------------------------


class Unit(NamedTuple):
    """A module whose parameters are gathered together, but for those of the units inside it; its path, and in what."""

    path: str
    module: nn.Module
    dtype: torch.dtype


def plan_units(
    model: nn.Module, storage: Mapping[Tensor, torch.dtype], usual: torch.dtype, chosen: set[nn.Module]
) -> list[Unit]:
    """Return all units, innermost first: those chosen, the model, and what needs another dtype than what is around it.

    What is inside of modules that are sharded already is done.

    Args:
        model: The model.
        storage: The dtype in which a policy wants parameters to be; the others stay as they are.
        usual: The dtype of parameters that no rule speaks about.
        chosen: The modules to be units in any case.

    Raises:
        UnsupportedError: Parameters of one module that need two dtypes.
    """
    planned_units: list[Unit] = []
    problems: list[MezzoError] = []
    seen = {inside for unit in units(model) if unit is not model for inside in unit.modules()}

    def possible(param: Tensor) -> list[torch.dtype]:
        dtype = storage.get(param, param.dtype)
        # Where nothing is cast, a frozen parameter travels as it is, whatever the others are.
        return [dtype, torch.float32] if not param.requires_grad and dtype == param.dtype else [dtype]

    def visit(module: nn.Module, path: str, outer_dtype: torch.dtype) -> None:
        if module in seen:
            return
        seen.add(module)
        dtype = outer_dtype
        if has_forward(module):
            params_of_module = dict(_own_params(module, path))
            first, *further = [possible(param) for param in params_of_module.values() or module.parameters()] or [
                [outer_dtype]
            ]
            common = [candidate for candidate in first if all(candidate in other for other in further)]
            if params_of_module and not common:
                problems.append(
                    _two_dtypes({name: possible(param)[0] for name, param in params_of_module.items()}, path)
                )
            elif common and outer_dtype not in common:
                dtype = common[0]
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, dtype)
        if module is model or module in chosen or dtype != outer_dtype:
            planned_units.append(Unit(path, module, dtype))

    visit(model, "", usual)
    raise_together(problems)
    return planned_units


def _own_params(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's own parameters, with those of containers in it, which are never called themselves."""
    yield from module.named_parameters(path, recurse=False, remove_duplicate=False)
    for name, child in module.named_children():
        if not has_forward(child):
            yield from _own_params(child, f"{path}.{name}" if path else name)


def _two_dtypes(dtypes: Mapping[str, torch.dtype], path: str) -> MezzoError:
    names: defaultdict[torch.dtype, list[str]] = defaultdict(list)
    for name, dtype in dtypes.items():
        names[dtype].append(name)
    return UnsupportedError(
        "parameters of one module would be gathered in two dtypes",
        where="; ".join(f"{some_of(few, 3)} in {dtype_name(dtype)}" for dtype, few in names.items()),
        why="fully_shard gathers the parameters of a module together, in one dtype",
        write=f"{both(f'fp32_module={exact(path)}')}: for all of them"
        if path
        else f"a module of its own for those in float32, and of that path {both('fp32_module=part')}",
    )
