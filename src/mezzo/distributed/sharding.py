"""``fully_shard``: torch's, with the dtypes that a policy says."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from mezzo.cast.model.originals import preparations_in
from mezzo.cast.model.prepare import Prepared, with_pinned_classes
from mezzo.cast.model.refusals import require_module, wanted_storage
from mezzo.cast.model.sharding import units
from mezzo.distributed.agreement import agreed
from mezzo.distributed.wrapping import Unit, Wrap, planned, wrapped
from mezzo.errors import MezzoError, PolicyError, StateError, UnsupportedError, nearest, raise_together, shown, some_of
from mezzo.policy import Policy
from mezzo.tensors import LOW

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["fully_shard"]

M = TypeVar("M", bound=nn.Module)

#: What torch's takes that follows from the policy, or stands by itself here.
_OURS: Final = ("module", "mesh", "mp_policy")


def fully_shard(
    model: M,
    policy: Policy | str | os.PathLike[str],
    *,
    mesh: DeviceMesh | None = None,
    wrap: Wrap = None,
    **kwargs: Any,
) -> M:
    """Shard a model's parameters over ranks, as ``torch.distributed.fsdp.fully_shard`` does, in a policy's dtypes.

    Each rank keeps a part of every parameter, in the dtype that the model has; what a forward or backward pass needs is
    gathered, in the dtype that the policy stores parameters in, and let go. Under O2 the FP32 parts are the masters;
    with an optimizer of mezzo's that splits its masters, a session makes each part the 16-bit half that is gathered.
    Modules that the policy keeps in FP32 (batch norm, ``keep_fp32``) are gathered apart, in FP32. Inputs and outputs
    are cast by :class:`mezzo.MixedPrecision` or :func:`mezzo.prepare`, where the model is entered and left: first
    ``fully_shard``, then the optimizer, then the session.

    Args:
        model: The model, on any device; on the meta device its parts have no memory until ``model.to_empty(…)``.
        policy: A policy, its text, or the path of a policy file; the same on all ranks.
        mesh: The ranks: of one dimension, or of two (the first for replicas, the second for shards), with names. All
            ranks when omitted.
        wrap: The modules to gather by themselves, so that only one of them is whole at a time: classes, globs on module
            paths (``"blocks.*"``; ``*`` stays between two dots), or functions that say of a module whether it is meant;
            one or several. When omitted, the children of the ``ModuleList`` that holds most.
        **kwargs: As torch's takes them, for every module: ``reshard_after_forward``, ``shard_placement_fn``,
            ``offload_policy``, ``ignored_params``.

    Returns:
        The model, whose parameters are ``DTensor`` now.

    Raises:
        PolicyError: An unknown argument, a ``wrap`` or rule that matches nothing, or other ranks shard otherwise.
        UnsupportedError: A parameter that cannot be sharded, or parameters of one module in two dtypes.
        StateError: There are no ranks, or the model is sharded, wrapped or prepared already. Whatever mezzo raises, the
            model is as it was.

    **Cost**: one exchange of a line of text, now. Then for each module in ``wrap``, each that is kept in FP32, and the
    model, one all-gather before its forward and one before its backward pass, and one reduce-scatter: under O2 half the
    bytes of FP32 each. Without ``wrap`` and ``ModuleList`` the whole model is gathered at once.

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
    require_module(model)
    asked = Policy.of(policy)
    policy = with_pinned_classes(model, asked)
    _require_ranks()
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as sharded

    mesh = _all_ranks() if mesh is None else mesh
    prepared: list[Prepared] = preparations_in(model)

    def plan() -> list[Unit]:
        problems = [
            *_prepared_otherwise(prepared, asked),
            *_wrong_mesh(mesh),
            *_wrong_arguments(kwargs, sharded),
            *_cannot_shard(model, kwargs),
        ]
        raise_together(problems)
        storage = {} if prepared else wanted_storage(model, policy)  # which a preparation has carried out
        return planned(model, storage, policy.param_dtype, wrapped(model, wrap))

    found = agreed(mesh, plan, lambda made: "\n".join([str(policy), *(f"{u.path} {u.dtype}" for u in made)]))
    for unit in found:
        low = unit.dtype if unit.dtype in LOW else None
        # Inputs of inner modules stay as they are: what a policy casts, it casts where the model is entered.
        reduced = None if policy.reduce == "param" else getattr(torch, policy.reduce)
        mp_policy = MixedPrecisionPolicy(low, reduced, cast_forward_inputs=False)
        sharded(unit.module, mesh=mesh, mp_policy=mp_policy, **kwargs)
    for handle in prepared:
        handle.follow()
    return model


