"""Functions in a process of their own: what they tell comes as they tell it, and every way to end has its words."""

import json
import os
import subprocess

import pytest

from mezzo.bench.children import _PREFIX, ask, tell


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Write the module that a child runs, and ask it: how it ended, and what it told."""
    monkeypatch.syspath_prepend(tmp_path)

    def run(body, *arguments, timeout_s=60.0, told=None, **options):
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        program = f"def tell(text):\n    print({_PREFIX!r} + text, flush=True)\n\n\ndef main(*words):\n{lines}\n"
        (tmp_path / "asked_child.py").write_text(program)
        heard = []
        return ask("asked_child", arguments, told or heard.append, timeout_s=timeout_s, **options), heard

    return run


def test_values_come_and_chatter_does_not(child):
    body = "import json\nprint('oneDNN says hello')\ntell(json.dumps(words))\ntell('[1, null]')"
    assert child(body, "a b", "é'") == ("", [["a b", "é'"], [1, None]])


def test_what_json_lacks_is_told_by_name(capsys):
    tell({"loss": float("nan"), "pair": (1, 2.5)})
    line = capsys.readouterr().out
    assert (line.count("\n"), json.loads(line.removeprefix(_PREFIX))) == (1, {"loss": "nan", "pair": [1, 2.5]})


@pytest.mark.parametrize(
    "end, words",
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGILL)", "ended with exit code -4"),
        ("raise ValueError('no kernel')", "ended with exit code 1: ValueError: no kernel"),
        ("raise SystemExit('FP32 does not learn')", "ended with exit code 1: FP32 does not learn"),
        ("import sys\nprint('a remark', file=sys.stderr)", ""),
    ],
)
def test_how_it_ended_is_said_and_what_it_told_before_counts(child, end, words):
    ended, heard = child(f"tell('1')\n{end}")
    assert ended == (f"the process that tried it {words}" if words else "")
    assert heard == [1]


def test_one_that_hangs_is_ended(child):
    ended, heard = child("tell('1')\nimport time\ntime.sleep(600)", timeout_s=1.5)
    assert ended == "the process that tried it did not end within 1.5 s"
    assert heard == [1]


def test_an_interrupt_of_the_listener_ends_the_child(child):
    heard = []

    def interrupted(value):
        heard.append(value)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child("import os, time\ntell(str(os.getpid()))\ntime.sleep(600)", told=interrupted)
    with pytest.raises(ProcessLookupError):
        os.kill(heard[0], 0)


def test_variables_are_added_where_there_are_none(child, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "the user's")
    names = ("CUBLAS_WORKSPACE_CONFIG", "MEZZO_OF_A_TEST", "PYTHONWARNINGS")
    body = f"import json, os\ntell(json.dumps([os.environ.get(name) for name in {names!r}]))"
    ended, heard = child(body, variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MEZZO_OF_A_TEST": "1"})
    assert (ended, heard) == ("", [["the user's", "1", None]])
    assert "MEZZO_OF_A_TEST" not in os.environ


def test_one_that_cannot_be_started(monkeypatch):
    def popen(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert ask("json", [], print, timeout_s=1.0) == "a child process could not be started: no more processes"
