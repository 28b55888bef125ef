"""The page of a run: it holds the run's own numbers, says what it leaves out, and replaces nothing but pages."""

import dataclasses
import html
import json
import math
import re
import shutil
import sys

import pytest
import torch

import mezzo
from mezzo.errors import PolicyError, StateError, UnsupportedError
from mezzo.numerics import SwallowedUpdates, diagnose, evidence_file
from mezzo.numerics.counting import BINS, FIRST
from mezzo.report import page, read
from mezzo.report.heat import heat


def text_of(path):
    """What a reader of the page sees before any script has run."""
    text = path.read_text()
    body = re.sub(r"<script.*?</script>|<style>.*?</style>", "", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def data_of(path):
    """What the scripts draw from."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())[1])


def test_curves_are_those_of_the_run(finished_run, tmp_path):
    data = data_of(page(finished_run, tmp_path / "page.html"))
    run = read(finished_run)
    assert [each["policy"] for each in data["series"]] == list(run.series)
    for each in data["series"]:
        series = run.series[each["policy"]]
        assert tuple(each["loss"]) == series.loss
        assert tuple(each["scale"]) == series.scale
        assert tuple(each["evaluated"]) == series.evaluated
        assert tuple(each["metric"]) == series.metric
        assert each["skipped"] == [step for step, skipped in zip(series.step, series.skipped, strict=True) if skipped]
    assert data["kinds"] == []


def test_histograms_are_those_of_the_evidence(recorded_run, evidence):
    data = data_of(page(recorded_run))
    assert data["steps"] == [1, 51, 101]
    assert data["scales"] == [65536.0, 32768.0, 1000.0]
    assert [kind["name"] for kind in data["kinds"]] == list(evidence.header.kinds)
    seen = 0
    for kind in data["kinds"]:
        for name, row in zip(kind["rows"], kind["histograms"], strict=True):
            for step, packed in zip(evidence.steps, row, strict=True):
                found = [
                    each
                    for each in step.tensors
                    if each.kind == kind["name"] and each.path.removesuffix(".output") == name
                ]
                if packed is None:
                    assert found == []
                    continue
                first, counts, powers, zeros, infs, nans, largest = packed
                (histogram,) = (each.histogram for each in found)
                assert [histogram.count(exponent) for exponent in range(first, first + len(counts))] == counts
                assert sum(counts) + zeros + infs + nans == histogram.total
                assert {exponent: histogram.numbers[BINS + exponent - FIRST] for exponent, _ in powers} == dict(powers)
                assert sum(count for _, count in powers) == sum(histogram.numbers[BINS : 2 * BINS])
                assert largest == histogram.max_abs
                seen += 1
    assert seen == 5 * 5 * 3 - 5


def test_the_table_and_the_machine_are_on_the_page(finished_run, tmp_path):
    seen = text_of(page(finished_run, tmp_path / "page.html"))
    summary = read(finished_run).summary
    assert "digits-cnn under 3 policies" in seen
    assert "O0 against each policy" in seen
    for row in summary["rows"]:
        assert row["policy"] in seen
        assert f"{row['final_metric']:.2f}" in seen
    assert summary["machine"]["cpu"] in seen
    assert summary["data_sha256"] in seen


def test_nothing_is_fetched_and_nothing_but_the_page_itself_is_run(recorded_run):
    text = page(recorded_run).read_text()
    head = text[: text.index("<style>")]
    assert "default-src 'none'" in head
    assert not re.search(r"<(?:link|img|iframe|object|base)\b|<script[^>]*\bsrc=", text[: text.index('id="data"')])


HOSTILE = '</script><script>alert("x")</script><!--<img src=x onerror=alert(1)>{{ 7*7 }}\x1b[31m\u202e'


def test_texts_of_strangers_stay_texts(recorded_run, evidence):
    summary = json.loads((recorded_run / "summary.json").read_text())
    summary["recipe"] = summary["summary"] = summary["machine"]["cpu"] = HOSTILE
    summary["references"] = {HOSTILE: 1.0}
    for row in summary["rows"]:
        row["note"] = row["policy"] = HOSTILE
    (recorded_run / "summary.json").write_text(json.dumps(summary))
    steps = [
        dataclasses.replace(step, tensors=tuple(dataclasses.replace(each, module=HOSTILE) for each in step.tensors[:1]))
        for step in evidence.steps
    ]
    evidence_file.write(dataclasses.replace(evidence, steps=tuple(steps)), recorded_run / "evidence.jsonl")
    plain = page(recorded_run).read_text()
    assert plain.count("<script") - plain.count("'<script") <= 4  # three of the page's, and what plotly says of some
    before = plain[: plain.index("<script>")]
    assert before.count("<script") == 1
    assert "<img" not in before
    assert "<!--" not in before
    assert "49" not in text_of(recorded_run / "report.html").split("Verdict")[0].split("7*7")[0]
    assert "\x1b" not in before
    assert "\u202e" not in before
    assert data_of(recorded_run / "report.html")["kinds"][0]["rows"][0].startswith("</script>")


def test_what_json_cannot_write_is_shown_as_missing(finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[:12]:
        line |= {"loss": "nan", "scale": "inf", "metric": "-inf", "skipped": True}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((run / "summary.json").read_text())
    summary["rows"][0] |= {"nonfinite_losses": 12, "skipped_steps": 12, "final_metric": "nan", "difference": None}
    (run / "summary.json").write_text(json.dumps(summary))
    written = page(run)
    first = data_of(written)["series"][0]
    assert first["loss"] == first["smooth"] == first["scale"] == [None] * 12
    assert first["skipped"] == first["bad"] == list(range(1, 13))
    seen = text_of(written)
    assert seen.index("12 of 12 losses were infinite or NaN.") < seen.index("12 of 12 steps were skipped.")
    assert '<section id="verdict" class="bad">' in written.read_text()


def test_a_long_curve_is_thinned_and_keeps_its_spikes(finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    losses = [1.0 + math.sin(step / 999) for step in range(1, 30_001)]
    losses[12_344], losses[20_000] = 77.0, math.inf
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    lines = [record | {"step": step, "loss": loss, "skipped": True} for step, loss in enumerate(losses, start=1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line).replace("Infinity", '"inf"') + "\n" for line in lines))
    series = data_of(page(run))["series"][0]
    assert len(series["step"]) <= 2002
    assert (series["step"][0], series["step"][-1]) == (1, 30_000)
    assert series["loss"][series["step"].index(12_345)] == 77.0
    assert series["bad"] == [20_001]
    assert (len(series["skipped"]), series["skipped"][0], series["skipped"][-1]) == (500, 1, 30_000)


def test_a_huge_model_makes_no_huge_page_and_the_page_says_how(evidence, monkeypatch):
    monkeypatch.setattr("mezzo.report.heat._MOST_HISTOGRAMS", 300)
    alike = [
        dataclasses.replace(each, module=f"blocks.{block}.{each.module}")
        for block in range(10)
        for each in evidence.steps[0].tensors
    ]
    steps = [dataclasses.replace(evidence.steps[0], step=step, tensors=tuple(alike)) for step in range(1, 8)]
    data, notes = heat(dataclasses.replace(evidence, steps=tuple(steps)), ["float16"])
    assert notes == [
        "3 of 7 recorded steps are shown, first and last among them.",
        "250 tensors are shown as 20: those of alike layers are summed up.",
    ]
    assert data["steps"] == [1, 4, 7]
    assert data["kinds"][0]["rows"][1] == "blocks.{0..9}.blocks.{0,1}.up.weight ×20"
    packed, one = data["kinds"][0]["histograms"][0][0], evidence.steps[0].tensors[0].histogram
    assert sum(packed[1]) == 10 * (one.total - one.zeros)


def test_a_model_of_layers_that_are_not_alike_is_cut(evidence, monkeypatch):
    monkeypatch.setattr("mezzo.report.heat._MOST_HISTOGRAMS", 300)
    first = evidence.steps[0].tensors[0]
    names = ["".join(chr(97 + place // 26**power % 26) for power in range(4)) for place in range(500)]
    tensors = tuple(dataclasses.replace(first, module=name) for name in names)
    steps = tuple(dataclasses.replace(evidence.steps[0], step=step, tensors=tensors) for step in (1, 2, 3))
    header = dataclasses.replace(evidence.header, kinds=("weights",))
    data, notes = heat(dataclasses.replace(evidence, header=header, steps=steps), ["float16"])
    assert len(data["kinds"][0]["rows"]) == 100
    assert notes[-1] == "weights: the first 100 of 500 tensors are shown."


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_with_hardly_a_record_has_a_page(recorded_run, evidence, steps):
    few = dataclasses.replace(evidence, steps=evidence.steps[:steps])
    evidence_file.write(few, recorded_run / "evidence.jsonl")
    data = data_of(page(recorded_run))
    assert len(data["steps"]) == steps
    assert len(data["kinds"]) == 5 * steps


# Where it is written -------------------------------------------------------------------------------------------


def test_a_page_replaces_a_page_and_nothing_else(finished_run, tmp_path):
    target = tmp_path / "page.html"
    assert page(finished_run, target) == target
    assert page(finished_run, target) == target
    target.write_text("<html>my own</html>")
    with pytest.raises(PolicyError) as error:
        page(finished_run, target)
    assert str(error.value) == (
        "the report would replace a file that mezzo did not write\n"
        f"  where  {target}\n"
        f"  write  --out {tmp_path / 'mezzo-page.html'}, or move the file"
    )
    assert target.read_text() == "<html>my own</html>"
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_where_no_file_can_be_is_refused(finished_run, tmp_path):
    with pytest.raises(PolicyError, match=r"the report cannot be written\n.*\n  why    there is no folder to save in"):
        page(finished_run, tmp_path / "nowhere" / "page.html")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PolicyError, match=r"the report cannot be written\n.*\n  why    .*this is a folder"):
        page(finished_run, tmp_path)


# Runs that are not whole ----------------------------------------------------------------------------------------


@pytest.fixture
def killed_run(recorded_run):
    """What is there after a kill in the second policy: files named .partial, the last lines cut."""
    for name in ("summary.json", "metrics.jsonl", "evidence.jsonl"):
        (recorded_run / name).rename(recorded_run / f"{name}.partial")
    facts = json.loads((recorded_run / "summary.json.partial").read_text())
    (recorded_run / "summary.json.partial").write_text(json.dumps(facts | {"rows": [], "interrupted": True}))
    for name, keep in (("metrics.jsonl.partial", 20), ("evidence.jsonl.partial", 2)):
        lines = (recorded_run / name).read_text().splitlines(keepends=True)
        (recorded_run / name).write_text("".join(lines[:keep]) + lines[keep][:30])
    return recorded_run


def test_a_killed_run_still_has_a_page_which_says_so(killed_run):
    written = page(killed_run)
    seen = text_of(written)
    assert "This report is partial. The process ended before the run was summed up" in seen
    assert "(O0: 12 of 12 steps; O1,dtype=float16: 8 of 12 steps)" in seen
    data = data_of(written)
    assert [len(series["step"]) for series in data["series"]] == [12, 8]
    assert data["steps"] == [1]


def test_tables_and_pictures_of_a_killed_run_are_refused_with_what_shows_it(killed_run):
    with pytest.raises(StateError, match=f"killed before its end; mezzo report {killed_run} shows what there is"):
        read(killed_run)


def test_a_finished_run_counts_though_a_later_one_was_killed_in_its_place(recorded_run):
    for name in ("summary.json", "metrics.jsonl", "evidence.jsonl"):
        (recorded_run / f"{name}.partial").write_text("{")
    written = page(recorded_run)
    assert "partial" not in text_of(written)
    assert data_of(written)["steps"] == [1, 51, 101]


def test_an_interrupted_run_says_so(recorded_run):
    summary = json.loads((recorded_run / "summary.json").read_text())
    (recorded_run / "summary.json").write_text(json.dumps(summary | {"interrupted": True}))
    assert "This report is partial. The run was interrupted" in text_of(page(recorded_run))


def test_what_is_no_run_is_refused(finished_run, tmp_path):
    with pytest.raises(PolicyError, match=r"there is no finished run here\n.*\n  why    there is no such directory"):
        page(tmp_path / "nowhere")
    (tmp_path / "found.policy").touch()
    with pytest.raises(PolicyError, match=r"why    this is a file, and a run is a directory$"):
        page(tmp_path / "found.policy")
    with pytest.raises(PolicyError, match=r"there is no finished run here\n.*\n  why    summary\.json is missing"):
        page(tmp_path)
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(StateError, match=r"there is no finished run here\n.*\n  why    metrics\.jsonl is missing"):
        page(run)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"schema": 2}))
    (run / "metrics.jsonl").touch()
    with pytest.raises(StateError, match=r"a newer one wrote the run\n  write  pip install \.  # in a newer clone"):
        page(run)
    assert not (run / "report.html").exists()


def test_broken_evidence_is_refused(recorded_run):
    with (recorded_run / "evidence.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(StateError, match=r"evidence\.jsonl, line 6"):
        page(recorded_run)


@pytest.mark.parametrize("name", ["plotly.package_data", "jinja2"])
def test_an_absent_extra_is_named(finished_run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UnsupportedError,
        match=r'needs plotly and jinja2\n.*\n  write  pip install "jinja2>=3.1" "matplotlib>=3.9" "plotly>=6.0"',
    ):
        page(finished_run)


# What only a recorded run has -----------------------------------------------------------------------------------


def test_updates_that_vanish_are_listed_the_worst_first(recorded_run, evidence):
    tensors = [each for step in evidence.steps for each in step.tensors if each.kind == "updates"]
    worse = dataclasses.replace(tensors[0].swallowed, swallowed={"float16": 0, "bfloat16": 480})
    changed = [
        dataclasses.replace(
            step,
            tensors=tuple(
                dataclasses.replace(each, swallowed=worse) if each.swallowed and each.module == "head" else each
                for each in step.tensors
            ),
        )
        for step in evidence.steps
    ]
    evidence_file.write(dataclasses.replace(evidence, steps=tuple(changed)), recorded_run / "evidence.jsonl")
    seen = text_of(page(recorded_run))
    table = seen[seen.index("Updates that vanish") :]
    assert "weight updates swallowed by float16 swallowed by bfloat16 weight ≥ 2048 × update" in table
    # Steps 1 and 101 have updates: 0 + 14 of 480 + 480, and 400 + 400.
    assert "head.weight 960 0 % 100 % 20.8 %" in table
    assert "stem.weight 960 1.46 % 83.3 % 20.8 %" in table
    assert table.index("head.weight") < table.index("stem.weight")


def test_of_weights_stored_low_those_that_did_not_move_are_listed(recorded_run, evidence):
    (step, *_) = evidence.steps
    still = SwallowedUpdates(updated=0, swallowed={"float16": 0, "bfloat16": 0}, beyond=0, with_gradient=8, unmoved=8)
    tensors = [dataclasses.replace(each, dtype="bfloat16") for each in step.tensors]
    tensors = [dataclasses.replace(each, swallowed=still) if each.swallowed else each for each in tensors]
    step = dataclasses.replace(step, tensors=tuple(tensors))
    evidence_file.write(dataclasses.replace(evidence, steps=(step,)), recorded_run / "evidence.jsonl")
    seen = text_of(page(recorded_run))
    table = seen[seen.index("Updates that vanish") :]
    assert "weight did not move updates swallowed by float16" in table
    assert "stem.weight 100 % 0 – – –" in table
    assert "a weight with a gradient that did not move" in table


def test_names_that_would_turn_a_line_around_are_written_out(evidence):
    (step, *_) = evidence.steps
    tensors = tuple(dataclasses.replace(each, module="left\u202eright") for each in step.tensors)
    drawn, _ = heat(dataclasses.replace(evidence, steps=(dataclasses.replace(step, tensors=tensors),)), ["float16"])
    assert "\u202e" not in "".join(row for kind in drawn["kinds"] for row in kind["rows"])


def test_precisions_and_casts_are_those_of_the_explanation(recorded_run):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    explanation = mezzo.explain(model, torch.randn(4, 8), "O1,dtype=bfloat16")
    (recorded_run / "explanation.json").write_text(explanation.to_json())
    seen = text_of(page(recorded_run))
    part = seen[seen.index("Which precision, and why") :]
    assert explanation.answer.headline in part
    assert "casts, forward and backward" in part
    assert "op table: fp32, reduction" in part


def test_a_broken_explanation_is_refused(recorded_run):
    (recorded_run / "explanation.json").write_text("{}")
    place = re.escape(str(recorded_run / "explanation.json"))
    with pytest.raises(StateError, match=rf"explanation cannot be read\n  where  {place}\n  why    this is no "):
        page(recorded_run)
    good = mezzo.explain(torch.nn.Linear(2, 2), torch.ones(1, 2), "O0").to_json()
    for text, why in (
        (good.replace('"policy": "O0"', '"policy": "O9"'), "policy 'O9': unknown level 'O9'"),
        (good.replace('"moved_bytes": ', '"moved_bytes": -'), "moved_bytes is -"),
        ("\udcff", "'utf-8' codec can't decode"),
    ):
        (recorded_run / "explanation.json").write_text(text, errors="surrogateescape")
        with pytest.raises(StateError, match=rf"where  {place}\n  why    (.|\n)*{re.escape(why)}"):
            page(recorded_run)


def test_a_policy_that_a_summary_garbles_is_shown_as_it_is(recorded_run):
    summary = json.loads((recorded_run / "summary.json").read_text())
    (recorded_run / "summary.json").write_text(json.dumps(summary | {"policies": ["O9,"]}))
    assert "digits-cnn under O9," in text_of(page(recorded_run))


def test_the_verdict_on_formats_comes_first_with_the_policy_to_go_on_with(recorded_run, evidence):
    summary = json.loads((recorded_run / "summary.json").read_text())
    summary["rows"], summary["policies"] = summary["rows"][:1], ["O0"]
    (recorded_run / "summary.json").write_text(json.dumps(summary))
    whole = [
        dataclasses.replace(step, tensors=tuple(each for each in step.tensors if each.module in ("stem", "head")))
        for step in evidence.steps
    ]
    header = dataclasses.replace(evidence.header, policy="O0", compute_dtype="float32")
    evidence_file.write(
        dataclasses.replace(evidence, header=header, steps=tuple(whole)), recorded_run / "evidence.jsonl"
    )
    found = diagnose(read(recorded_run).evidence)
    seen = text_of(page(recorded_run))
    assert f"Verdict {found.formats[0].line} {found.formats[1].line}" in seen
    suggested = seen[seen.index("Suggested policy") :]
    assert f"- O0 + {found.policy} level: O0 → O1" in suggested


def test_what_is_wrong_with_the_numbers_is_an_alert(recorded_run):
    seen = text_of(page(recorded_run))
    assert "Alerts, the gravest first" in seen
    assert "infinite or NaN at step 51. blocks.1.down" in seen
