"""Runs of a comparison in this process: what is run and written is the same, without the seconds of a start."""

import contextlib
import io
import subprocess
import types
from typing import ClassVar

from mezzo.cli import main


class InThisProcess:
    """In the place of ``subprocess.Popen`` for ``python -m mezzo run …``.

    Attributes:
        started: The words behind ``python -m mezzo`` of each.
    """

    started: ClassVar[list[list[str]]] = []

    def __init__(self, words, *, stdout, stderr, stdin=None):
        assert words[1:4] == ["-m", "mezzo", "run"]
        assert stdin == subprocess.DEVNULL
        type(self).started.append(words[3:])
        out, err = (io.TextIOWrapper(file, write_through=True) for file in (stdout, stderr))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(words[3:])
            except SystemExit as leaving:
                self.code = leaving.code or 0
        for stream in (out, err):
            stream.detach()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, timeout=None):
        return self.code


#: In the place of ``subprocess`` where comparisons look for it.
HERE = types.SimpleNamespace(Popen=InThisProcess, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
