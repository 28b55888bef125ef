"""Write the README's tables from committed results: between each pair of markers, what the named result says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mezzo.report import to_markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def where(result: dict[str, Any]) -> str:
    """What a result was measured on, and when."""
    return f"{result['machine']}, {result['threads']} threads, torch {result['torch']}, {result['date']}"


def comparison(folder: str) -> str:
    """The table of one ``mezzo compare``."""
    return to_markdown(json.loads((RESULTS / folder / "summary.json").read_text()))


def ratios(pattern: str) -> str:
    """The table of the newest benchmark that matches, with its machine and date."""
    result = json.loads(sorted(RESULTS.glob(pattern))[-1].read_text())
    lines = ["| case | against | ratio | 10–90 % |", "|---|---|---:|---:|"]
    lines += [
        f"| {row['name']} | {row['against']} | {row['ratio']:.2f} | {row['ratio_p10']:.2f}–{row['ratio_p90']:.2f} |"
        for row in result["rows"]
    ]
    return "\n".join([*lines, "", f"{where(result)}; medians of {result['repetitions']} pairs."])


def steps(pattern: str) -> str:
    """The table of the newest ``benchmarks/step.py``, its first shapes, a row for each contender and dtype."""
    results = json.loads(sorted(RESULTS.glob(pattern))[-1].read_text())
    first = [result for result in results if result["shapes"] == results[0]["shapes"]]
    lines = ["| step | dtype | ratio | 10–90 % | bytes moved | bytes kept | of copy bandwidth |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {row['name']} | {result['dtype']} | {row['ratio']:.2f} | {row['ratio_p10']:.2f}–{row['ratio_p90']:.2f} | "
        f"{row['moved_bytes']:g} | {row['kept_bytes']:.3g} | {row['bandwidth_share']:.0%} |"
        for result in first
        for row in result["rows"]
    ]
    one = first[0]
    count = f"{one['shapes']}, {one['num_parameters'] / 1e6:.0f} M parameters"
    return "\n".join([*lines, "", f"{where(one)}; {count}; medians of {one['repetitions']} rounds."])


def trainings(pattern: str) -> str:
    """The table of the newest ``benchmarks/train.py``, a row for each network and way."""
    results = json.loads(sorted(RESULTS.glob(pattern))[-1].read_text())
    lines = ["| network | training step | ratio | 10–90 % | per second | peak MiB |", "|---|---|---:|---:|---:|---:|"]
    lines += [
        f"| {result['net']} | {row['way']}{', compiled' if row['compiled'] else ''} | {row['ratio']:.2f} | "
        f"{row['ratio_p10']:.2f}–{row['ratio_p90']:.2f} | {row['items_per_s']:,.0f} {result['unit']} | "
        f"{row['peak_bytes'] / 2**20:.3g} |"
        for result in results
        for row in result["rows"]
    ]
    one = results[0]
    what = f"{one['dtype']}, size {one['size']}"
    return "\n".join([*lines, "", f"{where(one)}; {what}; medians of {one['repetitions']} pairs."])


SECTIONS = {
    "digits-cnn": lambda: comparison("digits-cnn-cpu"),
    "docs-lm": lambda: comparison("docs-lm-cpu"),
    "session": lambda: ratios("session-cpu-*.json"),
    "scaler": lambda: ratios("scaler-cpu-*.json"),
    "step": lambda: steps("step-cpu-*.json"),
    "train": lambda: trainings("train-cpu-*.json"),
    "engine": lambda: ratios("engine-cpu-*.json"),
}


def filled(text: str) -> str:
    """Return the README's text with every section between its markers."""
    for name, section in SECTIONS.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        found = re.search(f"{start}.*?{end}", text, re.DOTALL)
        if found is None:
            raise SystemExit(f"the README has no {start} … {end}")
        text = text.replace(found.group(0), f"{start}\n{section()}\n{end}")
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))
