"""A run as one HTML file: it opens without a network, and its switches compute in the reader's browser."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any, Final

import mezzo
from mezzo import files
from mezzo.errors import PolicyError, require_extra
from mezzo.recipes.run_directory import PAGE
from mezzo.report.content import content
from mezzo.report.run import read

__all__ = ["page", "require_plotly"]

#: What every page of mezzo's has near its top, and no other.
_MARK: Final = b'<meta name="generator" content="mezzo '


def require_plotly() -> None:
    """Fail now rather than after a training if pages cannot be written.

    Raises:
        UnsupportedError: plotly or jinja2 is not installed.
    """
    require_extra("report", "writing a report needs plotly and jinja2", "plotly.package_data", "jinja2")


def page(run_directory: Path | str, path: Path | str | None = None) -> Path:
    """Write a run as one self-contained HTML file.

    Args:
        run_directory: What ``mezzo compare``, ``mezzo train`` or ``mezzo inspect`` wrote. Of a run that was killed it
            holds what there was until then; the page says that it is partial.
        path: Of the file; ``report.html`` in the run directory when ``None``. An older page is replaced.

    Returns:
        The path.

    Raises:
        UnsupportedError: plotly or jinja2 is not installed.
        PolicyError: There is no run in the directory, the path holds a file that is no page of mezzo's, or no file can
            be written there.
        StateError: The run is not whole, cannot be read, or another version wrote it.

    **Cost**: less than a second for a run of some thousand steps. The file has plotly's 4.8 MB, and at most a few more
    whatever the model: steps between others and alike layers are left out or summed up, which the page says.
    """
    require_plotly()
    run = read(run_directory, killed=True)
    path = run.path / PAGE if path is None else Path(path)
    _require_own(path)
    text = rendered(content(run))
    try:
        with files.whole(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise PolicyError("the report cannot be written", where=str(path), why=str(error)) from error
    return path


def rendered(said: dict[str, Any]) -> str:
    """Fill the template: every text is escaped but what belongs to the page itself."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_own("page.html.jinja"))
    # A script element ends at the first "</script", and "<!--" changes what ends it.
    data = json.dumps(said["data"], allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    plotly = resources.files("plotly.package_data").joinpath("plotly.min.js").read_text(encoding="utf-8")
    return template.render(
        said, json=data, css=_own("page.css"), script=_own("page.js"), plotly=plotly, version=mezzo.__version__
    )


def _own(name: str) -> str:
    return resources.files("mezzo.report").joinpath("template", name).read_text(encoding="utf-8")


def _require_own(path: Path) -> None:
    """Refuse to replace what is no page of mezzo's."""
    try:
        with files.opened(path) as file:
            is_own = _MARK in file.read(4096)
    except FileNotFoundError:
        return
    except OSError as error:
        raise PolicyError("the report cannot be written", where=str(path), why=str(error)) from error
    if not is_own:
        raise PolicyError(
            "the report would replace a file that mezzo did not write",
            where=str(path),
            write=f"--out {path.with_name('mezzo-' + path.name)}, or move the file",
        )
