"""Results held against what was promised, as one page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Results = Mapping[str, Any]

SPLIT = "mezzo O2, AdamW split"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure that was promised.

    Attributes:
        what: In words.
        parts: What must be measured.
        bound: How much.
        at: Whether more or less is better.
        value: From results to the figure; it is asked only where the parts are there.
    """

    what: str
    parts: tuple[str, ...]
    bound: float
    at: Literal["least", "most"]
    value: Callable[[Results], float]

    def line(self, results: Results) -> str:
        """A row of the page's table."""
        wanted = f"{'≥' if self.at == 'least' else '≤'} {self.bound:g}"
        if missing := [part for part in self.parts if part not in results]:
            return f"| {self.what} | {wanted} | – | not measured: {', '.join(missing)} |"
        try:
            value = self.value(results)
        except LookupError as error:
            return f"| {self.what} | {wanted} | – | not measured: {error.args[0]} |"
        reached = value >= self.bound if self.at == "least" else value <= self.bound
        return f"| {self.what} | {wanted} | {value:.3g} | {'reached' if reached else '**missed**'} |"


def row(results: Results, part: str, name: str, compiled: bool | None = None) -> dict[str, Any]:
    """Return the row of a contender, or of a way."""
    for each in results[part]["rows"]:
        if each.get("way", each.get("name")) == name and each.get("compiled") == compiled:
            return each
    raise LookupError(f"{part} has no row {name!r}")


def _step(dtype: str, field: str) -> Callable[[Results], float]:
    return lambda results: row(results, f"step-{dtype}", SPLIT)[field]


def _speed(part: str, way: str, *, compiled: bool = False) -> Callable[[Results], float]:
    """How many times as fast as torch.amp, the median of pairs."""
    return lambda results: 1 / row(results, part, way, compiled)["ratio"]


def _peak(results: Results) -> float:
    peaks = [row(results, "train-gpt2", way, False)["peak_bytes"] for way in ("mezzo O2", "torch.amp")]
    return peaks[0] / peaks[1]


def _planned(results: Results) -> float:
    """The compiled cut, of the time of torch.autocast compiled."""
    for each in results["plan-gpt"]["rows"]:
        if (each["kernels"], each["placement"]) == ("compiled", "cut"):
            return float(each["ratio"])
    raise LookupError("plan-gpt has no row of the compiled cut")


def _syncs(results: Results) -> float:
    rows = [each for part, found in results.items() if part.startswith("train-") for each in found["rows"]]
    return max(each["syncs"] for each in rows if each["way"].startswith("mezzo"))


def _small(results: Results) -> float:
    return max(each["small"] for each in results["step-bfloat16"]["kernels"])


def _host(results: Results) -> float:
    tensors = results["step-bfloat16"]["kernels"][0]["tensors"]
    return row(results, "step-bfloat16", SPLIT)["host_ms"] / (0.7 + 0.005 * tensors)


def _quantising(results: Results) -> float:
    """Of all formats and calls the least."""
    return min(each["share"] for each in results["fp8"]["quantising"])


def _linear(results: Results) -> float:
    for each in results["fp8"]["linear"]:
        if each["kind"] == "fp8, tensorwise" and not each["lacks"]:
            return float(each["speed"])
    raise LookupError("this device has no products in FP8")


def _failing(results: Results) -> float:
    """How many fail; where none passes either, none has run."""
    return len(results["edges"]["failed"]) if results["edges"]["passed"] else math.inf


GOALS: Final = (
    *(
        Goal(what=f"step of 124 M in {dtype}, share of the copy's bandwidth", parts=(f"step-{dtype}",), bound=0.85,
             at="least", value=_step(dtype, "bandwidth_share"))
        for dtype in ("bfloat16", "float16")
    ),
    *(
        Goal(what=f"the same in {dtype}, time / torch.amp's", parts=(f"step-{dtype}",), bound=0.55, at="most",
             value=_step(dtype, "ratio"))
        for dtype in ("bfloat16", "float16")
    ),
    Goal(what="launches of a step beside the large ones", parts=("step-bfloat16",), bound=12, at="most", value=_small),
    Goal(what="the host's time for a step / (0.7 ms + 5 µs a tensor)", parts=("step-bfloat16",), bound=1, at="most",
         value=_host),
    Goal(what="GPT-2 small 8×1024, O2, tokens/s / torch.amp's", parts=("train-gpt2",), bound=1.25, at="least",
         value=_speed("train-gpt2", "mezzo O2")),
    Goal(what="the same, peak memory / torch.amp's", parts=("train-gpt2",), bound=0.75, at="most", value=_peak),
    Goal(what="the same, compiled, tokens/s / torch.amp's", parts=("train-gpt2-compiled",), bound=1.08, at="least",
         value=_speed("train-gpt2-compiled", "mezzo O2", compiled=True)),
    Goal(what="the same, O1, tokens/s / torch.amp's", parts=("train-gpt2",), bound=1.0, at="least",
         value=_speed("train-gpt2", "mezzo O1")),
    Goal(what="64 tiny layers, O2 captured, samples/s / torch.amp's", parts=("train-tiny",), bound=2.0, at="least",
         value=_speed("train-tiny", "mezzo O2 captured")),
    Goal(what="a block of GPT as planned, compiled, time / torch.autocast's", parts=("plan-gpt",), bound=1.02,
         at="most", value=_planned),
    Goal(what="quantising a matrix, the least share of the copy's bandwidth", parts=("fp8",), bound=0.7, at="least",
         value=_quantising),
    Goal(what="FP8 linear 4096×4096×8192 there and back, speed / BF16's", parts=("fp8",), bound=1.3, at="least",
         value=_linear),
    Goal(what="host syncs in a training step", parts=("train-gpt2", "train-tiny"), bound=0, at="most", value=_syncs),
    Goal(what="tests that need a GPU and fail", parts=("edges",), bound=0, at="most",
         value=_failing),
)  # fmt: skip


