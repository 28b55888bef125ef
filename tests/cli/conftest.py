"""What tests of the commands share."""

import pytest

from mezzo import report
from mezzo.cli import inspect, main


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


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures and pages take a second each; the tests of the report look at them."""
    for module, name in (
        (report, "draw_curves"),
        (report, "write_page"),
        (inspect, "draw"),
        (inspect, "draw_statistics"),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
