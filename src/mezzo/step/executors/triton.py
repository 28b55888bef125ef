"""Both passes over all tensors at once: kernels that find tensors by their addresses, in tables in device memory."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from mezzo.emit.tracing import WRITE, NoKernel, Pure, Spelled, spelled
from mezzo.errors import UnsupportedError
from mezzo.formats.noise import seeded
from mezzo.launched import Launch, jitted, on
from mezzo.step.executors import triton_source
from mezzo.step.executors.portable import (
    Rows,
    TabledUpdate,
    addresses,
    as_table,
    by_dtype,
    chunked,
    upload_captured,
    vectors,
    warn_once,
)
from mezzo.step.executors.source import update_name
from mezzo.step.executors.triton_source import TRITON
from mezzo.step.verdict import Bucket, BucketUpdate, Verdict

# Functions of a step's few shared numbers as one launch each: from source that :mod:`.emit` spells.

#: The dtype of an argument, and its 0 or 1 dimensions; or FP32 and None for a Python number. Code depends on these.
NumberType: TypeAlias = tuple[torch.dtype, int | None]

#: One warp: a norm of a few hundred numbers is the longest work there is.
_SHARED_OPTIONS: Final = {"num_warps": 1, "enable_fp_fusion": False, "enable_reflect_ftz": False}

#: Numbers are loaded and stored as they are.
NUMBERS: Final = replace(
    TRITON,
    types=MappingProxyType({**TRITON.types, torch.bfloat16: "tl.bfloat16"}),
    widened=MappingProxyType({}),
    narrowed=MappingProxyType({}),
)

_TOTAL: Final = '''\
@triton.jit
def total(vector, length):
    """Return the 2-norm of a vector, added up in one order."""
    squares = tl.full((1024,), 0.0, tl.float32)
    first = 0
    while first < length:
        places = first + tl.arange(0, 1024)
        value = tl.load(vector + places, mask=places < length, other=0.0)
        squares += value * value
        first += 1024
    return tl.sqrt_rn(tl.sum(squares))


'''

_FUNCTION: Final = """\
@triton.jit(do_not_specialize={lengths}, do_not_specialize_on_alignment={pointers})
def {name}({arguments}):
    {lines}
