"""The files of a run: never half there, never over somebody's work."""

import json
import math

import pytest

from mezzo.documents import jsonable
from mezzo.errors import PolicyError
from mezzo.recipes.rank_meter import RankStep
from mezzo.recipes.run_directory import RankLog, RunDirectory
from mezzo.recipes.training import StepRecord

RECORD = StepRecord(policy="O0", step=1, loss=0.5, scale=1.0, skipped=False, grad_norm=2.0, ms=3.5)


def strict(text):
    """Parse JSON as the standard has it: NaN and Infinity are not numbers."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_steps_are_whole_lines_under_a_partial_name_until_the_end(tmp_path):
    directory = RunDirectory(tmp_path / "deep" / "run")
    assert not (tmp_path / "deep").exists()  # nothing is made before there is something to write
    directory.stepped(RECORD)
    partial = directory.path / "metrics.jsonl.partial"
    assert strict(partial.read_text()) == {
        "policy": "O0", "step": 1, "loss": 0.5, "scale": 1.0, "skipped": False, "grad_norm": 2.0, "ms": 3.5,
        "metric": None,
    }  # fmt: skip
    assert not (directory.path / "metrics.jsonl").exists()
    directory.finish({"rows": []})
    assert sorted(child.name for child in directory.path.iterdir()) == ["metrics.jsonl", "summary.json"]
    assert strict((directory.path / "summary.json").read_text()) == {"rows": []}
    assert len((directory.path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_run_that_never_finishes_keeps_its_steps(tmp_path):
    directory = RunDirectory(tmp_path)
    for _ in range(3):
        directory.stepped(RECORD)
    directory.close()
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.jsonl.partial"]
    assert len((tmp_path / "metrics.jsonl.partial").read_text().splitlines()) == 3


def test_a_run_without_steps_has_empty_metrics(tmp_path):
    RunDirectory(tmp_path / "run").finish({"rows": []})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_non_finite_numbers_are_texts_that_float_reads():
    written = strict(json.dumps(jsonable({"a": [math.nan, math.inf], "b": (-math.inf, 1.5)}), allow_nan=False))
    assert [float(value) for value in written["b"]] == [-math.inf, 1.5]
    assert math.isnan(float(written["a"][0]))
    assert float(written["a"][1]) == math.inf


def test_an_existing_run_is_not_overwritten_silently(tmp_path):
    RunDirectory(tmp_path).finish({"rows": [1]})
    with pytest.raises(PolicyError) as error:
        RunDirectory(tmp_path)
    assert str(error.value) == (
        "the run directory already holds a run\n"
        f"  where  {tmp_path}\n"
        "  why    its results would be lost\n"
        f"  write  --out {tmp_path}-2, or --overwrite to replace it"
    )
    assert strict((tmp_path / "summary.json").read_text()) == {"rows": [1]}


def test_the_steps_of_a_killed_run_are_not_overwritten_silently_either(tmp_path):
    killed = RunDirectory(tmp_path)
    killed.stepped(RECORD)
    killed.close()
    with pytest.raises(PolicyError, match="already holds a run"):
        RunDirectory(tmp_path)


def test_overwrite_replaces_a_run_only_when_the_new_one_is_finished(tmp_path):
    first = RunDirectory(tmp_path)
    first.stepped(RECORD)
    first.finish({"rows": ["old"]})
    (tmp_path / "curves.png").write_bytes(b"old picture")
    second = RunDirectory(tmp_path, overwrite=True)
    second.stepped(RECORD)
    second.stepped(RECORD)
    assert strict((tmp_path / "summary.json").read_text()) == {"rows": ["old"]}
    assert (tmp_path / "curves.png").read_bytes() == b"old picture"
    second.finish({"rows": ["new"]})
    assert strict((tmp_path / "summary.json").read_text()) == {"rows": ["new"]}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "curves.png").exists()  # it would show the old numbers


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_other_files_is_refused_even_to_overwrite(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(PolicyError) as error:
        RunDirectory(tmp_path, overwrite=overwrite)
    assert str(error.value) == (
        "the run directory holds files that no mezzo run wrote\n"
        f"  where  {tmp_path}\n"
        "  why    thesis.tex would stand beside the results\n"
        f"  write  --out {tmp_path}/run"
    )


def test_a_file_is_refused(tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(PolicyError, match=f"the run directory is a file\n  where  {path}\n  write  --out {path}-run"):
        RunDirectory(path, overwrite=True)


def test_an_empty_directory_is_fine(tmp_path):
    RunDirectory(tmp_path).finish({})
    assert (tmp_path / "summary.json").exists()


def test_what_is_known_before_the_first_step_is_there_with_it(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.begin({"steps": 7}, {"explanation.json": "{}"})
    assert not directory.path.exists()
    directory.stepped(RECORD)
    assert strict((directory.path / "summary.json.partial").read_text()) == {"steps": 7}
    assert (directory.path / "explanation.json.partial").read_text() == "{}"
    directory.finish({"steps": 8})
    assert sorted(child.name for child in directory.path.iterdir()) == [
        "explanation.json",
        "metrics.jsonl",
        "summary.json",
    ]
    assert strict((directory.path / "summary.json").read_text()) == {"steps": 8}


def test_nothing_of_an_older_run_stays_beside_a_new_one(tmp_path):
    first = RunDirectory(tmp_path)
    first.begin({}, {"explanation.json": "{}"})
    (first.open() / "evidence.jsonl.partial").write_text("{}")
    first.finish({})
    killed = RunDirectory(tmp_path, overwrite=True)
    killed.begin({}, {"found.policy": ""})
    killed.stepped(RECORD)
    killed.close()
    assert {"explanation.json", "evidence.jsonl", "found.policy.partial"} < {child.name for child in tmp_path.iterdir()}
    RunDirectory(tmp_path, overwrite=True).finish({})
    assert sorted(child.name for child in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_the_files_of_ranks_get_their_names_with_the_others_and_are_replaced(tmp_path):
    record = RankStep(
        policy="O0", step=1, ms=2.0, samples_per_s=4.0, waiting_ms=0.5, wire_bytes=8, overflowed=False, peak_bytes=1
    )
    directory = RunDirectory(tmp_path)
    directory.open()
    with RankLog(tmp_path, 0) as first, RankLog(tmp_path, 12) as last:
        for log in (first, last):
            log.write(record)
    assert {path.name for path in tmp_path.glob("*rank*")} == {
        "metrics.rank0.jsonl.partial", "metrics.rank12.jsonl.partial"
    }  # fmt: skip
    directory.finish({"rows": []})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.jsonl", "metrics.rank0.jsonl", "metrics.rank12.jsonl", "summary.json"
    ]  # fmt: skip
    assert strict((tmp_path / "metrics.rank12.jsonl").read_text())["samples_per_s"] == 4.0

    with pytest.raises(PolicyError, match="already holds a run"):
        RunDirectory(tmp_path)
    (tmp_path / "metrics.rankx.jsonl").touch()
    with pytest.raises(PolicyError, match=r"metrics\.rankx\.jsonl would stand beside"):
        RunDirectory(tmp_path, overwrite=True)
    (tmp_path / "metrics.rankx.jsonl").unlink()
    RunDirectory(tmp_path, overwrite=True).finish({"rows": []})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]
