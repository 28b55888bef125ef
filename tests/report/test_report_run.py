"""Reading a run directory back, and refusing what is none."""

import copy
import json
import math
import os
import shutil

import pytest

from mezzo.errors import PolicyError, StateError
from mezzo.report import judge, read, results_tables, to_markdown


@pytest.fixture
def run(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "copy")


def test_what_a_summary_does_not_know_is_left_open(run):
    summary = json.loads((run / "summary.json").read_text())
    for row in summary["rows"]:
        for name in ("note", "difference", "final_metric", "state_bytes", "step_ms", "final_scale", "peak_bytes"):
            del row[name]
    (run / "summary.json").write_text(json.dumps(summary))
    loaded = read(run)
    assert "O2,dtype=bfloat16" in to_markdown(loaded.summary)
    assert judge(loaded).alerts == ()


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


@pytest.mark.parametrize("missing, kind", [("summary.json", PolicyError), ("metrics.jsonl", StateError)])
def test_an_unfinished_run_is_refused(run, missing, kind):
    (run / missing).unlink()
    with pytest.raises(kind) as error:
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


def written(run, summary=None, metrics=None):
    if summary is not None:
        (run / "summary.json").write_bytes(summary if isinstance(summary, bytes) else summary.encode())
    if metrics is not None:
        (run / "metrics.jsonl").write_bytes(metrics if isinstance(metrics, bytes) else metrics.encode())


@pytest.mark.parametrize(
    "summary, metrics, why",
    [
        ("[" * 100_000, None, "a file is not JSON: maximum recursion depth"),
        (b"\xff\xfe", None, "a file is not JSON: 'utf-8' codec"),
        ('{"schema": ' + "9" * 5000 + "}", None, "a file is not JSON: Exceeds the limit"),
        ('{"schema": 1}', None, "summary.json has no rows"),
        ('{"schema": "\\u001b[31m"}', None, r"the run has schema '\\x1b\[31m'"),
        (None, "1", "metrics.jsonl, line 1 is 1, not an object"),
        (None, "[]\n{}", "metrics.jsonl, line 2 has no policy"),
        (None, "{" * 100_000, "a file is not JSON"),
    ],
)
def test_odd_files_are_refused(run, summary, metrics, why):
    written(run, summary, metrics)
    with pytest.raises(StateError, match=why) as caught:
        read(run)
    assert len(str(caught.value)) < 10_000


def places(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def test_any_odd_value_is_refused_or_shown(run):
    """In every place of a summary and of a step: what is read can be made into tables."""
    summary = json.loads((run / "summary.json").read_text())
    summary["rows"] = summary["rows"][:2]  # the others have the same fields
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    refused = []
    for kind, whole in (("summary", summary), ("metrics", step)):
        for *path, last in list(places(whole))[1:]:
            for odd in (None, True, -1, 10**400, 1e400, "text", "[red]x[/]", [], [[]], {}, {"a": 1}):
                damaged = place = copy.deepcopy(whole)
                for key in path:
                    place = place[key]
                place[last] = odd
                written(run, **{"summary": json.dumps(summary), kind: json.dumps(damaged)})
                try:
                    found = read(run)
                except StateError as error:
                    refused.append(str(error))
                    continue
                results_tables(found.summary, 100)
                to_markdown(found.summary)
    assert len(refused) > 300
    assert all(str(run) in each and len(each) < 10_000 for each in refused)


def test_what_is_no_regular_file_is_not_waited_for(run):
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(StateError, match="this is a pipe"):
        read(run)
    (run / "summary.json").unlink()
    (run / "summary.json").mkdir()
    with pytest.raises(StateError, match="this is a folder"):
        read(run)
