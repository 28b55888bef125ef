"""The classic histogram: activation gradients of a detector, and what FP16 makes of them unscaled, at 8 and at 32,768.

``python benchmarks/figures.py`` trains a small multi-box detector of handwritten digits in FP32, records the gradients
of all its activations, and writes a dated JSON and the picture drawn from it; ``--draw`` draws the newest JSON again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import write_dated
from mezzo.numerics import ExponentHistogram, Recorder
from stepping.facts import facts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "figures" / "activation_gradients.png"

SCALES: Final = (1.0, 8.0, 32768.0)
SIZE: Final = 64  # pixels of a canvas, in both directions
CLASSES: Final = 11  # background and ten digits
#: Cells in both directions, and the sizes of their boxes in shares of the canvas, of each feature map.
MAPS: Final = ((16, (0.22, 0.3)), (8, (0.38, 0.5)))


class Detector(nn.Module):
    """Boxes and classes from two feature maps, as in SSD: a shared trunk, and a 3×3 head on each map."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*_stage(1, width), *_stage(width, 2 * width))
        self.deeper = nn.Sequential(*_stage(2 * width, 4 * width))
        channels = len(MAPS[0][1]) * (CLASSES + 4)
        self.heads = nn.ModuleList(nn.Conv2d(c, channels, 3, padding=1) for c in (2 * width, 4 * width))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map (batch, 1, 64, 64) to classes (batch, boxes, 11) and offsets (batch, boxes, 4)."""
        first = self.trunk(images)
        maps = (first, self.deeper(first))
        flat = [
            head(each).permute(0, 2, 3, 1).reshape(len(images), -1, CLASSES + 4)
            for head, each in zip(self.heads, maps, strict=True)
        ]
        out = torch.cat(flat, 1)
        return out[..., :CLASSES], out[..., CLASSES:]


def _stage(inputs: int, outputs: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, stride=2, padding=1), nn.ReLU(),
    ]  # fmt: skip


def default_boxes() -> Tensor:
    """Centre and size of every default box, in shares of the canvas: (boxes, 4)."""
    rows = []
    for cells, sizes in MAPS:
        centres = (torch.arange(cells) + 0.5) / cells
        y, x = torch.meshgrid(centres, centres, indexing="ij")
        each = [torch.stack([x, y, torch.full_like(x, s), torch.full_like(x, s)], -1) for s in sizes]
        rows.append(torch.stack(each, 2).reshape(-1, 4))
    return torch.cat(rows)


def corners(boxes: Tensor) -> Tensor:
    """Turn centre and size into left, top, right, bottom."""
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of each of (n, 4) with each of (m, 4) corners: (n, m)."""
    low = torch.maximum(one[:, None, :2], other[None, :, :2])
    high = torch.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(each[:, 2:] - each[:, :2]).prod(-1) for each in (one, other)]
    return shared / (areas[0][:, None] + areas[1][None, :] - shared)


