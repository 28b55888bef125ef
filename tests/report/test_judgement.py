"""What a run came to, in words: the largest loss, the savings, and what went wrong, the gravest first."""

import dataclasses
from pathlib import Path

import pytest

from mezzo.report import Run, judge


@pytest.fixture
def judged(summary):
    """The verdict on a summary with changes, by row."""

    def judge_it(*rows, **changes):
        for row, change in zip(summary["rows"], rows, strict=False):
            row |= change
        run = Run(path=Path("run"), summary=summary | changes, series={})
        return judge(run)

    return judge_it


HEALTHY = {"final_metric": 99.0, "difference": -0.25, "nonfinite_losses": 0, "skipped_steps": 0, "status": "finished"}


def test_the_largest_loss_and_the_least_memory_are_named(judged):
    verdict = judged({}, HEALTHY | {"saved_bytes": 2**20}, HEALTHY | {"difference": 0.5})
    assert verdict.level == "ok"
    assert verdict.alerts == ()
    assert verdict.lines == (
        "O0 reaches test accuracy 99.00 %; the worst difference is -0.25 points (O2,dtype=float16).",
        "One run of each: two seeds of one policy differ as well.",
        "Least memory: O2,dtype=float16, 3.00 MiB of weights, gradients, optimizer state and what is saved for the "
        "backward pass, 0.50× that of O0.",
    )


def test_what_is_better_is_no_loss_whatever_the_direction(judged, summary):
    better = [{}, HEALTHY | {"difference": 0.5}, HEALTHY | {"difference": 0.1}]
    assert judged(*better).lines[0].endswith("; no policy is worse than it.")
    summary["metric"]["higher_is_better"] = False
    assert judged(*better).lines[0].endswith("; the worst difference is +0.50 points (O2,dtype=float16).")


def test_what_went_wrong_comes_with_its_policy_the_gravest_first(judged):
    verdict = judged(
        {},
        HEALTHY | {"skipped_steps": 16},
        {"note": "the loss scale collapsed\n  where  head.weight", "skipped_steps": 7},
    )
    assert verdict.level == "bad"
    assert [(alert.level, alert.what, alert.where) for alert in verdict.alerts] == [
        ("bad", "Training stopped after 120 steps.", "O3,dtype=float16"),
        ("bad", "17 of 120 losses were infinite or NaN.", "O3,dtype=float16"),
        ("warn", "16 of 300 steps were skipped.", "O2,dtype=float16"),
        ("warn", "7 of 120 steps were skipped.", "O3,dtype=float16"),
    ]
    assert verdict.alerts[0].why == "the loss scale collapsed\n  where  head.weight"
    assert verdict.lines[0] == "O0 reaches 99.00 %; not finite: O3,dtype=float16."


def test_a_few_skipped_steps_are_the_price_of_a_dynamic_scale(judged):
    assert judged({}, HEALTHY | {"skipped_steps": 15}, HEALTHY).alerts == ()


def test_steps_that_the_reference_skips_are_those_that_plain_fp32_takes(judged):
    rows = ({"skipped_steps": 150}, HEALTHY | {"skipped_steps": 149}, HEALTHY)
    reference, scaled = judged(*rows).alerts
    assert reference.why == (
        "Their gradients were not finite. Plain FP32 takes such steps, and each loss after them is NaN."
    )
    assert scaled.why == "Their gradients were not finite at the loss scale, and their batches were lost."


def test_one_policy_is_compared_with_nothing(judged, summary):
    summary["rows"] = summary["rows"][1:2]
    assert judged().lines == ("O2,dtype=float16: test accuracy 99.16 % after 300 steps.",)


def test_without_the_reference_nothing_is_compared(judged, summary):
    summary["rows"] = [row | {"difference": None} for row in summary["rows"][1:]]
    assert judged().lines == ("2 of 4 policies were trained: none to compare with O0.",)


def test_what_is_wrong_with_a_recorded_run_is_said_before_what_formats_would_do(judged, summary, evidence):
    summary["rows"] = summary["rows"][:1]
    run = Run(path=Path("run"), summary=summary, series={}, evidence=evidence)
    assert judge(run).lines[0] == judge(run).alerts[0].what == "3 weights are infinite or NaN at step 51."


def test_skipped_steps_are_told_once_with_what_to_write(judged, summary, evidence):
    summary["rows"] = [summary["rows"][0] | HEALTHY | {"skipped_steps": 150}]
    steps = tuple(
        dataclasses.replace(step, skipped=True, tensors=tuple(t for t in step.tensors if t.kind == "weight_gradients"))
        for step in evidence.steps[1:]
    )
    run = Run(path=Path("run"), summary=summary, series={}, evidence=dataclasses.replace(evidence, steps=steps))
    (alert,) = judge(run).alerts
    assert alert.what == "All 2 recorded steps were skipped."
    assert alert.write == f'MixedPrecision(model, optimizer, "{judge(run).policy}")'
