"""Words that a command cannot take: one sentence, an exit code, nothing on stdout, and no file written."""

import pytest

from mezzo.script import comparison

from ..script.conftest import SCRIPTS
from ..script.processes import HERE, InThisProcess
from .test_cli_compare import TRAIN
from .test_cli_tune import MASKED

pytestmark = pytest.mark.usefixtures("emulating")

VERBS = ("run", "compare", "explain", "inspect", "tune", "plan")
PLAIN = SCRIPTS / "plain.py"
O1 = "--policies", "O1,bf16"
#: The words behind ``mezzo``, the exit code, and what stderr says.
ROWS = [
    *((words, 2, message) for verb in VERBS for words, message in (
        ((verb, "absent.py"), "there is no script 'absent.py'"),
        ((verb, "-m", "absent.module"), "there is no module 'absent.module'"),
        ((verb, "--policy", "O9", PLAIN), "unknown level 'O9'"),
        ((verb, "--steps", "0", PLAIN), "--steps"),
        ((verb, "--policy", "bf16@0; O9@5", PLAIN),
         "unknown level 'O9'" if verb == "run" else "no schedule" if verb == "compare" else "is a schedule\n"),
        ((verb, "--jsno", PLAIN), "--jsno"),
        ((verb,), "Missing argument"),
    )),
    (("comprae",), 2, "comprae"),
    (("doctor", "--jsno"), 2, "--jsno"),
    (("compare", "digits-cnn"), 2, "there is no script 'digits-cnn'"),
    (("explain", "--dry", PLAIN), 2, "mezzo explain has no --dry\n  why    it trains nothing without it either"),
    (("run", "--max-grad-norm", "-1", PLAIN), 2, "max_grad_norm is -1.0"),
    (("compare", "--policies", "O0", "train.py"), 2, "no policy to compare with FP32"),
    (("compare", "--policies", "O1,bf16;O1,bf16", "train.py"), 2, "listed twice"),
    (("compare", "--better", "larger", "train.py"), 2, "--better is higher or lower, not 'larger'"),
    (("compare", "--metric", "quality", "train.py"), 2, "is a higher or a lower 'quality' better?"),
    (("compare", "--margin", "-1", "train.py"), 2, "--margin"),
    (("compare", "--seeds", "0", "train.py"), 2, "--seeds"),
    (("compare", "--out", "train.py", *O1, "train.py"), 2, "train.py cannot be written"),
    (("inspect", "--every", "0", PLAIN), 2, "--every"),
    (("inspect", "--steps", "none", PLAIN), 2, "--steps"),
    (("inspect", SCRIPTS / "untrained.py"), 2, "untrained.py never trains"),
    (("tune", SCRIPTS / "untrained.py"), 2, "never trains"),
    (("tune", SCRIPTS / "gan.py"), 3, "tuning finds rules for one model"),
    (("tune", SCRIPTS / "crashes.py"), 1, "ValueError: the script's own"),
    (("tune", "--policy", "O2,fp16", PLAIN), 2, "nothing can be tuned under O2,dtype=float16"),
    (("tune", "--policy", "O0", PLAIN), 2, "that is what low precision is compared with"),
    (("tune", "--policy", "O1,float61", PLAIN), 2, "float61"),
    (("tune", "--after", "-1", PLAIN), 2, "--after"),
    (("tune", "uncopied.py"), 3, "the model cannot be copied"),
    (("show", "formats", "flaot16"), 2, "unknown number format 'flaot16'"),
    (("show", "formats", "flaot16"), 2, "write  mezzo show formats float16"),
    (("show", "ops", "softmax", "--device", "gpu"), 2, "mezzo: unknown device type 'gpu'\n"),
    (("show", "ops", "softmax", "--device", "gpu"), 2, 'no such device type\n  write  "cpu" or "cuda"'),
    (("show", "ops", "sofmax"), 2, "did you mean 'softmax'?"),
    (("show", "ops", "softmax", "--policy", "O1,fp23=softmax"), 2, "did you mean 'fp32'?"),
    (("show", "ops", "exp_"), 2, "'exp_' is the in-place form of an op"),
    (("show", "ops", "zzz*"), 2, "mezzo: no op matches 'zzz*'\n"),
]  # fmt: skip


def test_bad_words_are_refused_before_anything_is_written(mezzo, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    lock = "model = Masked()\nmodel.lock = (n for n in ())"
    (tmp_path / "uncopied.py").write_text(MASKED.replace("model = Masked()", lock))
    before = sorted(tmp_path.iterdir())
    for words, code, message in ROWS:
        outcome = mezzo(*words)
        assert outcome[:2] == (code, ""), (words, outcome)
        assert message in outcome[2], (words, outcome[2])
        assert "Traceback" not in outcome[2] or code == 1, words
        assert sorted(tmp_path.iterdir()) == before, words


def test_what_a_comparison_finds_only_when_it_runs(mezzo, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "subprocess", HERE)
    InThisProcess.started.clear()
    (tmp_path / "train.py").write_text(TRAIN)
    for words, message in (
        (("--out", "a", "--metric", "accuracy", *O1, "train.py"), "'accuracy'"),
        (("--out", "b", *O1, "train.py", "--wdith", "3"), "unrecognized arguments: --wdith 3"),
    ):
        code, out, err = mezzo("compare", *words)
        assert (code, out) == (1, "")
        assert message in err
        assert "Traceback" not in err


def test_results_that_are_there_are_not_written_over_and_one_process_is_one(mezzo, tmp_path, monkeypatch):
    kept = tmp_path / "there" / "summary.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    words = "--policy", "O1,bf16"
    for verb in ("run", "explain", "inspect", "tune", "plan"):
        code, out, err = mezzo(verb, *words, "--out", "there", PLAIN)
        assert (code, out) == (2, ""), verb
        assert "there has results already\n  write  --overwrite" in err, verb
        assert kept.read_text() == "{}"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for verb in ("compare", "explain", "inspect", "tune", "plan"):
        code, out, err = mezzo(verb, *words, PLAIN)
        assert (code, out) == (2, ""), verb
        assert f"mezzo {verb} works in one process, and 2 were started" in err
