"""A CUDA device that computes nothing, in a process of its own: what a session asks of a GPU, written down.

:func:`plug_in` loads ``device.cpp`` into torch's CPU build, which then takes ``device="cuda"``. Inside a
:class:`Machine` each operation on that device is a :class:`FakeTensor`'s: shapes, dtypes and autograd are torch's own,
and so is the choice of what autocast casts, but there are no values. Host memory is real. Triton's launch path is real
as well, up to the driver, which writes launches down; kernels are compiled for what :func:`plug_in` is given.

What is written down, each time with the line of mezzo's that asked (``session/gradients.py:52``):

- ``reads``: whatever makes the host wait: ``.item()``, ``bool()``, copies that block, ``synchronize``
- ``kernels``: operations and Triton launches that a GPU would run, in order; views and allocations are none
- ``uploads`` and ``downloads``: copies that do not block, from and to the host
- ``allocations``: ``empty`` and its likes in device memory, and ``pinned`` those in pinned host memory
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Graph", "Machine", "Record", "capturing", "plug_in"]

#: Names of mezzo's kernels for a step's few shared numbers.
SHARED = {
    "as_fused",
    "judge_step_numbers",
    "counted",
    "judge_numbers",
    "found_with",
    "moved_on",
    "numbers_of_step",
    "vector",
}


@dataclass(slots=True)
class Record:
    """What was asked of the device."""

    reads: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)
    allocations: list[str] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)

    @property
    def triton(self) -> list[str]:
        """The launches of mezzo's kernels over whole tensors, by name."""
        return [name.removeprefix("triton.") for name in self.kernels if self._is_large(name)]

    @property
    def small(self) -> list[str]:
        """The launches beside them, mezzo's for a few numbers included."""
        return [name for name in self.kernels if not self._is_large(name)]

    @staticmethod
    def _is_large(name: str) -> bool:
        return name.startswith("triton.") and name.removeprefix("triton.") not in SHARED


def plug_in(library: Path, capability: int = 90, *, has_memory: bool = False) -> None:
    """Let this process have a CUDA device; before anything has asked torch whether there is one.

    Args:
        library: ``device.cpp``, compiled.
        capability: What Triton compiles for.
        has_memory: Whether tensors have addresses, as with ``operations.cpp``; FakeTensors are given theirs here.
    """
    loaded = ctypes.CDLL(str(library))
    import torch

    if has_memory:
        _let_storages_resize(loaded)
    else:
        from . import fakes  # benchmarks/host.py has this file alone

        fakes.give_addresses()
        fakes.let_modules_convert()
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_: divmod(capability, 10)
    cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu")
    cuda.set_rng_state = lambda *_: None
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        name="a GPU that computes nothing", major=capability // 10, minor=capability % 10, multi_processor_count=132
    )
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.is_current_stream_capturing = lambda: _capturing[-1]
    cuda.current_stream = lambda *_: torch.accelerator.current_stream()
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda.synchronize = lambda *_: _log("reads", "torch.cuda.synchronize")
    cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.Event = _Event  # type: ignore[misc]
    torch.version.cuda = "13.0"
    _plug_in_triton(capability)


def _let_storages_resize(loaded: ctypes.CDLL) -> None:
    """Let storages on the device get another size: torch's CPU build refuses that of any CUDA storage."""
    import torch

    resized = torch.UntypedStorage.resize_
    loaded.resize_storage.argtypes, loaded.resize_storage.restype = [ctypes.c_void_p, ctypes.c_size_t], None

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resized(storage, size)
        loaded.resize_storage(storage._cdata, size)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


class _Event:
    """An event of a device where everything takes until somebody waits for it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waited = False

    def record(self, *_: Any) -> None:
        self.waited = False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True
        _log("reads", "event.synchronize")

    def wait(self, *_: Any) -> None:
        pass


def _plug_in_triton(capability: int) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            self.name = metadata.name

        def __call__(self, *_: Any) -> None:
            _log("kernels", f"triton.{self.name}", with_line=False)

    utils = types.SimpleNamespace(
        load_binary=lambda *_: (1, 2, 64, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32},
    )
    driver.set_active(
        types.SimpleNamespace(
            launcher_cls=Launcher,
            utils=utils,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            set_current_device=lambda _: None,
            get_current_stream=lambda _: 0,
            get_device_interface=lambda: torch.cuda,
            map_python_to_cpp_type=lambda python_type: python_type,
        )
    )


_records: list[Record] = []
_capturing = [False]


def _log(log: str, what: str, *, with_line: bool = True) -> None:
    if _records:
        getattr(_records[-1], log).append(f"{what} at {_line()}" if with_line else what)


def _line() -> str:
    """The innermost line of mezzo's, or else of whoever called."""
    line, frame = "", inspect.currentframe()
    while frame is not None:
        name, is_mezzos = _file(frame.f_code.co_filename)
        if is_mezzos:
            return f"{name}:{frame.f_lineno}"
        line = line or (f"{name}:{frame.f_lineno}" if name else "")
        frame = frame.f_back
    return line


