"""Reading a run directory back, and refusing what is none."""

import json
import math
import shutil

import pytest

from mezzo.errors import StateError
from mezzo.report import read


@pytest.fixture
def run(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "copy")


def test_every_step_of_every_policy_is_read(run):
    loaded = read(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert list(loaded.series) == ["O0", "O1,dtype=float16", "O2,dtype=bfloat16"]
    for policy, series in loaded.series.items():
        mine = [line for line in lines if line["policy"] == policy]
        assert series.step == tuple(range(1, 13))
        assert series.loss == tuple(line["loss"] for line in mine)
        assert series.scale == tuple(line["scale"] for line in mine)
        assert series.skipped == tuple(line["skipped"] for line in mine)
        assert series.evaluated == tuple(line["step"] for line in mine if line["metric"] is not None)
        assert len(series.metric) == len(series.evaluated) == 10


def test_non_finite_values_come_back_as_numbers(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"loss": "nan", "scale": "inf"}
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    series = read(run).series["O0"]
    assert math.isnan(series.loss[0])
    assert math.isinf(series.scale[0])
    assert math.isfinite(series.loss[1])


@pytest.mark.parametrize("missing", ["summary.json", "metrics.jsonl"])
def test_an_unfinished_run_is_refused(run, missing):
    (run / missing).unlink()
    with pytest.raises(StateError) as error:
        read(run)
    assert str(error.value) == (
        "there is no finished run here\n"
        f"  where  {run}\n"
        f"  why    {missing} is missing\n"
        f"  write  mezzo compare digits-cnn --out {run}"
    )


def test_another_schema_is_refused(run):
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"schema": 99}))
    with pytest.raises(StateError, match=r"the run has schema 99\n.*\n  why    this version of mezzo reads schema 1"):
        read(run)


def test_the_schema_read_is_the_schema_written():
    from mezzo.recipes.comparison import SCHEMA as WRITTEN
    from mezzo.report.run import SCHEMA as READ

    assert WRITTEN == READ


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_a_damaged_file_is_refused(run, name):
    (run / name).write_text('{"schema": 1, "ro')
    with pytest.raises(StateError, match=r"the run cannot be read\n  where  .*\n  why    a file is not JSON: "):
        read(run)


def test_a_summary_that_is_not_an_object_is_refused(run):
    (run / "summary.json").write_text("[]")
    with pytest.raises(StateError, match="the run has schema None"):
        read(run)
