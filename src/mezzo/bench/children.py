"""Functions of mezzo's in a process of their own, which may die without harm to this one; what they tell on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from mezzo.documents import jsonable

__all__ = ["ask", "tell"]

#: Begins a line that is meant for the parent; libraries print others.
_PREFIX: Final = "mezzo-child "


def ask(
    module: str,
    arguments: Sequence[str],
    told: Callable[[Any], None],
    *,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Call a module's ``main`` with some texts in a child process.

    Args:
        module: Its full name.
        arguments: What ``main`` is called with.
        told: Is handed each value that the child tells, as it comes.
        timeout_s: After which the child is ended.
        variables: What is added to its environment where that has no such variable.

    Returns:
        How it ended, in words; ``""`` if it did as it should.
    """
    command = [sys.executable, "-c", f"import sys; from {module} import main; main(*sys.argv[1:])", *arguments]
    environment = {**(variables or {}), **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment.pop("PYTHONWARNINGS", None)  # a filter of the user's must not turn a deprecation into an end
    late = threading.Event()
    with tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
        except (OSError, subprocess.SubprocessError) as fault:
            return f"a child process could not be started: {fault}"

        def end() -> None:
            late.set()
            child.kill()

        alarm = threading.Timer(timeout_s, end)
        alarm.start()
        try:
            for line in child.stdout or ():
                text = line.decode(errors="replace")
                if text.startswith(_PREFIX):
                    told(json.loads(text.removeprefix(_PREFIX)))
        except BaseException:
            child.kill()
            raise
        finally:
            alarm.cancel()
            child.communicate()
        if late.is_set():
            return f"the process that tried it did not end within {timeout_s:.4g} s"
        if child.returncode == 0:
            return ""
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"the process that tried it ended with exit code {child.returncode}" + (f": {said}" if said else "")


def tell(value: Any) -> None:
    """Hand a value to the parent: what JSON can hold, and numbers that are not finite."""
    print(_PREFIX + json.dumps(jsonable(value), allow_nan=False), flush=True)
