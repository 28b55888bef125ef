"""From a run directory to tables and pictures.

Everything here reads the files that a comparison wrote, or the dictionary that went into ``summary.json``, so
that an old run can be shown as well as a new one. Nothing here trains, and nothing here prints.
"""

from __future__ import annotations

from mezzo.report.judgement import Judgement, judge
from mezzo.report.page import page, require_plotly
from mezzo.report.picture import curves, require_matplotlib
from mezzo.report.ranks import rank_tables
from mezzo.report.run import Run, read
from mezzo.report.table import facts, results_tables, to_markdown

__all__ = [
    "Judgement",
    "Run",
    "curves",
    "facts",
    "judge",
    "page",
    "rank_tables",
    "read",
    "require_matplotlib",
    "require_plotly",
    "results_tables",
    "to_markdown",
]  # fmt: skip