def canvases(images: Tensor, labels: Tensor, number: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Put one to three digits on each canvas: pixels, and for each default box its class and offsets."""
    boxes = default_boxes()
    pixels = torch.zeros(number, 1, SIZE, SIZE)
    classes = torch.zeros(number, len(boxes), dtype=torch.long)
    offsets = torch.zeros(number, len(boxes), 4)
    for row in range(number):
        for _ in range(int(torch.randint(1, 4, (), generator=random))):
            pick = int(torch.randint(len(images), (), generator=random))
            size = int(torch.randint(14, 33, (), generator=random))
            x, y = (int(torch.randint(SIZE - size + 1, (), generator=random)) for _ in range(2))
            digit = functional.interpolate(images[pick][None, None], (size, size), mode="bilinear")[0, 0]
            patch = pixels[row, 0, y : y + size, x : x + size]
            patch.copy_(torch.maximum(patch, digit))
            truth = torch.tensor([x + size / 2, y + size / 2, size, size]) / SIZE
            fit = overlap(corners(boxes), corners(truth[None]))[:, 0]
            taken = (fit > 0.5) | (fit == fit.max())
            classes[row, taken] = int(labels[pick]) + 1
            centre = (truth[:2] - boxes[taken, :2]) / boxes[taken, 2:]
            offsets[row, taken] = torch.cat([centre, (truth[2:] / boxes[taken, 2:]).log()], -1)
    return pixels, classes, offsets


def multibox_loss(scores: Tensor, found: Tensor, classes: Tensor, offsets: Tensor) -> Tensor:
    """Cross entropy over the boxes with a digit and three times as many hard ones without, and smooth L1 of offsets."""
    positive = classes > 0
    each = functional.cross_entropy(scores.flatten(0, 1), classes.flatten(), reduction="none").view_as(classes)
    rank = each.detach().masked_fill(positive, -math.inf).argsort(1, descending=True).argsort(1)
    kept = positive | (rank < 3 * positive.sum(1, keepdim=True))
    boxes = functional.smooth_l1_loss(found[positive], offsets[positive], reduction="sum")
    return ((each * kept).sum() + boxes) / positive.sum()


def trained(steps: int, recorded: int, batch: int = 32) -> tuple[Recorder, list[float]]:
    """Train in FP32, and record the gradients of all activations in the last steps."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps + recorded)
    losses = []
    recorder = Recorder(model, every=1, kinds=["activation_gradients"], modules=_layers(model), keep=None)

    def step() -> None:
        pixels, classes, offsets = canvases(images, labels, batch, random)
        loss = multibox_loss(*model(pixels), classes, offsets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())

    for _ in range(steps):
        step()
    with recorder:
        for _ in range(recorded):
            step()
            recorder.step()
    return recorder, losses


def _layers(model: nn.Module) -> list[str]:
    return [path for path, each in model.named_modules() if isinstance(each, nn.Conv2d | nn.ReLU)]


def measured(histogram: ExponentHistogram) -> dict[str, Any]:
    """What the page says of a histogram: its counts, and what FP16 keeps of it at each scale."""
    bins = {str(exponent): count for exponent in range(-149, 128) if (count := histogram.count(exponent))}
    rows = []
    for scale in SCALES:
        coverage = histogram.coverage("float16", scale)
        rows.append(
            {"scale": scale} | {name: getattr(coverage, name) for name in ("underflow", "subnormal", "overflow")}
        )
    return {
        "total": histogram.total, "zeros": histogram.zeros, "max_abs": histogram.max_abs,
        "best_scale": histogram.best_scale("float16"), "bins": bins, "float16": rows,
    }  # fmt: skip


def draw(result: dict[str, Any], path: Path = PICTURE) -> Path:
    """Draw a result: the share of values in each binade, and where FP16's range lies at each scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes, ranges = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1.0))
    exponents = [int(exponent) for exponent in result["bins"]]
    shares = [100 * count / result["total"] for count in result["bins"].values()]
    axes.bar(exponents, shares, width=0.9, color="#0072B2")
    axes.set_yscale("log")
    axes.set_ylabel("% of all values")
    zeros = 100 * result["zeros"] / result["total"]
    axes.set_title(f"Activation gradients of a digit detector: {zeros:.1f} % are zero, and are not shown", loc="left")
    for row, each in enumerate(result["float16"]):
        shift = math.log2(each["scale"])
        # What is above 2^-25 is rounded up to 2^-24, the smallest number.
        ranges.barh(row, 11, left=-25.5 - shift, height=0.55, color="#E69F00")
        ranges.barh(row, 30, left=-14.5 - shift, height=0.55, color="#009E73")
        lost = 100 * each["underflow"] / (result["total"] - result["zeros"])
        ranges.text(16.2 - shift, row, f"{lost:.3g} % flushed", va="center", fontsize=8)
    ranges.set_yticks(range(len(SCALES)), [f"× {scale:,.0f}" for scale in SCALES])
    ranges.invert_yaxis()
    ranges.set_xlabel(
        "log₂ |gradient|     FP16 at each loss scale: green normal, orange subnormal, flushed to zero below"
    )
    ranges.set_xlim(min(exponents) - 2, 28)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="draw the newest JSON, and measure nothing")
    parser.add_argument("--steps", type=int, default=1500, help="of training, before gradients are recorded")
    parser.add_argument("--recorded", type=int, default=20, help="steps whose gradients count")
    arguments = parser.parse_args()
    if arguments.draw:
        result = json.loads(sorted(RESULTS.glob("figures-cpu-*.json"))[-1].read_text())
    else:
        recorder, losses = trained(arguments.steps, arguments.recorded)
        histogram = recorder.histogram("activation_gradients", step="all")
        head = {"steps": arguments.steps, "recorded": arguments.recorded, "losses": [losses[0], losses[-1]]}
        result = {**facts(torch.device("cpu")), **head, **measured(histogram)}
        print(write_dated(RESULTS, "figures", result))
    print(draw(result))


if __name__ == "__main__":
    main()
