"""Moments in 8 bits: forms keep what they say, scripts get the moments that are asked for, and what was measured."""

import json
import sys
from pathlib import Path

import pytest
import torch

import forms
import mezzo
import moments as bench
from mezzo.script.program import Seams
from mezzo.step import moments

RESULT = json.loads(sorted((Path(bench.ROOT) / "benchmarks" / "results").glob("moments-*.json"))[-1].read_text())
HALF = torch.full((8, 32), 0.5)


def groups():
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 3, 8)[:, None]


@pytest.mark.parametrize("curve", [*forms.CURVES, "mezzo"])
def test_what_a_form_keeps_is_the_nearest_value_of_its_curve_or_at_random_one_of_two(curve):
    values = groups()
    for squares, moment in ((False, values), (True, values.square())):
        grid = forms.table_of(curve, torch.uint8 if squares else torch.int8).double()
        scales = forms.rounded_up(moment.abs().amax(-1, keepdim=True))
        away = (moment.abs()[..., None].double() / scales[..., None] - grid).abs()  # (groups, 32, codes)
        kept = forms.by_table(curve, at_random=forms.NEAREST, off_zero=False)(moment, squares, HALF)
        reached = (kept.abs().double() / scales - moment.abs().double() / scales).abs()
        assert torch.all(reached <= away.amin(-1) + 2.0**-22)
        assert torch.equal(kept.sign()[kept != 0], moment.sign()[kept != 0])
        mean = sum(forms.by_table(curve)(moment, squares, torch.full_like(moment, (n + 0.5) / 64)) for n in range(64))
        apart = (grid.diff().max() * scales).double()  # of neighbours, at most; 1/64 of it is a step of the mean
        off = (mean.double() / 64 - moment).abs()
        is_next_to_zero = moment.abs() < grid[1] * scales
        assert torch.all(off[~is_next_to_zero] <= (apart / 64).expand_as(off)[~is_next_to_zero])


def test_the_table_of_the_library_is_the_library():
    values = groups()
    for squares, moment in ((False, values), (True, values.square())):
        mine = forms.by_table("mezzo", at_random=forms.NEAREST)(moment, squares, HALF)
        library = forms.by_library(at_random=forms.NEAREST)(moment, squares, HALF)
        is_tie = (mine - library).abs() > 1e-6 * moment.abs().amax(-1, keepdim=True)
        assert is_tie.float().mean() < 0.01
        assert torch.all((mine - moment).abs()[is_tie] <= 1.001 * (library - moment).abs()[is_tie])


def test_no_second_moment_becomes_zero_unless_it_may():
    values = torch.full((1, 32), 1e-12)
    values[0, 0] = 1.0
    assert forms.by_table("linear")(values, True, torch.full_like(values, 0.99)).all()
    assert forms.by_library()(values, True, torch.full_like(values, 0.99)).all()
    naive = forms.by_table("linear", at_random=forms.NEAREST, off_zero=False)
    assert naive(values, True, HALF).count_nonzero() == 1


def test_exact_moments_are_adams():
    stream = [torch.linspace(-1, 1, 128) * n for n in range(1, 4)]
    exact = bench.Moments(forms.Form(name="float64", keep=forms.in_fp32), 128, torch.float64)
    weight = torch.nn.Parameter(torch.zeros(128, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=1.0)
    for number, gradient in enumerate(stream, 1):
        before, weight.grad = weight.detach().clone(), gradient.double()
        adam.step()
        update, changed = exact.step(gradient.double(), 0.999, number, torch.zeros(2, 128))
        assert torch.allclose(before - weight.detach(), update, rtol=1e-12)
        assert changed.all()


@pytest.mark.parametrize("form_name", bench.KINDS)
def test_a_script_gets_the_moments_that_are_asked_for(form_name):
    weight, plain = torch.nn.Parameter(torch.ones(40)), torch.optim.AdamW
    with Seams() as seams:
        bench.replaced(bench.SCRIPTS[0], form_name, seams)
        optimizer = torch.optim.AdamW([weight])
        weight.grad = torch.linspace(0, 1, 40)
        optimizer.step()
        kept = optimizer.state[weight].get("exp_avg_codes", optimizer.state[weight].get("exp_avg"))
        if form_name == bench.LINEAR:
            evenly = torch.cat([torch.arange(32) / 31, torch.arange(32, 40) / 39]) * 127
            assert ((kept - evenly).abs() <= 1).all()  # half a code, and half of one for the scale's rounding
    assert isinstance(optimizer, mezzo.optim.AdamW)
    assert kept.dtype == getattr(torch, bench.KINDS[form_name])
    assert torch.optim.AdamW is plain
    assert moments.coded is not bench.naive_coded


def test_the_command_writes_one_dated_file(tmp_path, monkeypatch, capsys):
    kinds = {form_name: bench.KINDS[form_name] for form_name in ("FP32", "int8")}
    monkeypatch.setattr(bench, "SCRIPTS", bench.SCRIPTS[1:])
    monkeypatch.setattr(bench, "KINDS", kinds)
    monkeypatch.setattr(
        sys, "argv", ["moments.py", "--steps=2", "--stride=600", "--seeds=1", "--script-steps=2", f"--out={tmp_path}"]
    )
    bench.main()
    (path,) = tmp_path.iterdir()
    assert f"written to {path}" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert {row["form"] for row in written["curves"]} == {"float64", *(form.name for form in forms.FORMS)}
    (script,) = written["scripts"]
    assert [row["moments"] for row in script["rows"]] == list(kinds)
    assert all(row["losses"]["1"] == script["rows"][0]["losses"]["1"] for row in script["rows"])


# What was measured -----------------------------------------------------------------------------------------


def form(name, beta2):
    (row,) = (row for row in RESULT["curves"] if (row["form"], row["beta2"]) == (name, beta2))
    return row


@pytest.mark.parametrize("beta2", [0.99, 0.999])
def test_codes_of_the_library_hold_the_update_where_naive_ones_do_not(beta2):
    exact, mine, naive = (form(name, beta2) for name in ("float64", "mezzo", forms.NAIVE))
    assert mine["error"] < 0.1 < 1 < naive["error_first_20"]
    assert mine["largest_update"] < 2 * exact["largest_update"] < 100 < naive["largest_update"]
    assert mine["bytes"] == 2.125


def test_scripts_come_to_the_same_with_int8_moments():
    for script in RESULT["scripts"]:
        rows = {row["moments"]: row for row in script["rows"]}
        assert [len(row["metrics"]) for row in rows.values()] == [3] * len(bench.KINDS)
        low, high = rows["int8"]["interval"]
        assert low <= 0 <= high
        assert rows["int8"]["verdict"] == "equal"