"""


def spelled_function(function: Pure, constants: tuple[Hashable, ...], types: Sequence[NumberType]) -> Spelled:
    """Write the lines of a function of numbers, 0-d tensors, and vectors whose norm it computes.

    Args:
        function: Called with ``constants`` and then the tensors.
        constants: Its first arguments, which are no tensors.
        types: The types of the tensors.

    Raises:
        NoKernel: It uses an operation that is not in the table.
    """
    names = [f"given{index}" for index in range(len(types))]
    examples = [torch.ones((2,) * (dimensions or 0), dtype=dtype, device="cpu") for dtype, dimensions in types]
    return spelled(lambda *tensors: function(*constants, *tensors), examples, names, NUMBERS)


class Kernel:
    """The kernel of a function, for tensors of certain types.

    Its arguments are pointers to tensors, or numbers; pointers to results, but for results that are arguments; and
    lengths of vectors.

    Raises:
        NoKernel: The function uses an operation that is not in the table.
    """

    def __init__(self, function: Pure, constants: tuple[Hashable, ...], types: Sequence[NumberType]) -> None:
        self.function = spelled_function(function, constants, types)
        names = [str(name) for name in self.function.names]
        self.vectors = [index for index, (_, dimensions) in enumerate(types) if dimensions]
        numbers = [name for name, (_, dimensions) in zip(names, types, strict=True) if dimensions is None]
        arguments = [name if name in numbers else f"{name}_at" for name in names]
        lines = [f"{name} = tl.load({name}_at)" for name, (_, n) in zip(names, types, strict=True) if n == 0]
        lines += self.function.body
        for index, result in enumerate(self.function.results):
            if result.word not in names:
                arguments.append(f"result{index}")
                words = [result.word] if isinstance(result.word, str) else result.word
                lines += [f"tl.store(result{index} + {at}, {word})" for at, word in enumerate(words)]
        lengths, name = [f"{names[index]}_length" for index in self.vectors], function.__name__.strip("_")
        source = (_TOTAL if lengths else "") + _FUNCTION.format(
            name=name,
            lengths=lengths,
            pointers=[name for name in arguments if name not in numbers],
            arguments=", ".join([*arguments, *lengths]),
            lines="\n    ".join(lines),
        )
        self.launch = Launch(jitted(source, name), _SHARED_OPTIONS)
        examples = [1.0 if dimensions is None else dtype for dtype, dimensions in types]
        result_dtypes = [result.dtype for result in self.function.results if result.word not in names]
        self.examples = [*examples, *result_dtypes, *[2 for _ in lengths]]

    def prepare(self, device: torch.device) -> None:
        """Compile it for a device.

        Raises:
            NoKernel: Triton cannot.
        """
        _prepare(self.launch, device, *self.examples)

    def __call__(self, tensors: Sequence[Any], device: torch.device) -> tuple[Tensor, ...]:
        """Launch it on a device, and return its results."""
        passed = dict(zip(self.function.names, tensors, strict=True))
        created, results = [], []
        for result in self.function.results:
            if isinstance(result.word, str) and result.word in passed:
                results.append(passed[result.word])
            else:
                size = [] if isinstance(result.word, str) else [len(result.word)]
                created.append(torch.empty(size, dtype=result.dtype, device=device))
                results.append(created[-1])
        with on(device):
            self.launch(1, device, *tensors, *created, *[len(tensors[index]) for index in self.vectors])
        return tuple(results)


class Shared:
    """Functions of shared numbers, each written and compiled once for its dtypes."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[object, ...], Kernel | None] = {}

    def __call__(
        self, function: Pure, constants: tuple[Hashable, ...], tensors: Sequence[Tensor | float]
    ) -> Sequence[Tensor]:
        """Return the results of a function of tensors of one device: by one launch, or by torch's operations.

        Args:
            function: See :func:`written`.
            constants: Its first arguments.
            tensors: The other arguments; vectors without gaps.
        """
        types = [
            (tensor.dtype, tensor.dim()) if isinstance(tensor, Tensor) else (torch.float32, None) for tensor in tensors
        ]
        devices = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
        if len(devices) > 1:
            return function(*constants, *tensors)
        key = (function, constants, *types)
        if key not in self._kernels:
            try:
                kernel = Kernel(function, constants, types)
                kernel.prepare(next(iter(devices)))
                self._kernels[key] = kernel
            except NoKernel as error:
                warn_once(str(error))
                self._kernels[key] = None
        launcher = self._kernels[key]
        return function(*constants, *tensors) if launcher is None else launcher(tensors, devices.pop())


#: Elements that one program of pass 2 updates: four for each of 256 threads, so that FP32 tensors move 16 bytes at a
#: time, or eight for each of 128 where no tensor is FP32. A thread of AdamW with FP32 moments takes at most 48
#: registers on sm_90, and five programs fit a multiprocessor (tests/step/executors/test_compiled_kernels.py).
BLOCK: Final = 1 << 10
#: Elements whose squares one program of pass 1 sums, and so many of them at a time.
CHUNK: Final = 1 << 14
NORM_BLOCK: Final = 1 << 12
#: Sums of chunks that are added at a time.
ROOT_BLOCK: Final = 1 << 10
#: How many tables of addresses are kept ready for gradients of captured steps, from one uncaptured step to the next.
RESERVE: Final = 64
#: Sets of gradients whose tables pass 1 remembers.
REMEMBERED: Final = 16

_Latest: TypeAlias = dict[torch.device, tuple[tuple[int, ...], Tensor]]

#: The arguments of the kernels of pass 2: tables of addresses, chunks, numbers, multiplier, flag and count; a start.
_UPDATED: Final = (
    *(torch.int64, torch.int64, torch.int32),
    *(torch.float32, torch.float32, torch.bool, torch.int64),
)

#: Arithmetic as in torch's own operations: without fused multiply-add, and functions of libdevice keep subnormals.
_OPTIONS: Final = {"num_warps": 8, "enable_fp_fusion": False, "enable_reflect_ftz": False}


