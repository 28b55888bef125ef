"""Products below sixteen bits: quantising against a copy, and a linear layer against BF16's, in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import mezzo
from mezzo.cast.products import recipe_support
from mezzo.formats import BLOCK_FORMATS, quantized
from stepping.timing import Behind, against, copying, nothing, rounds, spread

from .plan import Plan

FORMATS: Final = ("tensorwise_e4m3", "tensorwise_e5m2", "rowwise_e4m3", "mxfp8_e4m3", "nvfp4", "nvfp4_2d")
#: By what ``recipe_support`` calls a kind, the words of its policy.
KINDS: Final = {
    "fp8, tensorwise": "fp8=*",
    "fp8, rowwise": "fp8_recipe=rowwise,fp8=*",
    "mxfp8": "mxfp8=*",
    "nvfp4": "nvfp4=*",
}
#: Rows, features in, features out.
LINEAR: Final = (4096, 4096, 8192)
SIDE: Final = 8192


def measure(plan: Plan) -> dict[str, Any]:
    """Quantise a BF16 matrix to each format, along both dimensions; run a linear layer of each kind there and back."""
    return {"quantising": quantising(plan), "linear": linear(plan)}


def moved_bytes(x: Tensor, name: str) -> float:
    """Return the bytes that must be read and written: a whole tensor's scale takes a first reading."""
    form = BLOCK_FORMATS[name]
    readings = 2 if form.block is None or form.tensor_scale else 1
    return x.numel() * (readings * x.element_size() + form.bits_per_element / 8)


def quantising(plan: Plan) -> list[dict[str, Any]]:
    """Bytes a second, as a share of those of a copy of as many bytes as the matrix has, pair by pair."""
    side = 64 if plan.dry else SIDE
    x = torch.randn(side, side, device=plan.device).bfloat16()
    key = torch.ones((), dtype=torch.int32, device=plan.device)
    size = x.numel() * x.element_size()
    copy, rows = copying(plan.device, size), []
    for name in FORMATS:
        form = BLOCK_FORMATS[name]
        calls: dict[str, Callable[[], object]] = {
            f"{how}, dim={dim}": lambda form=form, dim=dim, at=at: quantized(x, form, dim, key=at)
            for how, at in (("nearest", None), ("stochastic", key))
            for dim in (1, 0)
        }
        taken = _taken(plan, {"copy": copy, **calls})
        by_copy, moved = 2 * size, moved_bytes(x, name)
        for call in calls:
            share = spread([1 / each * moved / by_copy for each in _ratios(taken[call], taken["copy"])])
            rows.append({
                "format": name, "call": call, "us": 1e6 * spread(taken[call]).median, "share": share.median,
                "share_p10": share.p10, "share_p90": share.p90,
            })  # fmt: skip
    return rows


def linear(plan: Plan) -> list[dict[str, Any]]:
    """The time of a linear layer, forward and backward, over BF16's, pair by pair."""
    rows, features, out = (64, 64, 128) if plan.dry else LINEAR
    kinds, found = recipe_support(plan.device.type, torch.bfloat16), []
    x = torch.randn(rows, features, device=plan.device, dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(out, features, device=plan.device, dtype=torch.bfloat16))
    gradient = torch.randn(rows, out, device=plan.device, dtype=torch.bfloat16)
    for kind, words in KINDS.items():
        if (lacks := kinds[kind].lacks) and not plan.dry:
            found.append({"kind": kind, "lacks": lacks})
            continue
        calls = {
            name: lambda policy=policy: _both_passes(policy, plan.device.type, x, weight, gradient)
            for name, policy in (("bf16", "O1,dtype=bfloat16"), (kind, f"O1,dtype=bfloat16,{words}"))
        }
        taken = _taken(plan, calls)
        speed = against(taken["bf16"], taken[kind])
        found.append({
            "kind": kind, "lacks": lacks, "ms": 1e3 * spread(taken[kind]).median,
            "bf16_ms": 1e3 * spread(taken["bf16"]).median, "speed": speed.median, "speed_p10": speed.p10,
            "speed_p90": speed.p90,
        })  # fmt: skip
    return found


def _both_passes(policy: str, device: str, x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    with mezzo.autocast(policy, device):
        out = functional.linear(x, weight)
    torch.autograd.grad(out, (x, weight), gradient)


def _taken(plan: Plan, calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Time calls in turns: what the device works, without the host's time."""
    behind = Behind(plan.device)
    found = rounds(
        {name: (nothing, call) for name, call in calls.items()}, behind, plan.repetitions, 1 + 2 * (not plan.dry)
    )
    return {name: [each.seconds for each in taken] for name, taken in found.items()}


def _ratios(mine: list[float], rival: list[float]) -> list[float]:
    return [one / other for one, other in zip(mine, rival, strict=True)]
