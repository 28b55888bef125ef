"""``mezzo run``: exit codes, the report on stderr, JSON, each step in a file, one dry step."""

import json
import sys
from pathlib import Path

from ..script.conftest import SCRIPTS

BF16 = "O1,dtype=bfloat16"


def test_the_report_is_on_stderr_and_the_scripts_output_as_it_is(mezzo):
    code, out, err = mezzo("run", "--policy", BF16, SCRIPTS / "frozen.py")
    assert code == 0
    assert out.startswith("accuracy 0.8")
    first, *rest = err.splitlines()
    assert first.endswith("frozen.py under O1,dtype=bfloat16: 35.7 % of the work of its matrix products ran low, "
                          "measured in 3 steps")  # fmt: skip
    assert "  steps        80, none skipped" in rest
    assert "  models       Linear, Sequential" in rest
    assert "  products     64.3 % FP32, 35.7 % BF16" in rest


def test_words_after_the_script_are_the_scripts(mezzo):
    code, out, _ = mezzo("run", "--policy", BF16, SCRIPTS / "untrained.py", "--policy", "O2", "--help", "-m")
    assert (code, out) == (4, "__main__ ['--policy', 'O2', '--help', '-m'] True\n")


def test_the_exit_code_is_the_scripts(mezzo, tmp_path):
    for own in (0, 7):
        assert mezzo("run", "--policy", BF16, SCRIPTS / "leaves.py", own)[0] == own
    (tmp_path / "untrained.py").write_text("import torch\ntorch.nn.Linear(4, 1)(torch.ones(2, 4))\n")
    assert mezzo("run", "--policy", "O0", "untrained.py")[0] == 0  # an alarm only where FP32 was not asked for
    code, out, err = mezzo("run", "--dry", "--policy", BF16, SCRIPTS / "functional_only.py")
    assert (code, out) == (4, "")
    assert err.endswith("functional_only.py called no model to train before its step 1 was done\n")


def test_a_crash_is_shown_as_python_shows_it_and_reported_all_the_same(mezzo):
    code, _, err = mezzo("run", "--policy", BF16, SCRIPTS / "crashes.py")
    assert code == 1
    assert err.startswith("Traceback (most recent call last):\n  File ")
    assert "in <module>\n    raise ValueError(\"the script's own\")\nValueError: the script's own\nmezzo run " in err
    assert "steps        1, none skipped" in err


LOOP = """
import sys, torch
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad(); model(torch.ones(8, 16)).sum().backward(); optimizer.step()
    print("step", step, end="\\r", file=getattr(sys, "{stream}"))
{end}
"""


def test_the_report_begins_on_a_line_of_its_own(mezzo, tmp_path):
    path = tmp_path / "open.py"
    for stream, end in (("stdout", ""), ("stderr", "raise ValueError(1)")):
        path.write_text(LOOP.format(stream=stream, end=end))
        write = sys.stdout.write
        _, out, err = mezzo("run", "--policy", BF16, path)
        assert sys.stdout.write == write
        assert (out if stream == "stdout" else err).startswith("step 0\r")
        first = err if stream == "stdout" else err.rpartition("\r")[2]
        assert first.startswith("\nTraceback" if end else f"\nmezzo run {path} under")
        assert f"\nmezzo run {path} under" in err
    path.write_text(LOOP.format(stream="stderr", end="").replace("\\r", "\\n"))
    assert f"step 3\nmezzo run {path} under" in mezzo("run", "--policy", BF16, path)[2]  # at once behind a whole line


PARSER = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--epochs')\nparser.parse_args()\n"


def test_options_behind_a_module_that_does_not_know_them_are_pointed_at(mezzo, tmp_path):
    """Which files a module's options come from is not looked up: they are the module's."""
    (tmp_path / "parses.py").write_text(PARSER)
    assert "stands behind" not in mezzo("run", "-m", "parses", "--other", "3")[2]
    for verb, words, hint in (
        (["run"], ["--policy", "O2", "--epochs", "3"], "--policy O2"),
        (["run"], ["--policy=O2,dtype=bfloat16", "--dry"], "--policy=O2,dtype=bfloat16 --dry"),
        (["run", "--dry"], ["--max-grad-norm", "1"], "--max-grad-norm 1"),
        (["explain"], ["--policy", "O2"], "--policy O2"),
        (["inspect"], ["--every", "5"], "--every 5"),
        (["tune"], ["--policy", "O1,bf16"], "--policy O1,bf16"),
    ):
        code, _, err = mezzo(*verb, "-m", "parses", *words)
        assert code == 2
        assert "error: unrecognized arguments" in err
        assert (
            f"mezzo: {hint.split()[0].partition('=')[0]} stands behind the script's name\n"
            "  why    what follows the script is the script's own, and it does not seem to know it\n"
            f"  write  {hint} before parses, if it is meant for mezzo\n"
        ) in err


def test_json_is_on_stdout_and_in_the_folder(mezzo, tmp_path):
    code, out, err = mezzo("run", "--policy", BF16, "--json", "--out", "found", SCRIPTS / "functional_only.py")
    assert code == 4
    document = json.loads(out)  # what the script prints is on stderr
    assert document["alarm"].startswith("nothing ran in low precision: no module holds what")
    assert document["left_alone"] == {"SGD over 1 tensor": "no module holds what it updates"}
    assert json.loads((tmp_path / "found" / "summary.json").read_text()) == document
    assert "mezzo run" not in err


def test_each_step_is_a_line_of_metrics(mezzo, tmp_path):
    code, _, err = mezzo("run", "--policy", BF16, "--steps", "5", "--out", "found", SCRIPTS / "scaled.py")
    assert code == 0
    assert "  steps        5, none skipped" in err
    lines = list(map(json.loads, (tmp_path / "found" / "metrics.jsonl").read_text().splitlines()))
    assert [step["step"] for step in lines] == [1, 2, 3, 4, 5]
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 and step["ms"] > 0 for step in lines)


def test_a_schedule_is_in_the_report_and_a_dry_step_explains_each_part(mezzo):
    schedule = "O1,bf16,fp32=softmax@0; bf16@2"
    code, _, err = mezzo("run", "--policy", schedule, "--steps", "3", "--out", "run", SCRIPTS / "plain.py")
    assert code == 0
    assert "under O1,dtype=bfloat16,fp32=softmax@0; O1,dtype=bfloat16@2: " in err.splitlines()[0]
    assert "  changed      to O1,dtype=bfloat16 after 2 steps\n" in err
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["changes"], summary["refusals"], summary["exit_code"]) == ([[2, "O1,dtype=bfloat16"]], 0, 0)
    code, out, _ = mezzo("run", "--dry", "--policy", schedule, SCRIPTS / "plain.py")
    assert (code, out.count("O1,dtype=bfloat16,fp32=softmax")) == (0, 1)
    assert out.count("O1,dtype=bfloat16") >= 2
