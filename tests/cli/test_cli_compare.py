"""``mezzo compare``: one command, a table, a run directory, and honest exit codes."""

import io
import json
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from mezzo.cli.progress import watching
from mezzo.policy import Policy
from mezzo.recipes import compare, get, training
from mezzo.recipes.comparison import default_policies

pytestmark = pytest.mark.usefixtures("emulating")


SHORT = ("digits-cnn", "--policies", "O0; O2,dtype=bfloat16", "--steps", "4")


def test_a_comparison_prints_the_table_and_writes_the_run(mezzo, tmp_path, pictures):
    code, out, err = mezzo("compare", *SHORT, "--out", "here/run")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("O0 reaches test accuracy ")  # the answer comes first
    head = next(line for line in lines if line.startswith("policy"))
    assert "arithmetic" in head
    rows = [line.split()[0] for line in lines[lines.index(head) :] if line.startswith(("O0 ", "O2,"))]
    assert rows == ["O0", "O2,dtype=bfloat16"]
    assert "4 steps, seed 0" in out
    assert "layout: channels-last (NHWC) in every policy but O0, which is contiguous (NCHW)" in out
    assert "\x1b" not in out + err  # nothing is animated or coloured when not a terminal
    run = tmp_path / "here" / "run"
    assert sorted(each.name for each in run.iterdir()) == ["curves.png", "metrics.jsonl", "report.html", "summary.json"]
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<h1>digits-cnn under 2 policies</h1>" in (run / "report.html").read_text()
    progress = err.splitlines()
    assert [line.split(":")[0] for line in progress[:2]] == ["O0", "O2,dtype=bfloat16"]
    assert "finished, 4 steps in " in progress[0]
    assert ", test accuracy " in progress[0]
    assert progress[-1] == "run directory: here/run"


def test_json_is_the_summary_and_nothing_else_on_stdout(mezzo, tmp_path):
    code, out, _ = mezzo("compare", *SHORT, "--seed", "5", "--out", "run", "--json")
    assert code == 0
    printed = json.loads(out)
    assert printed == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (printed["seed"], printed["steps"]) == (5, 4)
    assert [row["policy"] for row in printed["rows"]] == ["O0", "O2,dtype=bfloat16"]


def test_without_out_the_run_goes_to_runs_with_recipe_and_time(mezzo, tmp_path):
    code, _, _ = mezzo("compare", "digits-cnn", "--policies", "O0", "--steps", "1")
    assert code == 0
    (run,) = (tmp_path / "runs").iterdir()
    name, day, second = run.name.rsplit("-", 2)
    assert name == "digits-cnn"
    assert time.strptime(day + second, "%Y%m%d%H%M%S")