@functools.cache
def _file(path: str) -> tuple[str, bool]:
    """What a file is called in a line, nothing if it is torch's or this one; and whether it is mezzo's."""
    if "torch" in Path(path).parts or path.endswith("fake_cuda/machine.py"):
        return "", False
    return path.rpartition("/src/mezzo/")[2], "/src/mezzo/" in path


class Machine:
    """Where tensors may be on the device, and what was asked of it since :meth:`watched` began.

    Args:
        fill: Fills tensors in host memory that are copied from the device, whose values it has not: zeros.
    """

    def __init__(self, fill: Callable[[Any], object] = lambda host: host.zero_()) -> None:
        self.fill = fill

    def __enter__(self) -> Machine:
        import torch

        self._mode = _mode()
        self._mode.fill = self.fill
        self._mode.__enter__()
        torch._C._set_only_lift_cpu_tensors(True)  # or torch.tensor(…, device="cuda") goes past every mode
        return self

    def __exit__(self, *exception: Any) -> None:
        import torch

        torch._C._set_only_lift_cpu_tensors(False)
        self._mode.__exit__(*exception)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Record]:
        """Give a record that is filled meanwhile."""
        _records.append(Record())
        try:
            yield _records[-1]
        finally:
            _records.pop()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Let torch say that the device's stream is being captured."""
    _capturing.append(True)
    try:
        yield
    finally:
        _capturing.pop()