def _require_ranks() -> None:
    if not dist.is_available():
        raise UnsupportedError("this torch has no torch.distributed", write="a build of torch that has it")
    if not dist.is_initialized() and "RANK" not in os.environ:
        raise StateError(
            "there are no ranks to shard over",
            where="torch.distributed is not initialised",
            write="torchrun --nproc-per-node 2 train.py, and in it torch.distributed.init_process_group() first",
        )


def _all_ranks() -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    return init_device_mesh("cpu" if accelerator is None else accelerator.type, (size,))


def _prepared_otherwise(handles: list[Prepared], policy: Policy) -> Iterator[MezzoError]:
    for handle in handles:
        if handle.asked != policy:
            yield PolicyError(
                "the model was prepared with another policy",
                where="\n".join([type(handle.model).__name__, *handle.asked.differences(policy)]),
                why="prepared → fully_shard",
                write="the same policy for both, or prepared.remove() first",
            )


def _wrong_mesh(mesh: Any) -> Iterator[MezzoError]:
    from torch.distributed.device_mesh import DeviceMesh

    write = 'torch.distributed.init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))'
    if not isinstance(mesh, DeviceMesh):
        yield PolicyError(f"mesh is {shown(mesh)}, not a DeviceMesh", write=write)
    elif mesh.get_coordinate() is None:
        yield PolicyError(
            "the mesh does not hold this rank",
            where=f"rank {dist.get_rank()}, {mesh}",
            why="it would keep whole parameters that no other rank knows of",
            write="a mesh of all ranks that train this model, and fully_shard on these alone",
        )
    elif mesh.ndim > 2 or (mesh.ndim == 2 and not mesh.mesh_dim_names):
        why = "one dimension is that of the shards; of two, which need names, the first is that of the replicas"
        yield PolicyError("fully_shard takes no such mesh", where=str(mesh), why=why, write=write)


def _wrong_arguments(kwargs: Mapping[str, Any], sharded: Any) -> Iterator[MezzoError]:
    known = [name for name in inspect.signature(sharded).parameters if name not in _OURS]
    for name in kwargs:
        if name == "mp_policy":
            yield PolicyError(
                "mp_policy is what the policy says",
                why="param_dtype, the dtype of outputs, and what is cast on the way in all follow from it",
                write="mezzo.fully_shard(model, policy), or torch's own fully_shard with mp_policy",
            )
        elif name not in known:
            yield PolicyError(f"fully_shard takes no {name!r}", why=nearest(name, [*known, "mesh", "wrap"]))


def _cannot_shard(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[MezzoError]:
    """Yield what torch would refuse half-way, when some modules are sharded already."""
    if units(model):
        yield StateError("the model is sharded already", where=type(model).__name__, write="fully_shard once")
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        write = "fully_shard(model) in place of DistributedDataParallel(model)"
        yield StateError("the model is wrapped by DistributedDataParallel", where=type(model).__name__, write=write)
    ignored = kwargs.get("ignored_params") or ()
    named = [(name, param) for name, param in model.named_parameters() if param not in ignored]
    for names, what, write in (
        ([name for name, param in named if param.ndim == 0], "parameters without a dimension cannot be sharded",
         "nn.Parameter(torch.ones(1)) in place of torch.ones(())"),
        ([name for name, param in named if not param.is_contiguous()], "parameters must be contiguous to be sharded",
         "param.data = param.data.contiguous() first"),
    ):  # fmt: skip
        if names:
            yield UnsupportedError(what, where=some_of(names), write=write)
