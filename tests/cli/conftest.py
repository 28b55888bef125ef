"""What tests of the commands share."""

import pytest

from mezzo.cli import main


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
