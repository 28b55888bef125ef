"""One training run: what it does to the model, and what it says about itself."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo.errors import NumericsError, PolicyError
from mezzo.numerics.footprint import StateBytes
from mezzo.policy import Policy
from mezzo.recipes import get
from mezzo.recipes.training import UNTIMED_STEPS, Training, train


class Log:
    """Keeps what it is told."""

    def __init__(self):
        self.events, self.records, self.results = [], [], []

    def started(self, policy, steps):
        self.events.append(("started", str(policy), steps))

    def stepped(self, record):
        self.events.append("stepped")
        self.records.append(record)

    def ended(self, result):
        self.events.append("ended")
        self.results.append(result)


def plain_torch(recipe, steps, seed):
    """The reference: the same training without a line of mezzo."""
    split = recipe.load()
    model, stream = recipe.build(seed), recipe.batches(split, seed)
    optimizer = recipe.optimizer(model)
    schedule = recipe.schedule(optimizer, steps)
    losses = []
    for _ in range(steps):
        inputs, targets = next(stream)
        loss = recipe.loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, recipe.evaluate(model, split)


@pytest.mark.parametrize("name", ["tiny", "digits-cnn", "docs-lm"])
def test_o0_is_the_plain_torch_training(name, tiny):
    recipe = tiny if name == "tiny" else get(name)
    log = Log()
    steps = 2 if name == "docs-lm" else 4  # after each the metric is measured, which takes longer than a step
    result = train(recipe, "O0", steps=steps, seed=3, watcher=log)
    losses, metric = plain_torch(recipe, steps, 3)
    # clip coefficient and unscaling are one multiplication here, two there: units in the last place
    assert [record.loss for record in log.records] == pytest.approx(losses, rel=1e-4)
    assert result.final_metric == pytest.approx(metric, rel=1e-3)
    assert result.arithmetic == "native"
    assert result.final_scale == 1.0


@pytest.mark.parametrize(
    "policy", ["O1,dtype=float16,loss_scale=constant(64)", "O2,dtype=bfloat16", "O3,dtype=float16"]
)
def test_every_policy_starts_from_the_same_weights_on_the_same_batch(policy, tiny):
    logs = {text: Log() for text in ("O0", policy)}
    for text, log in logs.items():
        train(tiny, text, steps=1, watcher=log)
    (reference,), (record,) = (log.records for log in logs.values())
    # the compute dtype's rounding in two layers, 2**-8 for bfloat16
    assert record.loss == pytest.approx(reference.loss, rel=0.03)
    assert record.grad_norm == pytest.approx(reference.grad_norm, rel=0.05)


def test_training_is_reproducible_and_leaves_the_global_random_state_alone(tiny):
    first, second = Log(), Log()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    train(tiny, "O2,dtype=bfloat16", steps=10, watcher=first)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    train(tiny, "O2,dtype=bfloat16", steps=10, watcher=second)
    assert [r.loss for r in first.records] == [r.loss for r in second.records]


def test_the_watcher_hears_everything_in_order(tiny):
    log = Log()
    result = train(tiny, "O0", steps=3, watcher=log)
    assert log.events == [("started", "O0", 3), "stepped", "stepped", "stepped", "ended"]
    assert [record.step for record in log.records] == [1, 2, 3]
    assert {record.policy for record in log.records} == {"O0"}
    assert log.results == [result]
    assert result.final_loss == log.records[-1].loss
    assert result.seconds * 1e3 >= sum(record.ms for record in log.records)


@pytest.mark.parametrize(
    "steps, expected",
    [(20, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]), (4, [1, 2, 3, 4]), (1, [1])],
)
def test_the_metric_is_measured_ten_times_and_always_at_the_end(tiny, steps, expected):
    log = Log()
    train(tiny, "O0", steps=steps, watcher=log)
    assert [record.step for record in log.records if record.metric is not None] == expected


def test_best_metric_is_the_best_of_all_and_final_the_last(tiny):
    values = iter([3.0, math.nan, 1.0, 2.0])
    recipe = dataclasses.replace(tiny, evaluate=lambda model, split: next(values))
    result = train(recipe, "O0", steps=4)
    assert (result.best_metric, result.best_step, result.final_metric) == (1.0, 3, 2.0)


def test_evaluation_runs_in_evaluation_mode_without_gradients_and_training_goes_on(tiny):
    seen = []

    def evaluate(model, split):
        seen.append((model.training, torch.is_grad_enabled()))
        return 0.0

    run = Training(dataclasses.replace(tiny, evaluate=evaluate), Policy.O0(), tiny.load(), steps=2)
    run.train()
    assert seen == [(False, False)] * 2
    assert run.model.training
    run.close()


def test_skipped_steps_scale_and_schedule_after_overflows(tiny):
    # Gradients of order 1 overflow float16 at scale 2**24, and go on doing so until it has been halved enough.
    log = Log()
    policy = Policy.O1("float16", loss_scale="dynamic(init=2**24)")
    run = Training(tiny, policy, tiny.load(), steps=30)
    run.train([log])
    result = run.result()
    skipped = [record.skipped for record in log.records]
    assert skipped[0]
    assert 1 <= result.skipped_steps == sum(skipped) < 24
    assert result.final_scale == 2.0 ** (24 - result.skipped_steps)
    scales = [record.scale for record in log.records]
    for number in range(29):
        assert scales[number + 1] == scales[number] * (0.5 if skipped[number] else 1.0)
    # a skipped step leaves the schedule where it is
    assert run.schedule.last_epoch == 30 - result.skipped_steps
    run.close()


def test_a_diverging_run_is_a_result(tiny):
    recipe = dataclasses.replace(tiny, loss=lambda outputs, targets: functional.mse_loss(outputs, targets) * math.inf)
    result = train(recipe, "O0", steps=8)
    assert (result.status, result.steps, result.nonfinite_losses, result.skipped_steps) == (
        "finished",
        8,
        8,
        8,
    )
    assert math.isinf(result.final_loss)
    assert result.final_metric > 0


def test_a_numerics_error_stops_the_run_and_is_kept(tiny):
    log = Log()

    def loss(outputs, targets):
        if len(log.records) == 3:
            raise NumericsError("the scale collapsed", where="step 4")
        return functional.mse_loss(outputs, targets)

    result = train(dataclasses.replace(tiny, loss=loss), "O0", steps=20, watcher=log)
    assert (result.status, result.steps) == ("stopped", 3)
    assert result.note == "the scale collapsed\n  where  step 4"
    assert log.results == [result]


def test_an_interrupted_run_still_has_a_result(tiny):
    class Impatient(Log):
        def stepped(self, record):
            super().stepped(record)
            if record.step == 7:
                raise KeyboardInterrupt

    run = Training(tiny, Policy.O0(), tiny.load())
    with pytest.raises(KeyboardInterrupt):
        run.train([Impatient()])
    run.close()
    result = run.result(interrupted=True)
    assert (result.status, result.steps) == ("interrupted", 7)
    assert result.final_metric is not None
    assert result.seconds > 0


def test_a_run_interrupted_before_its_first_step_has_nothing_to_say(tiny):
    run = Training(tiny, Policy.O0(), tiny.load())
    run.close()
    result = run.result(interrupted=True)
    assert (result.steps, result.final_metric, result.best_metric, result.step_ms) == (0, None, None, None)
    assert (result.state_bytes, result.saved_bytes, result.final_scale, result.final_loss) == (None,) * 4


def test_bytes_of_o0_with_adamw(tiny):
    result = train(tiny, "O0", steps=4)
    # two moments in FP32 and a 4-byte step counter for each of 4 parameters
    assert result.state_bytes == StateBytes(
        weights=4 * 161, gradients=4 * 161, remainders=0, optimizer=2 * 4 * 161 + 4 * 4
    )
    # inputs for the first layer; ReLU's result, which the second layer keeps too; the loss keeps
    # outputs and targets
    assert result.saved_bytes == 4 * (16 * 8 + 16 * 16 + 16 + 16)
    assert result.peak_bytes is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_o2_with_adamw_holds_fourteen_bytes_per_parameter(tiny, dtype):
    result = train(tiny, f"O2,dtype={dtype}", steps=8)
    state = result.state_bytes
    assert state.weights == 2 * 161
    assert state.remainders == 2 * 161
    assert state.optimizer == 2 * 4 * 161 + 4 * 4
    assert state.gradients == 2 * 161
    assert state.total - 4 * 4 == 14 * 161


def test_bytes_are_measured_once_moments_exist_even_if_first_steps_are_skipped(tiny):
    policy = Policy.O2("float16", loss_scale="dynamic(init=2**24)")
    result = train(tiny, policy, steps=30)
    assert result.skipped_steps >= 1
    assert result.state_bytes.optimizer == 2 * 4 * 161 + 4 * 4


def test_low_precision_uses_the_recipes_layout_and_fp32_the_contiguous_one():
    recipe = get("digits-cnn")
    split = recipe.load()
    for policy, layout, name in (
        (Policy.O0(), torch.contiguous_format, "contiguous"),
        (Policy.O1("bfloat16"), torch.channels_last, "channels-last"),
    ):
        seen = []
        run = Training(recipe, policy, split, steps=1)
        weight = run.model.blocks[1].conv1.weight
        assert weight.is_contiguous(memory_format=layout)
        assert not weight.is_contiguous(
            memory_format=torch.channels_last if layout is torch.contiguous_format else torch.contiguous_format
        )
        run.model.blocks.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].stride()))
        run.train()
        run.close()
        channel_stride = {stride[1] for stride in seen}
        assert channel_stride == ({64} if layout is torch.contiguous_format else {1})
        assert run.result().memory_format == name


def test_first_and_probed_steps_are_not_timed(tiny):
    run = Training(tiny, Policy.O0(), tiny.load(), steps=15)
    run.train()
    run.close()
    times = [9.0] * UNTIMED_STEPS + [float(k) for k in range(1, 11)]
    run.records = [dataclasses.replace(r, ms=ms) for r, ms in zip(run.records, times, strict=True)]
    p10, median, p90 = run.result().step_ms
    assert (p10, median, p90) == pytest.approx((1.9, 5.5, 9.1))


def test_too_few_steps_give_no_time(tiny):
    assert train(tiny, "O0", steps=UNTIMED_STEPS + 1).step_ms is None
    assert len(train(tiny, "O0", steps=UNTIMED_STEPS + 2).step_ms) == 3


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "3"])
def test_steps_must_be_a_positive_integer(tiny, steps):
    with pytest.raises(PolicyError) as error:
        train(tiny, "O0", steps=steps)
    assert str(error.value) == (
        f"steps must be a positive integer, not {steps!r}\n"
        "  where  recipe tiny\n"
        "  write  steps=20, which is its default"
    )