def test_an_existing_run_is_refused_and_overwrite_replaces_it(mezzo, tmp_path):
    short = ("compare", "digits-cnn", "--policies", "O0", "--out", "run")
    assert mezzo(*short, "--steps", "1")[0] == 0
    code, out, err = mezzo(*short, "--steps", "2")
    assert code == 2
    assert out == ""
    assert err == (
        "mezzo: the run directory already holds a run\n"
        "  where  run\n"
        "  why    its results would be lost\n"
        "  write  --out run-2, or --overwrite to replace it\n"
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
    assert mezzo(*short, "--steps", "2", "--overwrite")[0] == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert (tmp_path / "run" / "curves.png").exists()


def test_an_unknown_recipe_is_a_usage_error(mezzo, tmp_path):
    code, out, err = mezzo("compare", "digits")
    assert (code, out) == (2, "")
    assert err.startswith("mezzo: unknown recipe 'digits'\n  why    did you mean 'digits-cnn'?")
    assert list(tmp_path.iterdir()) == []


def test_all_wrong_policies_are_reported_before_training(mezzo, tmp_path):
    code, out, err = mezzo("compare", "digits-cnn", "--policies", "O7; O0; O1,dtyp=float16; ")
    assert (code, out) == (2, "")
    assert err.startswith("mezzo: 2 problems\n1. ")
    assert "unknown level 'O7'" in err
    assert "dtyp" in err
    assert list(tmp_path.iterdir()) == []


def test_no_policies_are_a_usage_error(mezzo):
    code, _, err = mezzo("compare", "digits-cnn", "--policies", " ; ")
    assert code == 2
    assert err.startswith("mezzo: no policy to compare\n")


@pytest.mark.parametrize(
    "words, complaint",
    [
        (("--steps", "0"), "--steps"),
        (("--steps", "many"), "--steps"),
        (("--seed", "-1"), "--seed"),
        (("--polices", "O0"), "--polices"),
    ],
)
def test_bad_numbers_and_options_are_usage_errors(mezzo, tmp_path, words, complaint):
    code, out, err = mezzo("compare", "digits-cnn", *words)
    assert (code, out) == (2, "")
    assert complaint in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_recipe_is_a_usage_error(mezzo):
    code, _, err = mezzo("compare")
    assert code == 2
    assert "RECIPE" in err.upper()


def test_a_foreign_directory_is_refused_before_training(mezzo, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    code, _, err = mezzo("compare", *SHORT, "--out", ".", "--overwrite")
    assert code == 2
    assert err.startswith("mezzo: the run directory holds files that no mezzo run wrote\n")
    assert "finished" not in err


@pytest.mark.parametrize(
    "module, package",
    [("matplotlib.figure", "matplotlib>=3.9"), ("jinja2", "jinja2>=3.1"), ("sklearn.datasets", "scikit-learn>=1.4")],
)
def test_an_absent_extra_is_named_before_training(mezzo, tmp_path, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    code, out, err = mezzo("compare", *SHORT)
    assert (code, out) == (3, "")
    assert f'"{package}"' in err.partition("\n  write  pip install ")[2]
    assert "finished" not in err
    assert list(tmp_path.iterdir()) == []


def test_help_leads_with_examples_and_names_the_defaults(mezzo):
    code, out, _ = mezzo("compare", "--help")
    assert code == 0
    assert out.index("mezzo compare digits-cnn") < out.index("--policies")
    assert "docs-lm" in out


def test_the_default_policies_are_those_of_the_comparison(mezzo, monkeypatch):
    asked = []
    monkeypatch.setattr(
        sys.modules["mezzo.cli.compare"], "carry_out", lambda subject, policies, **options: asked.append(policies)
    )
    code, _, err = mezzo("compare", "digits-cnn")
    assert (code, asked) == (0, [default_policies()])
    assert 'is the format for this machine (mezzo doctor says why); --policies "O0; O1,' in err


INTERRUPTED = ("digits-cnn", "--policies", "O0; O1,dtype=float16,emulate=true", "--steps", "3", "--out", "run")


def check_interrupted(code, out, err, folder):
    """Of two policies the second was interrupted in its third step."""
    assert code == 130, err
    assert "(interrupted at step 2)" in out
    assert out.rstrip().splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert [(row["status"], row["steps"]) for row in summary["rows"]] == [("finished", 3), ("interrupted", 2)]
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    assert (folder / "run" / "curves.png").stat().st_size > 0


def test_ctrl_c_sums_up_what_there_is_and_exits_130(mezzo, tmp_path, monkeypatch, pictures):
    step = training.Training._step

    def interrupted(self, number, **options):
        if self.policy.level == "O1" and number == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, number, **options)

    monkeypatch.setattr(training.Training, "_step", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    try:
        check_interrupted(*mezzo("compare", *INTERRUPTED), tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_ctrl_c_from_outside_ends_a_process_with_130(tmp_path):
    # The second policy never ends: its steps wait, so that the signal finds it at work.
    code = (
        "import signal, time; from mezzo.cli import main; from mezzo.recipes import training\n"
        # A shell's background jobs, this test's own process perhaps among them, ignore Ctrl-C, and children inherit it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "step = training.Training._step\n"
        "def slow(self, number, **kw):\n"
        "    if self.policy.level == 'O1' and number == 3: print('ready', flush=True); time.sleep(100)\n"
        "    return step(self, number, **kw)\n"
        "training.Training._step = slow\n"
        f"main({['compare', *INTERRUPTED]!r})"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    check_interrupted(child.returncode, out, err, tmp_path)


def test_training_that_goes_wrong_under_a_policy_exits_with_4_and_is_told_of(mezzo, tmp_path):
    too_large = "O1,dtype=float16,loss_scale=constant(2**24)"  # every step is skipped
    for number, words in enumerate(
        (("compare", "digits-cnn", "--policies", f"O0; {too_large}"), ("train", "digits-cnn", "--policy", too_large))
    ):
        code, out, err = mezzo(*words, "--steps", "4", "--out", f"run{number}")
        assert code == 4, words
        assert f"1. 4 of 4 steps were skipped.\n  where  {too_large}\n" in out
        assert out.index("1. 4 of 4") < out.index("emulated")  # the table is there all the same
        assert err.splitlines()[-1] == f"run directory: run{number}"
        assert (tmp_path / f"run{number}" / "report.html").exists()
    code, out, _ = mezzo("train", "digits-cnn", "--policy", too_large, "--steps", "4", "--out", "again", "--json")
    assert code == 4
    assert json.loads(out)["rows"][0]["skipped_steps"] == 4


def test_a_terminal_gets_bars_with_counts_and_the_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=150, legacy_windows=False)
    recipe = get("digits-cnn")
    with watching(console, recipe.metric, 2) as watcher:
        watcher.started(Policy.O0(), 3)
        bars = watcher._progress
        compare(recipe, ["O1,dtype=bfloat16"], steps=3, watcher=watcher)
        whole = bars.tasks[0]
        assert (whole.description, whole.total, whole.completed) == ("2 policies", 6, 3)
        bars.refresh()
    text = console.file.getvalue()
    assert "3/6" in text
    assert "left" in text
    assert "O1,dtype=bfloat16: finished, 3 steps in " in text


def test_a_bar_follows_the_loss_and_leaves_when_its_policy_is_done():
    console = Console(file=io.StringIO(), force_terminal=True, width=150, legacy_windows=False)
    recipe = get("digits-cnn")
    seen = []
    with watching(console, recipe.metric, 1) as watcher:
        original = watcher.stepped

        def stepped(record):
            original(record)
            task = watcher._progress.tasks[-1]
            seen.append((task.description, task.completed, task.fields["news"]))

        watcher.stepped = stepped
        compare(recipe, ["O0"], steps=2, watcher=watcher)
        assert len(watcher._progress.tasks) == 1
    assert [(name, done) for name, done, _ in seen] == [("O0", 1), ("O0", 2)]
    assert all(news.startswith("loss 2.") for _, _, news in seen)