def page(title: str, results: Results, failures: Mapping[str, str]) -> str:
    """Write the page.

    Args:
        title: What was measured on, and when.
        results: By part.
        failures: Why a part has none, by part.
    """
    lines = [f"# {title}", "", "| goal | wanted | measured | verdict |", "|---|---:|---:|---|"]
    lines += [goal.line(results) for goal in GOALS]
    for head, section in (("Not measured", _not_measured(failures)), ("Ceilings", _ceilings(results)),
                          ("Below sixteen bits", _below_sixteen(results)), ("Tests that fail", _edges(results)),
                          ("Kernels of a step", _kernels(results)),
                          ("Pass 2 in variants", _variants(results))):  # fmt: skip
        if section:
            lines += ["", f"## {head}", "", *section]
    return "\n".join(lines) + "\n"


def _not_measured(failures: Mapping[str, str]) -> list[str]:
    return [f"- {part}: {why}" for part, why in failures.items()]


def _ceilings(results: Results) -> list[str]:
    if "ceilings" not in results:
        return []
    found, kernel = results["ceilings"], results["ceilings"]["one_element_kernel"]
    graph = "–" if kernel["graph_us"] is None else f"{kernel['graph_us']:.3g} µs"
    return [
        *(f"- copy of {each['mib']} MiB: {each['tb_per_s']:.3g} TB/s, from idle {each['tb_per_s_from_idle']:.3g}"
          for each in found["copies"]),
        f"- a one-element kernel: {kernel['stream_us']:.3g} µs in a stream, {graph} in a graph, "
        f"{kernel['host_us']:.3g} µs of the host",
        *(f"- {each['policy']}: a session in {each['s']:.3g} s, on {', '.join(each['covers'])}, "
          f"{'**under a mode**' if each['has_mode'] else 'without a mode'}" for each in found["sessions"]),
    ]  # fmt: skip


def _edges(results: Results) -> list[str]:
    parts = [part for part in ("edges", "edges-slow") if part in results]
    summary = [
        f"- {part}: {results[part]['passed']} passed, {len(results[part]['failed'])} failed, "
        f"{sum(results[part]['skipped'].values())} skipped"
        for part in parts
    ]
    failed = [each for part in parts for each in results[part]["failed"]]
    return summary + [f"- `{each['test']}`: {' '.join(each['message'].split())[:200]}" for each in failed]


def _below_sixteen(results: Results) -> list[str]:
    if "fp8" not in results:
        return []
    lines = [
        f"- {each['format']}, {each['call']}: {each['us']:.4g} µs, {each['share']:.0%} of copy"
        f" ({each['share_p10']:.0%} to {each['share_p90']:.0%})"
        for each in results["fp8"]["quantising"]
    ]
    for each in results["fp8"]["linear"]:
        told = f"lacking: {each['lacks']}" if each["lacks"] else (
            f"{each['ms']:.4g} ms, {each['speed']:.3g} × BF16's speed"
            f" ({each['speed_p10']:.3g} to {each['speed_p90']:.3g})"
        )  # fmt: skip
        lines.append(f"- linear, {each['kind']}: {told}")
    return lines


def _kernels(results: Results) -> list[str]:
    lines = []
    for part, found in results.items():
        for each in found["kernels"] if part.startswith("step-") else ():
            large = ", ".join(f"{name} {us:.0f} µs" for name, us in each["large_us"].items()) or "none"
            lines.append(f"- {part}, {each['name']}: {large}; {each['small']} small ones, {each['small_us']:.0f} µs")
    return lines


def _variants(results: Results) -> list[str]:
    if "variants" not in results:
        return []
    lines = ["| weights | variant | elements | warps | µs | of copy | same bits |", "|---|---|---:|---:|---:|---:|---|"]
    for each in results["variants"]:
        us, share = each.get("us"), each.get("share")
        figures = f"{us:.4g} | {share:.0%}" if us else "– | –"
        same = each.get("error") or {True: "yes", False: "**no**", None: "–"}[each["same_bits"]]
        about = f"{each['case']} | {each['variant']} | {each['block']} | {each['warps']}"
        lines.append(f"| {about} | {figures} | {' '.join(same.split())} |")
    return lines
