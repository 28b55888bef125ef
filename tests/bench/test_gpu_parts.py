"""``make gpu``: every part runs (dry, on the CPU), runs are taken up again, and the page says what was reached."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def gpu():
    """Modules of benchmarks/gpu by name."""
    yield lambda name: importlib.import_module(f"gpu.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpu"]:
        del sys.modules[name]


@pytest.fixture
def command(gpu):
    return gpu("__main__")


def test_parts_run_dry_and_the_page_has_every_goal(gpu, command, tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="needs Triton")
    shapes, verdicts, parts = gpu("steps").shapes, gpu("verdicts"), ("ceilings", "step-bfloat16", "fp8", "variants")
    for module in ("gpu.steps", "gpu.variants", "stepping.bench"):
        monkeypatch.setattr(f"{module}.shapes", lambda name: shapes(name)[:5])
    assert command.main(["--dry-run", "--out", str(tmp_path), "--parts", *parts, "train-tiny", "plan-gpt"]) == 0
    written = {name: json.loads(next(tmp_path.glob(f"gpu-{name}-cpu-*.json")).read_text()) for name in parts}
    results = {name: page["found"] for name, page in written.items()}
    assert all(page["dry"] and page["part"] == name and page["seconds"] > 0 for name, page in written.items())
    assert [copy["mib"] for copy in results["ceilings"]["copies"]] == [1, 2]
    assert all(copy["tb_per_s"] > 0 for copy in results["ceilings"]["copies"])
    quantising = gpu("quantising")
    assert {row["format"] for row in results["fp8"]["quantising"]} == {*quantising.FORMATS}
    assert all(row["share"] > 0 for row in results["fp8"]["quantising"])
    assert [row["kind"] for row in results["fp8"]["linear"]] == [*quantising.KINDS]
    assert all(row["speed"] > 0 for row in results["fp8"]["linear"])
    assert all(row["same_bits"] for row in results["variants"] if row["same_bits"] is not None)
    assert not [row for row in results["variants"] if "error" in row]
    assert {row["name"] for row in results["step-bfloat16"]["rows"]} >= {verdicts.SPLIT}
    text = next(tmp_path.glob("gpu-verdicts-cpu-*.md")).read_text()
    assert "Dry run, whose figures mean nothing" in text
    assert all(f"| {goal.what} |" in text for goal in verdicts.GOALS)
    assert "train-tiny has no row 'mezzo O2 captured'" in text  # which a CPU has not


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_says_what_is_lacking(command, tmp_path, capsys):
    assert command.main(["--out", str(tmp_path)]) == 3
    lacking = f"make gpu: lacks a CUDA device (torch {torch.__version__} sees none)\n"
    assert capsys.readouterr() == ("", lacking)
    assert not list(tmp_path.iterdir())


# Runs that are taken up again ----------------------------------------------------------------------------------

EDGES = {"passed": 3, "failed": [], "skipped": {}}


def run_of(command, folder, start, **options):
    return command.Run(**{"dry": True, "out": folder, "again": False, "minutes": 30, "start": start, **options})


def writing(command, folder, started):
    def start(name, limit, out):
        started.append(name)
        result = {"machine": "a GPU", "torch": "2.11", "date": "2026-11-22", "found": EDGES}
        run_of(command, folder, None).file(name).write_text(json.dumps(result))
        return ""

    return start


def test_what_is_there_from_today_is_not_measured_again(command, tmp_path):
    started = []
    for again in (False, False, True):
        run_of(command, tmp_path, writing(command, tmp_path, started), again=again).take("edges")
    assert started == ["edges", "edges"]
    text = next(tmp_path.glob("*.md")).read_text()
    assert "| tests that need a GPU and fail | ≤ 0 | 0 | reached |" in text
    assert "a GPU, torch 2.11, 2026-11-22" in text


def test_a_part_that_fails_is_named_and_measured_by_the_next_run(command, tmp_path):
    run = run_of(command, tmp_path, lambda *_: "ended after 360 s")
    run.take("edges")
    assert run.failures == {"edges": "ended after 360 s"}
    assert "- edges: ended after 360 s" in run.page().read_text()
    started = []
    run_of(command, tmp_path, writing(command, tmp_path, started)).take("edges")
    assert started == ["edges"]


# Verdicts ------------------------------------------------------------------------------------------------------


def test_each_goal_is_read_from_its_row(gpu):
    """Made up so that every goal is reached just so; then every figure is made a little worse."""
    verdicts = gpu("verdicts")

    def results(worse):
        step = {"name": verdicts.SPLIT, "bandwidth_share": 0.85 - worse, "ratio": 0.55 + worse, "host_ms": 1.2 + worse}
        kernels = [{"name": verdicts.SPLIT, "tensors": 100, "large_us": {}, "small": 12 + (worse > 0), "small_us": 9.0}]

        def way(name, speed, peak, compiled=False):
            return {"way": name, "compiled": compiled, "ratio": 1 / (speed - worse), "peak_bytes": peak,
                    "syncs": int(worse > 0)}  # fmt: skip

        rival = {"way": "torch.amp", "compiled": False, "ratio": 1.0, "peak_bytes": 100, "syncs": 7}
        return {
            "step-bfloat16": {"rows": [step], "kernels": kernels},
            "step-float16": {"rows": [step], "kernels": kernels},
            "train-gpt2": {"rows": [rival, way("mezzo O1", 1.0, 90), way("mezzo O2", 1.25, 75 + 100 * worse)]},
            "train-gpt2-compiled": {"rows": [way("mezzo O2", 0.1, 1), way("mezzo O2", 1.08, 1, compiled=True)]},
            "train-tiny": {"rows": [way("mezzo O2 captured", 2.0, 1)]},
            "plan-gpt": {
                "rows": [
                    {"kernels": code, "placement": "cut", "ratio": ratio + worse}
                    for code, ratio in (("eager", 3.0), ("compiled", 1.02))
                ]
            },
            "fp8": {
                "quantising": [{"share": 0.9}, {"share": 0.7 - worse}],
                "linear": [
                    {"kind": "fp8, rowwise", "lacks": "", "speed": 0.1},
                    {"kind": "fp8, tensorwise", "lacks": "", "speed": 1.3 - worse},
                ],
            },
            "edges": {"passed": 1, "failed": [{"test": "t", "message": "m"}] * (worse > 0), "skipped": {}},
        }

    reached, missed = ([goal.line(results(worse)) for goal in verdicts.GOALS] for worse in (0.0, 0.01))
    assert [line for line in reached if not line.endswith("| reached |")] == []
    assert [line for line in missed if not line.endswith("| **missed** |")] == []
    assert [line for line in (goal.line({}) for goal in verdicts.GOALS) if "not measured" not in line] == []