def options_of(dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    """Return the options that pass 2 is compiled with for some dtypes: as many warps as have a program's elements."""
    return {**_OPTIONS, "num_warps": BLOCK // (32 * triton_source.elements_of_a_thread(dtypes))}


class Triton:
    """Two launches for pass 1, and one for pass 2 of each bucket, however many tensors there are.

    Kernels are written from the rule and the storage (:mod:`mezzo.emit.tracing`), one for each set of dtypes;
    each dtype among gradients takes a launch of its own. Weights with gaps, or whose states lie otherwise, are updated
    one by one with torch's operations.

    A step can be captured in a CUDA graph after one with the same tensors ran outside. Tables that a graph reads are
    kept for ever, since torch does not report when the graph is freed.

    **Cost**: seconds to compile a kernel, which Triton keeps on disk. Per step the bytes of the stored tensors, once,
    one launch of one warp a bucket, and an upload of 8 bytes a gradient if one has moved. 8 bytes of tables for
    every 1024 weights, and for every gradient 1 KiB on the device and as much in the host's memory, for captured steps.
    No host sync.

    Raises:
        NoKernel: Before the first step: an operation of the rule's that has no Triton.
        UnsupportedError: While a graph is captured: tensors that no step before had.
    """

    def __init__(self) -> None:
        self._retained: list[object] = []
        self._latest: _Latest = {}
        self._norms_of: dict[tuple[object, ...], _TritonNorms] = {}
        self.shared = Shared()

    def require(self, device: torch.device) -> None:
        """Launch the kernels of pass 1 on a device.

        Raises:
            UnsupportedError: Triton cannot: it builds what launches kernels on each machine, with a C compiler.
        """
        try:
            _TritonNorms([(torch.float32, 1)], device, [], {})([torch.ones(1, dtype=torch.float32, device=device)])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler's, a linker's, a file's: every step would raise it, too
            reasons = [line for line in str(error).splitlines() if line.strip()]
            raise UnsupportedError(
                "Triton cannot launch an optimizer kernel here",
                where=f"squares, roots on {device}",
                why=reasons[0] if reasons else type(error).__name__,
                write=_cure(error),
            ) from error

    @torch.no_grad()
    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """See :class:`mezzo.step.verdict.Executor`."""
        if not gradients:
            return torch.zeros(0, dtype=torch.float32, device="cpu")
        read, dtypes = vectors(gradients)
        key = read[0].device, tuple(dtypes), tuple(map(Tensor.numel, read))
        if key not in self._norms_of:
            if len(self._norms_of) == REMEMBERED:
                self._norms_of.pop(next(iter(self._norms_of))).release()
            self._norms_of[key] = _TritonNorms(list(zip(*key[1:], strict=True)), key[0], self._retained, self._latest)
        return self._norms_of[key](read)

    def update_of(self, bucket: Bucket) -> BucketUpdate:
        """See :class:`mezzo.step.verdict.Executor`."""
        return _TritonUpdate(bucket, self._retained, self._latest)


class _TritonNorms:
    """Pass 1 for gradients of certain dtypes and lengths, wherever they lie."""

    def __init__(
        self,
        dtype_lengths: Sequence[tuple[torch.dtype, int]],
        device: torch.device,
        retained: list[object],
        latest: _Latest,
    ) -> None:
        refuse_capture(device, "gradients of other shapes")
        self.device, self.retained = device, retained
        self.addresses = _Addresses(len(dtype_lengths), device, retained, latest, is_first=True)
        lengths = as_table([length for _, length in dtype_lengths])
        # Buckets of pass 2 are of one dtype: they find their gradients side by side.
        first_of = {dtype: index for index, (dtype, _) in reversed(list(enumerate(dtype_lengths)))}
        self.order = sorted(range(len(dtype_lengths)), key=lambda index: first_of[dtype_lengths[index][0]])
        positions = torch.empty_like(lengths)
        positions[self.order] = torch.arange(len(dtype_lengths), device="cpu")
        # The spans of each gradient's sums among all sums, which are in the order of the launches.
        spans = torch.empty(len(dtype_lengths), 2, dtype=torch.int32, device="cpu")
        self.launches: list[tuple[Launch, Tensor]] = []
        self.total = 0
        for dtype, indices, chunks in by_dtype(dtype_lengths, CHUNK):
            counts = -(-lengths[indices] // CHUNK)
            ends = self.total + counts.cumsum(0)
            spans[indices] = torch.stack([ends - counts, ends], 1).int()
            constants = {"TYPE": triton_source.element_type(dtype), "BITS": dtype == torch.bfloat16}
            squares = jitted(triton_source.norm_source(), "squares")
            launch = Launch(squares, _OPTIONS, **constants, CHUNK=CHUNK, BLOCK=NORM_BLOCK)
            chunks[:, 0] = positions[chunks[:, 0]]
            self.launches.append((launch, _uploaded(chunks, device)))
            self.total += len(chunks)
        self.roots = Launch(jitted(triton_source.norm_source(), "roots"), _OPTIONS, BLOCK=ROOT_BLOCK)
        self.lengths, self.spans = _uploaded(lengths[self.order], device), _uploaded(spans, device)

    def __call__(self, vectors: Sequence[Tensor]) -> Tensor:
        table = self.addresses.of([vectors[index] for index in self.order])
        partials = torch.empty(self.total, dtype=torch.float32, device=self.device)
        norms = torch.empty(len(vectors), dtype=torch.float32, device=self.device)
        if _is_capturing(self.device):
            self.retained.append((self.lengths, self.spans, self.launches))
        first = 0
        with on(self.device):
            for squares, chunks in self.launches:
                if len(chunks):
                    squares(len(chunks), self.device, table, self.lengths, chunks, partials[first:])
                first += len(chunks)
            self.roots(len(vectors), self.device, partials, self.spans, norms)
        return norms

    def release(self) -> None:
        """Free the memory of the tables, once kernels that are launched have read them."""
        self.addresses.release()
        _release([self.lengths, self.spans, *(chunks for _, chunks in self.launches)])


class _TritonUpdate(TabledUpdate):
    """Pass 2 for one bucket."""

    def __init__(self, bucket: Bucket, retained: list[object], latest: _Latest) -> None:
        super().__init__(bucket)
        self.retained, self.device = retained, bucket.step.device
        self.addresses = _Addresses(len(bucket.weights), self.device, retained, latest)
        self.table = torch.empty(0, dtype=torch.int64, device=self.device)
        self.kernels: list[tuple[Launch, Tensor]] = []

    def rebuild_tables(self, rows: Rows) -> None:
        """See :class:`mezzo.step.executors.portable.TabledUpdate`."""
        self.refresh_addresses(rows)
        _release([chunks for _, chunks in self.kernels])
        rule, storage, name = self.bucket.rule, self.bucket.storage, update_name(self.bucket.rule, self.bucket.storage)
        self.kernels = [
            (
                Launch(
                    jitted(triton_source.update_source(rule, storage, dtypes), name),
                    options_of(dtypes),
                    BLOCK=BLOCK,
                ),
                _uploaded(chunked(rows.table[indices, 0], as_table(indices), BLOCK), self.device),
            )
            for dtypes, indices in rows.by_dtypes.items()
        ]
        for kernel, _ in self.kernels:
            _prepare(kernel, self.device, *_UPDATED, 0)

    def refresh_addresses(self, rows: Rows) -> None:
        """See :class:`mezzo.step.executors.portable.TabledUpdate`."""
        refuse_capture(self.device, "weights or states that were given other memory, or gradients of another dtype")
        _release([self.table])
        self.table = _uploaded(rows.table, self.device)

    def launch(self, vectors: Sequence[Tensor], verdict: Verdict, step: Tensor, scalars: Tensor) -> None:
        """See :class:`mezzo.step.executors.portable.TabledUpdate`."""
        if _is_capturing(self.device):
            self.retained.append((self.table, self.kernels))
        table = self.addresses.of(vectors)
        numbers = scalars, verdict.multiplier, verdict.found_inf, step, seeded(self.bucket.seed)
        with on(self.device):
            for kernel, chunks in self.kernels:
                kernel(len(chunks), self.device, table, self.table, chunks, *numbers)


class _Addresses:
    """The addresses of some tensors as a table in device memory, which is uploaded when one of them has moved.

    A table is written once: kernels that are launched, or in a captured graph, may still read it. While a graph is
    captured, memory cannot be pinned, and an upload is recorded instead of carried out. A captured step takes a table
    from a reserve that was made before; each of the graph's replays uploads it again, unless the caller uploads it once
    (:func:`.portable.uploaded_once`).

    Args:
        count: How many tensors.
        device: Their device.
        retained: All tables that a captured graph reads: they are never freed.
        latest: The last table of pass 1 on each device, for both passes: in most steps they read the same gradients.
        is_first: Whether these are pass 1's.
    """

    def __init__(
        self, count: int, device: torch.device, retained: list[object], latest: _Latest, *, is_first: bool = False
    ) -> None:
        self.count, self.device, self.retained, self.latest, self.is_first = count, device, retained, latest, is_first
        self.seen: tuple[int, ...] | None = None
        self.table = torch.empty(0, dtype=torch.int64, device=device)
        self.reserve: list[tuple[Tensor, Tensor]] = []

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the int64 addresses of tensors, in device memory."""
        seen = tuple(addresses(tensors))
        if _is_capturing(self.device):
            return self.captured_table(seen)
        # All at once, since memory is pinned slowly; even where no address changes: gradients that have one address in
        # all rehearsals have another in the graph.
        if len(self.reserve) < RESERVE:
            self.reserve += self.spare_tables(RESERVE - len(self.reserve))
        if seen != self.seen:
            self.release()
            table = self.part_of_latest(seen)
            self.seen, self.table = seen, _uploaded(as_table(seen), self.device) if table is None else table
        if self.is_first:
            self.latest[self.device] = self.seen, self.table
        return self.table

    def part_of_latest(self, seen: tuple[int, ...]) -> Tensor | None:
        """Return the part of pass 1's table that holds these addresses, if they are side by side there."""
        latest_addresses, table = self.latest.get(self.device, ((), self.table))
        if latest_addresses == seen:
            return table
        if not seen or seen[0] not in latest_addresses:
            return None
        first = latest_addresses.index(seen[0])
        end = first + len(seen)
        return table[first:end] if latest_addresses[first:end] == seen else None

    def captured_table(self, seen: tuple[int, ...]) -> Tensor:
        """Return a table for a step that is captured: the current one, or one of the reserve."""
        if seen == self.seen:
            self.retained.append(self.table)
            return self.table
        if not self.reserve:
            refuse_capture(
                self.device,
                f"gradients that had new addresses {RESERVE} times already",
                f"at most {RESERVE} steps in a graph, and one such step before it, outside of torch.cuda.graph",
            )
        host, table = self.reserve.pop()
        self.retained.append((host, table))
        upload_captured(table, host.copy_(as_table(seen)))
        return table

    def spare_tables(self, count: int) -> zip[tuple[Tensor, Tensor]]:
        """Make pairs of tables, in host and device memory."""
        is_pinned = self.device.type == "cuda"
        host = torch.empty(count, self.count, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        return zip(host, torch.empty(count, self.count, dtype=torch.int64, device=self.device), strict=True)

    def release(self) -> None:
        """Free the memory of the table, once kernels that are launched have read it."""
        _release([self.table])


def _uploaded(table: Tensor, device: torch.device) -> Tensor:
    """Bring a table to the device without waiting; torch reuses the pinned memory only after the copy."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _release(tables: Sequence[Tensor]) -> None:
    """Record with torch that the current stream may still read tables, which another stream may have made."""
    for table in tables:
        if table.device.type == "cuda":
            table.record_stream(torch.cuda.current_stream(table.device))


def _prepare(launch: Launch, device: torch.device, *arguments: Any) -> None:
    """Compile a kernel, before anything is written.

    Raises:
        NoKernel: Triton cannot: a release may lack what the kernel's lines are spelled with.
    """
    try:
        launch.prepare(device, *arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler's or an assembler's, of any class
        # The innermost error names the operation; the outer ones name the line of a function.
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        reasons = [line.strip() for line in str(first).splitlines() if line.strip()]
        raise NoKernel(
            f"Triton {importlib.import_module('triton').__version__} cannot compile {launch.kernel.__name__}",
            why=reasons[-1] if reasons else type(first).__name__,
            write=WRITE.format("an issue for mezzo with this message"),
        ) from error


def _cure(error: Exception) -> str:
    """Return what to write so that Triton can build its kernels: a folder for its cache, or a compiler."""
    if isinstance(error, OSError):
        cache = Path(importlib.import_module("triton").knobs.cache.dir)
        file = cache if error.filename is None else Path(str(error.filename))  # none where the disk is full
        if cache.is_relative_to(file) or file.is_relative_to(cache):
            return "TRITON_CACHE_DIR=, a folder that you can write to, on a disk with room"
    return "apt install gcc python3-dev (or another C compiler, and CC=its path)"


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with on(device):  # torch asks the current device's stream
        return torch.cuda.is_current_stream_capturing()


def refuse_capture(
    device: torch.device, what: str, write: str = "one such step before the capture, outside of torch.cuda.graph"
) -> None:
    """Raise if a graph is captured on a device: tables and kernels must be made outside of it.

    Args:
        device: The device of the step.
        what: The tensors that no step before had.
        write: The cure, for the error.

    Raises:
        UnsupportedError: A graph is captured.
    """
    if _is_capturing(device):
        raise UnsupportedError(
            "an optimizer step cannot be captured in a CUDA graph here",
            where=f"{what}, on {device}",
            why="its kernels find tensors by tables, which only an uncaptured step with the same tensors makes",
            write=write,
        )
