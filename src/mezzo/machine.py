"""What a result was measured on, and what a fault happened on: facts, without a word on what follows from them."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils import collect_env

import mezzo
from mezzo.cast.device import processor
from mezzo.compiled import compiler
from mezzo.errors import UnsupportedError
from mezzo.releases import NEWEST_TESTED, lacking

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
_PACKAGES: Final = ("numpy", "triton", "typer", "rich", "lightning", "accelerate", "transformers")


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
    """Return whether FP32 ``products`` and ``convolutions`` use TF32 on a GPU, by whichever of torch's switches."""
    return {
        # The older ``allow_tf32`` cannot be read once ``torch.backends.fp32_precision`` is set.
        "products": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "convolutions": torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
    }


def environment() -> dict[str, Any]:
    """Collect the facts that a bug report needs, as JSON can hold them.

    Returns:
        ``machine`` as :func:`describe` says it, torch's own report under ``torch_collect_env``, and what it leaves out:
        private names that mezzo takes of torch and this release lacks, the C++ compiler of kernels, packages, TF32, and
        those of :data:`VARIABLES` that are set, with ``~`` for the home folder.

    **Cost**: some seconds, for programs that torch asks for their versions, and for imports of Dynamo and FSDP2.

    Example:
        >>> environment()["machine"]["torch"] == torch.__version__
        True
    """
    try:
        cpp = compiler()
    except UnsupportedError as error:
        cpp = str(error).splitlines()[0]
    facts = {
        "machine": describe(torch.device("cpu")),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "compiler": cpp,
        "newest_torch_tested": NEWEST_TESTED,
        "torch_lacks": lacking(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "tf32": tf32() if torch.cuda.is_available() else None,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "torch_collect_env": collect_env.get_env_info()._asdict(),  # type: ignore[no-untyped-call]
    }
    homeless: dict[str, Any] = _homeless(facts)
    return homeless


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _homeless(value: Any) -> Any:
    """Write ``~`` for the home folder, whose name is often that of a person, in every text."""
    if isinstance(value, dict):
        return {key: _homeless(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_homeless(item) for item in value]
    try:
        home = str(Path.home())
    except RuntimeError:
        return value
    return value.replace(home, "~") if isinstance(value, str) and home != os.sep else value
