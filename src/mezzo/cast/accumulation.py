"""The precision in which CUDA's GEMMs accumulate: flags of torch's, set for a region and put back after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mezzo.cast.differences import Differences
from mezzo.errors import UnsupportedError
from mezzo.policy import Policy
from mezzo.policy.spelling import both

__all__ = ["accumulation", "reductions", "set_reductions"]


@contextlib.contextmanager
def accumulation(policy: Policy, per_device: tuple[Differences, ...]) -> Iterator[None]:
    """Forbid reduced-precision accumulation inside CUDA's GEMMs, but for a policy of torch's own lists.

    ``lists=device`` is torch's own behaviour on each device, with what its flags say. These are process-wide; they are
    put back on exit, with what the user said of split-k.

    Args:
        policy: What is asked for.
        per_device: Of the devices that are covered: without CUDA among them nothing is touched.

    Raises:
        UnsupportedError: Entered inside a compiled function, which cannot set them, while they allow it.
    """
    covered = any(each.device_type == "cuda" for each in per_device)
    if not covered or policy.lists == "device" or not torch.cuda.is_available():
        yield
        return
    if torch.compiler.is_compiling():
        _require_off(str(policy))
        yield
        return
    before = reductions()
    set_reductions([(False, split_k) for _, split_k in before])
    try:
        yield
    finally:
        set_reductions(before)


def _require_off(policy: str) -> bool:
    """Refuse to be compiled where GEMMs may accumulate in reduced precision; Dynamo itself guards that it stays so."""
    dtypes = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    allowed = dict(zip(dtypes, reductions(), strict=True))
    dtype = Policy.parse(policy).dtype
    if dtype in allowed and allowed[dtype][0]:
        flag = f"torch.backends.cuda.matmul.allow_{dtypes[dtype]}_reduced_precision_reduction"
        raise UnsupportedError(
            "a compiled region cannot keep CUDA's products from summing in low precision",
            where=f"{flag} is True",
            why="compiled code would set it to False only when all its GEMMs have run",
            write=f"{flag} = False  # before the function is called\n"
            "or the region around the compiled function, where it sets that itself\n"
            f"or torch's own lists, which leave it to torch: {both('lists=device')}",
        )
    return True


# As `_resolve`: it runs while the function is traced.
_require_off._dynamo_marked_constant = True  # type: ignore[attr-defined]


def reductions() -> list[tuple[bool, bool]]:
    """Return for FP16 and BF16 whether GEMMs may accumulate in reduced precision, and whether they may split k."""
    # torch.backends has a name for the first half alone, and sets the second to True with it.
    return [
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
    ]


def set_reductions(pairs: list[tuple[bool, bool]]) -> None:
    """Set what :func:`reductions` returns."""
    torch._C._set_cublas_allow_fp16_reduced_precision_reduction(*pairs[0])
    torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*pairs[1])
