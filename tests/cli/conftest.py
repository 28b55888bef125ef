"""What tests of the commands share."""

from pathlib import Path

import pytest

from mezzo import report
from mezzo.cli import main

_curves, _page = report.curves, report.page


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing takes a second, and a page five megabytes; :func:`pictures` makes them all the same."""
    monkeypatch.setattr(report, "curves", lambda folder: (Path(folder) / "curves.png").touch())
    monkeypatch.setattr(report, "page", lambda folder: (Path(folder) / "report.html").touch())


@pytest.fixture
def pictures(no_pictures, monkeypatch):
    monkeypatch.setattr(report, "curves", _curves)
    monkeypatch.setattr(report, "page", _page)


@pytest.fixture
def mezzo(capsys, tmp_path, monkeypatch):
    """Run the command line in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as leaving:
            main([str(word) for word in words])
        captured = capsys.readouterr()
        return leaving.value.code or 0, captured.out, captured.err

    return run