class Graph:
    """A :class:`mezzo.session.capture.CudaGraph` whose replays are written down, and do nothing.

    Attributes:
        recorded: What the recorded run asked of the device.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.recorded = machine, Record()

    def run(self, run: Any, *, refuses_syncs: bool = False) -> Any:
        return run()

    def record(self, run: Any) -> Any:
        with capturing(), self.machine.watched() as self.recorded:
            return run()

    def replay(self) -> None:
        _log("kernels", "replay", with_line=False)


@functools.cache
def _mode() -> Any:
    """The one device of this process: executors keep tables on it from one session to the next."""
    import torch
    from torch import Tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    allocating = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
    nothing = {
        aten.detach, aten.alias, aten.lift_fresh, aten._unsafe_view, aten.unflatten_dense_tensors, aten.set_,
        aten.resize_, aten.record_stream,
    }  # fmt: skip

    #: What only looks at memory otherwise: a FakeTensorMode takes a millisecond for it.
    simple = {
        aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default, aten.t.default,
        aten.transpose.int, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.as_strided.default,
        aten.unsqueeze.default, aten.squeeze.dim, aten.permute.default,
        aten.view.dtype, aten.split.Tensor, aten.unbind.int,
    }  # fmt: skip

    class Device(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fake = FakeTensorMode(allow_non_fake_inputs=True)
            #: What operations make of what they are given: a FakeTensorMode takes a millisecond for some.
            self.known: dict[Any, Any] = {}
            self.fill: Callable[[Any], object] = Tensor.zero_

        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, packet = dict(kwargs or {}), func.overloadpacket
            if packet is torch.ops.prim.device:
                return args[0].device
            leaves = []  # arguments are lists of tensors at most
            for argument in (*args, *kwargs.values()):
                leaves += argument if isinstance(argument, list | tuple) else [argument]
            given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            wanted = kwargs.get("device")
            mine = [isinstance(leaf, FakeTensor) and leaf.fake_mode is self.fake for leaf in given]
            if packet is aten.is_pinned:
                return False
            if packet is aten._pin_memory:
                _log("pinned", f"pin_memory of {given[0].nbytes} bytes")
                return aten.clone(given[0])
            if kwargs.pop("pin_memory", None):
                _log("pinned", f"{func} of {args[0]}")
            if not any(mine) and (wanted is None or torch.device(wanted).type != "cuda"):
                return func(*args, **kwargs)
            if packet is aten.record_stream:
                return None
            if packet is aten._local_scalar_dense:
                _log("reads", "a value")
                return self.read((), given[0].dtype).item()
            if packet in (
                aten.equal,
                aten.nonzero,
                aten.is_nonzero,
                aten.masked_select,
                aten.unique_dim,
                aten._unique2,
            ):
                _log("reads", str(packet))
            if packet is aten.equal:
                return given[0].shape == given[1].shape
            if packet is aten._to_copy and wanted is not None and given[0].device.type != torch.device(wanted).type:
                self.moves(given[0], torch.device(wanted).type, bool(kwargs.get("non_blocking")))
                dtype = kwargs.get("dtype") or given[0].dtype
                if torch.device(wanted).type == "cpu":
                    return self.read(given[0].shape, dtype)
                with self.fake:  # not of the tensor itself, whose value would go along where it has one element
                    return torch.empty_strided(given[0].shape, given[0].stride(), dtype=dtype, device=wanted)
            elif packet is aten.copy_ and given[0].device.type != given[1].device.type:
                blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
                self.moves(given[1], given[0].device.type, not blocking)
                if given[0].device.type == "cpu":
                    self.fill(given[0])
                return given[0]
            elif packet in allocating:
                _log("allocations", str(packet))
            elif func.namespace == "aten" and packet not in nothing and not func.is_view:
                _log("kernels", str(packet), with_line=False)
            if str(packet).startswith("aten._fused_") and str(packet).endswith("_"):
                return (
                    None  # torch's fused optimizers: some have no meta function, SGD's asks for buffers yet to be made
                )
            return self.shaped(func, args, kwargs, leaves, all(mine))

        def read(self, shape: Any, dtype: Any) -> Tensor:
            """Return what the host finds on the device."""
            numbers = torch.zeros(shape, dtype=dtype)
            self.fill(numbers)
            return numbers

        def shaped(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], quickly: bool) -> Any:
            """Run an operation on shapes alone: as one like it went before, or as a FakeTensorMode does it."""
            if quickly and func in simple:
                with in_kernel_invocation_manager(self.fake):
                    seen = func(*args, **kwargs)
                if isinstance(seen, list | tuple):
                    return [FakeTensor(self.fake, meta, torch.device("cuda", 0)) for meta in seen]
                return FakeTensor(self.fake, seen, torch.device("cuda", 0))
            if not quickly or func.is_view or func.overloadpacket in nothing:
                with self.fake:
                    return func(*args, **kwargs)
            lengths = tuple([len(argument) if isinstance(argument, list | tuple) else -1 for argument in args])
            like = (func, lengths, *kwargs, *map(_described, leaves))
            if like not in self.known:
                with self.fake:
                    result = func(*args, **kwargs)
                parts = result if isinstance(result, list | tuple) else [result]
                if any(part is not None and not isinstance(part, Tensor) for part in parts):
                    return result
                self.known[like] = type(result), [_made(part, leaves) for part in parts]
                return result
            container, made = self.known[like]
            parts = [
                self.fresh(*how) if isinstance(how, tuple) else how if how is None else leaves[how] for how in made
            ]
            return container(parts) if container in (list, tuple) else parts[0]

        def fresh(self, shape: Any, stride: Any, dtype: Any) -> Any:
            elem = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return FakeTensor(self.fake, elem, torch.device("cuda", 0))

        def moves(self, source: Tensor, target: str, freely: bool) -> None:
            """Write down a copy between host and device; pageable memory that is freed meanwhile is torch's care."""
            direction = "uploads" if target == "cuda" else "downloads"
            what = f"{source.nbytes} bytes to {target}"
            _log(direction, what)
            if not freely:
                _log("reads", what)

    return Device()


def _described(leaf: Any) -> Any:
    """What the shape of a result depends on."""
    shape = getattr(leaf, "shape", None)
    return (type(leaf), leaf) if shape is None else (shape, leaf.stride(), leaf.dtype, leaf.storage_offset())


def _made(result: Any, given: list[Any]) -> Any:
    """How to make a result again: one of what was given, by place, or a new tensor; or nothing."""
    if result is None:
        return None
    position = next((position for position, leaf in enumerate(given) if leaf is result), None)
    return (result.shape, result.stride(), result.dtype) if position is None else position
