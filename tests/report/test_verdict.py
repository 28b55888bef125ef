"""What a comparison comes to: intervals as SciPy has them, and each verdict where it is due."""

import math

import pytest
from scipy.stats import ttest_rel

from mezzo.report import rows, verdict
from mezzo.report.verdict import number, short


@pytest.mark.parametrize(
    "base, mine",
    [([99.1, 98.7, 99.4], [99.0, 98.9, 99.1]), ([1.0, 2.0], [3.0, 1.0]), ([5.0, 4.0, 7.5, 1.0], [5.0, 4.5, 7.5, 0.5])],
)
def test_difference_and_interval_are_those_of_a_paired_t_test(compared, base, mine):
    row = rows(compared(O0=base, O1=mine))[1]
    expected = ttest_rel(mine, base).confidence_interval(0.95)
    assert row.interval == pytest.approx((expected.low, expected.high))
    assert row.difference == pytest.approx(sum(mine) / len(mine) - sum(base) / len(base))


@pytest.mark.parametrize(
    "base, mine, options, expected",
    [
        ([99.0, 99.2, 99.1], [99.1, 99.1, 99.2], {}, "equal"),
        ([99.0, 99.2, 99.1], [99.1, 99.1, 99.2], {"margin": 0.1}, "undecided"),
        ([99.0, 99.2, 99.1], [97.0, 97.3, 97.1], {}, "worse"),
        ([99.0, 99.2, 99.1], [97.0, 97.3, 97.1], {"margin": 3.0}, "equal"),
        ([99.0, 99.2, 99.1], [97.0, 97.3, 97.1], {"better": "lower"}, "better"),
        ([97.0, 97.3, 97.1], [99.0, 99.2, 99.1], {}, "better"),
        ([97.0, 97.3, 97.1], [99.0, 99.2, 99.1], {"better": "lower"}, "worse"),
        ([99.0, 99.2, 99.1], [90.0, 99.2, 99.1], {}, "undecided"),
        ([99.0, 99.0], [99.0, 99.0], {"margin": 0.0}, "equal"),
        ([99.0], [99.0], {}, "undecided"),  # one seed proves nothing
        (99.0, 99.0, {}, "undecided"),
        (99.0, 50.0, {}, "undecided"),
        ([99.0, 99.2], [99.0, math.nan], {}, "diverged"),
        ([99.0, 99.2], [99.0, None], {}, "failed"),
        ([99.0, math.nan], [99.0, 99.2], {}, "undecided"),
    ],
)
def test_a_verdict_follows_from_interval_and_margin(compared, base, mine, options, expected):
    compared_rows = rows(compared(O0=base, O1=mine, **options))
    assert [row.verdict for row in compared_rows] == ["reference", expected]


@pytest.mark.parametrize(
    "changes, expected, words",
    [
        ({"loss": math.nan, "nonfinite": 4}, "diverged", "diverged: 4 of 20 losses were not finite, 0 steps skipped."),
        ({"loss": math.inf, "nonfinite": 1}, "diverged", "1 of 20 losses"),
        ({"skipped": 6}, "diverged", "0 of 20 losses were not finite, 6 steps skipped."),
        ({"skipped": 5, "nonfinite": 1}, "equal", "equal, +0 points (95 %: +0 to +0 points)."),
        ({"code": 1, "metric": None}, "failed", "seed 1 ended with exit code 1; what it said is in out/O1/errors.txt."),
        ({"code": -9}, "failed", "exit code -9"),
        ({"metric": None}, "failed", "seed 1 printed no test accuracy; what it printed is in out/O1/output.txt."),
        ({"low_share": 0.0}, "equal", "; nothing ran in low precision."),
    ],
)
def test_a_run_that_goes_wrong_decides_its_row(compared, run_of, changes, expected, words):
    changes = {"metric": 99.2} | changes
    comparison = compared(O0=[99.0, 99.2], O1=[99.0, run_of(**changes)])
    assert rows(comparison)[1].verdict == expected
    assert words in verdict(comparison)[1]


def test_the_answer_comes_first_and_says_what_equal_means(compared):
    lines = verdict(compared(O0=[99.0, 99.2], **{"O2,dtype=float16": [97.0, 97.2]}))
    assert (
        lines[0] == "FP32 reaches test accuracy 99.1 % (2 seeds of each; equal means within ±0.991 points, 1 % of it)."
    )
    assert lines[1] == "O2,fp16: worse by 2 points (95 %: -2 to -2 points)."
    assert lines[-1] == "Least memory: O0, 3.00 KiB held and saved, 1.00× that of FP32."
    stated = verdict(compared(O0=[99.0, 99.2], O1=[99.0, 99.2], margin=0.5))[0]
    assert stated.endswith("(2 seeds of each; equal means within ±0.5 points).")
    single = verdict(compared(O0=0.5, O1=0.5, name="loss", unit="nats", better="lower"))
    assert single[0].startswith("FP32 reaches loss 0.5 nats (one run of each; equal means within ±0.005 nats")
    assert "Undecided needs more seeds: --seeds 3, for a script that takes --seed." in single


def test_least_memory_is_the_smallest_sum(compared, run_of):
    lines = verdict(compared(O0=1.0, O1=run_of(1.0, saved_bytes=512), O2=run_of(1.0, held_bytes=512)))
    assert lines[-1] == "Least memory: O2, 1.50 KiB held and saved, 0.50× that of FP32."


def test_that_products_were_emulated_is_said_wherever_the_verdict_is(compared, run_of):
    lines = verdict(compared(O0=1.0, O1=run_of(1.0, emulated=True)))
    assert lines[-1].startswith("Products were emulated: time, and what recurrent layers save")


def test_what_a_policy_did_not_reach_stands_beside_its_verdict(compared, run_of):
    frozen, stored = {"Frozen": "nobody trains it"}, {"weights of Net, stored in FP32": "eps is zero\n  write  1e-4"}
    comparison = compared(O0=run_of(1.0, left_alone=frozen), O3=run_of(1.0, left_alone=frozen | stored))
    assert rows(comparison)[1].left_alone == stored
    assert verdict(comparison)[1].endswith("; left alone: weights of Net, stored in FP32: eps is zero.")


def test_fp32_that_diverges_judges_nobody(compared, run_of):
    comparison = compared(O0=[run_of(1.0, loss=math.nan, nonfinite=3), 1.0], O1=[1.0, 1.0])
    assert [row.verdict for row in rows(comparison)] == ["reference", "undecided"]
    lines = verdict(comparison)
    assert lines[1].startswith("FP32 itself diverged: 3 of 20 losses were not finite")
    assert not any("more seeds" in line for line in lines)


def test_of_an_interrupted_comparison_it_is_said_what_has_not_run(compared):
    assert "Not run: O2,bf16." in verdict(compared(O0=[1.0], O1=[1.0], missing=("O2,dtype=bfloat16",)))
    assert verdict(compared(missing=("O0",))) == ["No run has finished."]


def test_numbers_have_the_digits_that_count():
    assert [number(value) for value in (None, 0.123456, 99.33, -0.0, math.nan)] == ["–", "0.1235", "99.33", "0", "nan"]
    assert number(0.5, sign=True) == "+0.5"
    assert short("O2,dtype=bfloat16,loss_scale=8") == "O2,bf16,loss_scale=8"
