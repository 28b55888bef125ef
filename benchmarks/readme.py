"""Write the README's tables from committed results: between each pair of markers, what the named result says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mezzo.report import to_markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


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
    facts = f"{result['machine']}, {result['threads']} threads, torch {result['torch']}, {result['date']}"
    return "\n".join([*lines, "", f"{facts}; medians of {result['repetitions']} pairs."])


SECTIONS = {
    "digits-cnn": lambda: comparison("digits-cnn-cpu"),
    "docs-lm": lambda: comparison("docs-lm-cpu"),
    "session": lambda: ratios("session-cpu-*.json"),
    "scaler": lambda: ratios("scaler-cpu-*.json"),
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
