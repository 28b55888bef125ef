"""What tests of the commands share."""

from pathlib import Path

import pytest

from mezzo import report

_curves = report.curves


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing takes a second; :func:`pictures` does it all the same."""
    monkeypatch.setattr(report, "curves", lambda folder: (Path(folder) / "curves.png").touch())


@pytest.fixture
def pictures(no_pictures, monkeypatch):
    monkeypatch.setattr(report, "curves", _curves)
