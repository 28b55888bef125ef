"""A comparison as one HTML file that opens without a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from mezzo.files import whole
from mezzo.report.picture import differences_of, look, losses_of
from mezzo.report.table import cells
from mezzo.report.verdict import short, verdict
from mezzo.script.comparison import Comparison, Run

__all__ = ["write_page"]


def write_page(comparison: Comparison, path: Path) -> None:
    """Write verdict, table and curves; five megabytes, of which all but a few are plotly's own.

    **Cost**: about a second.
    """
    import jinja2
    import plotly.io

    heads, rows = cells(comparison, full=True)
    drawn = [
        _figure(comparison, "training loss, smoothed", losses_of),
        _figure(
            comparison, "training loss, smoothed, less FP32's with the same seed", partial(differences_of, comparison)
        ),
        _figure(comparison, "loss scale", lambda run: list(run.scales)),
    ]
    figures = [
        plotly.io.to_html(each, full_html=False, include_plotlyjs=number == 0) for number, each in enumerate(drawn)
    ]
    text = files("mezzo.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True).from_string(text)
    page = template.render(comparison=comparison, verdict=verdict(comparison), heads=heads, rows=rows, figures=figures)
    with whole(path) as file:
        file.write(page.encode())


def _figure(comparison: Comparison, title: str, values: Callable[[Run], Sequence[float]]) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    shown = [value for run in comparison.runs for value in values(run) if math.isfinite(value)]
    for place, policy in enumerate(comparison.policies):
        colour, is_dashed = look(place)
        for number, run in enumerate(comparison.of(policy)):
            line = [value if math.isfinite(value) else None for value in values(run)]
            figure.add_scatter(
                x=list(range(1, len(line) + 1)),
                y=line,
                mode="lines",
                name=short(policy),
                legendgroup=policy,
                showlegend=number == 0,
                line={"color": colour, "dash": "dash" if is_dashed else "solid", "width": 1.5},
                hovertemplate=f"%{{y:.5g}}, step %{{x}}, seed {run.seed}" if run.seed is not None else None,
            )
    wide = bool(shown) and 0 < 10 * min(shown) <= max(shown)
    figure.update_layout(
        template="plotly_white", title=title, height=420, xaxis_title="step", legend={"orientation": "h", "y": -0.2}
    )
    figure.update_yaxes(type="log" if wide else "linear")
    return figure
