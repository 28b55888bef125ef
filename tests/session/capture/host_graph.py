"""A graph on the CPU: each kernel that a run launches is written down, and launched again into the same memory.

It stands in for ``mezzo.session.capture.CudaGraph``: no Python runs in a replay, no version of a tensor
is counted, recording writes nothing to memory that was there before, and asking for a value is refused.
"""

import contextlib

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mezzo.step.executors.portable import Portable
from mezzo.weights import Halves

__name__ = "torch.host_graph"  # a message names the innermost line that is not torch's

LAZY = torch.ops.aten._lazy_clone.default  # a copy of memory that a write would move
ASKS_THE_DEVICE = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}


class HostGraph:
    """A stand-in for a CUDA graph."""

    def __init__(self):
        self.runs, self.kernels, self.replays = 0, [], 0

    def run(self, run, *, refuses_syncs=False):
        self.runs += 1
        with Waits() if refuses_syncs else contextlib.nullcontext():
            return run()

    def record(self, run):
        tape = Tape()
        try:
            with tape:
                return run()
        finally:
            tape.undo()
            self.kernels = tape.kernels

    def clear(self):
        self.runs, self.kernels, self.replays = 0, [], 0

    def replay(self):
        self.replays += 1
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            for kernel, args, kwargs, results in self.kernels:
                fresh = new_tensors(kernel, kernel(*args, **kwargs))
                for result, value in zip(results, fresh, strict=True):
                    result.copy_(value)


class Waits(TorchDispatchMode):
    """Refuses what waits for the device, as torch's debug mode of syncs does."""

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        if Halves in types:  # whose own kernels come next
            return NotImplemented
        if kernel._schema.name in ASKS_THE_DEVICE:
            raise RuntimeError("called a synchronizing CUDA operation")
        return kernel(*args, **kwargs or {})


class Tape(TorchDispatchMode):
    """Writes kernels down, and what their arguments held before."""

    def __init__(self):
        super().__init__()
        self.kernels, self.before, self.own = [], {}, set()

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        if Halves in types:
            return NotImplemented
        kernel, kwargs = torch.ops.aten.clone.default if kernel is LAZY else kernel, kwargs or {}
        if kernel._schema.name in ASKS_THE_DEVICE:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        for storage in storages((args, kwargs)):
            if storage.data_ptr() not in self.own and storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = storage, storage.clone()
        out = kernel(*args, **kwargs)
        if kernel._schema.name.startswith("aten::_foreach") and kernel._schema.is_mutable:
            increment_version(args[0])  # as CUDA's kernels do; the CPU's lose it below a dispatch mode
        results = new_tensors(kernel, out)
        self.own.update(storage.data_ptr() for storage in storages(results))
        if results or kernel._schema.is_mutable:
            self.kernels.append((kernel, *(tree_map(memory, values) for values in (args, kwargs, results))))
        return out

    def undo(self):
        for storage, values in self.before.values():
            storage.copy_(values)


def memory(value):
    """Of a tensor its memory alone, as a CUDA graph knows no autograd."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def storages(values):
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.untyped_storage().nbytes()]


def new_tensors(kernel, out):
    """What a kernel returned and made itself: neither a view of an argument nor an argument."""
    outs = out if len(kernel._schema.returns) > 1 else (out,)
    made = [value for value, result in zip(outs, kernel._schema.returns, strict=False) if result.alias_info is None]
    return [value for value in tree_leaves(made) if isinstance(value, torch.Tensor)]


class Predicated(Portable):
    """An executor that skips as those of accelerators do, without looking at the flag."""

    def update_of(self, bucket):
        update = super().update_of(bucket)
        update.on_cpu = False
        return update
