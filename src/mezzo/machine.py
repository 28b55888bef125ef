"""What a result was measured on, and what a fault happened on: facts, without a word on what follows from them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

import mezzo
from mezzo.cast.device import DeviceReport, devices, probe, processor
from mezzo.errors import UnsupportedError, printable
from mezzo.step.executors.cpp.build import compiler
from mezzo.tensors import dtype_name

__all__ = ["VARIABLES", "Environment", "Gpu", "default_device", "describe", "environment", "tf32"]

#: Variables that change what is computed, by which kernel, on which device or rank. No other one is shown: what is
#: pasted into an issue must hold no secret.
VARIABLES: Final = tuple(
    """
    ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA OMP_NUM_THREADS MKL_NUM_THREADS ATEN_CPU_CAPABILITY
    CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
    TRITON_INTERPRET TORCH_COMPILE_DISABLE CXX XDG_CACHE_HOME TMPDIR
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE PYTHONPATH PYTHONWARNINGS
    """.split()
)
#: Packages that mezzo computes with, whatever extras are there.
_PACKAGES: Final = ("numpy", "triton", "typer", "rich")
#: Extras that only repeat others, and those of mezzo's own developers.
_NOT_SHOWN: Final = ("all", "demo", "dev", "docs")


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def describe(device: torch.device) -> dict[str, str | int | bool]:
    """Describe the machine, as it goes into ``summary.json``.

    Args:
        device: Where the training ran.

    Returns:
        Processor, cores, threads, versions; on a GPU its name and whether FP32 products use TF32, since an
        FP32 baseline means something else when they do.

    Example:
        >>> sorted(describe(torch.device("cpu")))
        ['cores', 'cpu', 'device', 'mezzo', 'python', 'threads', 'torch']
    """
    facts: dict[str, str | int | bool] = {
        "device": device.type,
        "cpu": processor()["name"],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mezzo": mezzo.__version__,
    }
    if device.type == "cuda":
        uses = tf32()
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts |= {"tf32_matmul": uses["products"], "tf32_convolution": uses["convolutions"]}
    return facts


def tf32() -> dict[str, bool]:
    """Say whether FP32 ``products`` and ``convolutions`` use TF32 on a GPU, by whichever of torch's switches."""
    return {
        # The older ``allow_tf32`` cannot be read once ``torch.backends.fp32_precision`` is set.
        "products": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "convolutions": torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        name: The maker's.
        capability: Compute capability, ``"9.0"``.
        memory_bytes: All of its memory.
    """

    name: str
    capability: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a bug report should say about the machine and the installation.

    Attributes:
        machine: As :func:`describe` says it of the CPU.
        system: Operating system and C library.
        instructions: The widest that torch's own kernels use on the CPU, such as ``AVX512``.
        packages: Version by package; ``None`` for one that is not installed.
        compiler: What optimizer kernels are compiled with on the CPU, or why nothing is.
        cuda: The CUDA version that torch was built for; ``None`` for a build without.
        driver: Version of NVIDIA's driver, where there is one.
        gpus: Those that this process sees.
        tf32: As :func:`tf32` says it; ``None`` without a GPU.
        devices: What the probe found, one report for each device type.
        variables: Those of :data:`VARIABLES` that are set.
        extras: For each extra of mezzo's the packages that it names, with their versions or ``None``. Empty where mezzo
            is on the path but not installed.
    """

    machine: Mapping[str, str | int | bool]
    system: str
    instructions: str
    packages: Mapping[str, str | None]
    compiler: str
    cuda: str | None
    driver: str | None
    gpus: tuple[Gpu, ...]
    tf32: Mapping[str, bool] | None
    devices: tuple[DeviceReport, ...]
    variables: Mapping[str, str]
    extras: Mapping[str, Mapping[str, str | None]]

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        known = {name: getattr(self, name) for name in self.__slots__}
        return known | {
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "devices": [report.to_dict() for report in self.devices],
        }

    def __str__(self) -> str:
        """Return a text that pastes into an issue: one fact a line, its name first."""
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {printable(text)}" for name, text in rows)

    def _rows(self) -> Iterable[tuple[str, str]]:
        here = self.machine
        yield "mezzo", str(here["mezzo"])
        yield "torch", f"{here['torch']}, built for {f'CUDA {self.cuda}' if self.cuda else 'no CUDA'}"
        yield "python", str(here["python"])
        yield "system", self.system
        yield (
            "processor",
            f"{here['cpu']}, {self.instructions}; cores: {here['cores']}, threads of torch: {here['threads']}",
        )
        for number, gpu in enumerate(self.gpus):
            yield f"GPU {number}", f"{gpu.name}, capability {gpu.capability}, {gpu.memory_bytes / 2**30:.4g} GiB"
        if self.driver is not None:
            yield "driver", self.driver
        if self.tf32 is not None:
            yield "TF32", ", ".join(f"{name} {'on' if on else 'off'}" for name, on in self.tf32.items())
        yield "C++", self.compiler
        yield "packages", _versions(self.packages)
        for report in self.devices:
            for dtype, support in report.formats.items():
                speed = support.speed_ratio
                products = "" if speed is None else f", products {speed:.2g}× as fast as in FP32"
                text = f"{support.status}{products}; {support.detail}"
                yield f"{report.device_type} {dtype_name(dtype)}", text
        yield from self.variables.items()
        for extra, packages in self.extras.items():
            yield f"[{extra}]", _versions(packages)
        if not self.extras:
            yield "extras", "unknown: mezzo is on the path, and not installed"


def environment() -> Environment:
    """Collect the facts that a bug report needs.

    Returns:
        A value whose ``str`` pastes into an issue. It holds no variable but :data:`VARIABLES`, with ``~`` for the home
        folder.

    **Cost**: that of :func:`mezzo.cast.device.probe` for each device type, and two short programs, the C++ compiler and
    NVIDIA's driver, asked for their versions.

    Example:
        >>> print(str(environment()).splitlines()[0].split()[0])
        mezzo
    """
    present = devices()
    return Environment(
        machine=describe(torch.device("cpu")),
        system=platform.platform(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        packages={name: _version(name) for name in _PACKAGES},
        compiler=_homeless(_compiler()),
        cuda=torch.version.cuda,
        driver=_driver() if "cuda" in present else None,
        gpus=_gpus() if "cuda" in present else (),
        tf32=tf32() if "cuda" in present else None,
        devices=tuple(probe(each) for each in present),
        variables={name: _homeless(os.environ[name]) for name in VARIABLES if name in os.environ},
        extras=_extras(),
    )


def _compiler() -> str:
    try:
        return compiler()
    except UnsupportedError as error:
        return str(error).splitlines()[0]


def _driver() -> str | None:
    from torch.utils import collect_env

    found = collect_env.get_nvidia_driver_version(collect_env.run)  # type: ignore[no-untyped-call]
    return None if found is None else str(found)


def _gpus() -> tuple[Gpu, ...]:
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(
        Gpu(name=each.name, capability=f"{each.major}.{each.minor}", memory_bytes=each.total_memory) for each in found
    )


def _extras() -> dict[str, dict[str, str | None]]:
    """Read from the installed metadata which packages each extra names, and look each of them up."""
    try:
        own = metadata.metadata("mezzo")
    except metadata.PackageNotFoundError:
        return {}
    extras = [extra for extra in own.get_all("Provides-Extra") or () if extra not in _NOT_SHOWN]
    found: dict[str, dict[str, str | None]] = {extra: {} for extra in extras}
    for line in own.get_all("Requires-Dist") or ():
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        if name is not None and extra is not None and extra[1] in found and name[0] != "mezzo":
            found[extra[1]][name[0]] = _version(name[0])
    return {extra: packages for extra, packages in found.items() if packages}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions(packages: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'absent'}" for name, version in packages.items())


def _homeless(text: str) -> str:
    """Write ``~`` for the home folder, whose name is often that of a person."""
    try:
        home = str(Path.home())
    except RuntimeError:
        return text
    return text if home == os.sep else text.replace(home, "~")
