"""What FP16 makes of the numbers of a run in FP32: the classic histogram of activation gradients, in figures too."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from mezzo.numerics import KINDS, Evidence, ExponentHistogram, read_evidence

#: Those of the paper: none, the one that was enough for its detector, and the largest power of two in FP16.
SCALES: Final = (1.0, 8.0, 32768.0)
GRADIENTS: Final = "activation_gradients"


def publish(inspected: Path, result: Path, picture: Path) -> None:
    """Write the figures and the picture of what ``mezzo inspect --out`` has recorded.

    Args:
        inspected: Its folder.
        result: The figures, as JSON.
        picture: The picture, as PNG.
    """
    evidence = read_evidence(inspected / "evidence.jsonl")
    summary = json.loads((inspected / "summary.json").read_text())
    found = measured(evidence) | {"steps": summary["steps"]}
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, picture)


def measured(evidence: Evidence) -> dict[str, Any]:
    """Return, of each kind of tensors, what FP16 keeps at each scale; of activation gradients the counts, too."""
    found: dict[str, Any] = {"model": evidence.header.model, "recorded": len(evidence.steps), "kinds": {}}
    for kind in KINDS:
        tensors = [tensor for step in evidence.steps for tensor in step.tensors if tensor.kind == kind]
        if not tensors:
            continue
        histogram = ExponentHistogram.total_of(tensor.histogram for tensor in tensors)
        updates = [tensor.swallowed for tensor in tensors if tensor.swallowed is not None]
        found["kinds"][kind] = _kept(histogram)
        if updates:
            total = sum(updates[1:], updates[0])
            found["kinds"][kind]["swallowed"] = {name: total.share(name) for name in ("float16", "bfloat16")}
    return found


def _kept(histogram: ExponentHistogram) -> dict[str, Any]:
    rows = []
    for scale in SCALES:
        coverage = histogram.coverage("float16", scale)
        counts = {name: getattr(coverage, name) for name in ("underflow", "subnormal", "overflow")}
        rows.append({"scale": scale, **counts})
    bins = {str(exponent): count for exponent in range(-149, 128) if (count := histogram.count(exponent))}
    return {
        "total": histogram.total, "zeros": histogram.zeros, "max_abs": histogram.max_abs,
        "best_scale": histogram.best_scale("float16"), "bins": bins, "float16": rows,
    }  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw activation gradients: the share of values in each power of two, and FP16's range at each scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = result["kinds"][GRADIENTS]
    figure = Figure(figsize=(9.0, 4.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes, ranges = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1.0))
    exponents = [int(exponent) for exponent in shown["bins"]]
    axes.bar(exponents, [100 * count / shown["total"] for count in shown["bins"].values()], width=0.9, color="#0072B2")
    axes.set_yscale("log")
    axes.set_ylabel("% of all values")
    zeros = 100 * shown["zeros"] / shown["total"]
    axes.set_title(f"Activation gradients: {zeros:.1f} % are zero, and are not shown", loc="left")
    for row, each in enumerate(shown["float16"]):
        shift = math.log2(each["scale"])
        # What is above 2^-25 is rounded up to 2^-24, the smallest number.
        ranges.barh(row, 11, left=-25.5 - shift, height=0.55, color="#E69F00")
        ranges.barh(row, 30, left=-14.5 - shift, height=0.55, color="#009E73")
        lost = 100 * each["underflow"] / (shown["total"] - shown["zeros"])
        ranges.text(16.2 - shift, row, f"{lost:.3g} % flushed", va="center", fontsize=8)
    ranges.set_yticks(range(len(SCALES)), [f"× {scale:,.0f}" for scale in SCALES])
    ranges.invert_yaxis()
    ranges.set_xlabel(
        "log₂ |gradient|     FP16 at each loss scale: green normal, orange subnormal, flushed to zero below"
    )
    ranges.set_xlim(min(exponents) - 2, 28)
    figure.savefig(path)
