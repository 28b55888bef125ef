"""What evidence comes to: each format by planted numbers; runs that are sick, and cured by what is written."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import mezzo
from mezzo.numerics import Evidence, RecordedStep, RecordedTensor, Recorder, diagnose, exponent_histogram
from mezzo.numerics.evidence import EvidenceHeader, RecordedModule
from mezzo.policy import Policy
from mezzo.scale import LossScale

pytestmark = pytest.mark.usefixtures("emulating")


def made(policy=None, dtype=None, skipped=False, step=1, **tensors):
    """Evidence of one step: values by kind, each of a module called after them."""
    recorded_tensors = tuple(
        RecordedTensor(
            kind=tensor_kind, module=f"the.{tensor_kind}",
            name="output" if tensor_kind.startswith("activation") else "weight",
            dtype=dtype or "float32", histogram=exponent_histogram(values),
        )
        for tensor_kind, values in tensors.items()
    )  # fmt: skip
    header = EvidenceHeader(
        mezzo="0.1.0", model="Net", policy=policy, compute_dtype=dtype, loss_scale="none", every=1,
        kinds=tuple(tensors), formats=(), modules=(RecordedModule(path="the", type="Linear"),),
    )  # fmt: skip
    recorded = RecordedStep(step=step, loss_scales=(), skipped=skipped, tensors=recorded_tensors)
    return Evidence(header=header, steps=(recorded,), num_steps=step)


ONES = torch.ones(1000)


def fp16(**tensors):
    return diagnose(made(weights=ONES, activations=ONES, **tensors)).formats[0]


def test_gradients_that_fit_need_no_loss_scale():
    answer = fp16(activation_gradients=ONES * 0.01, weight_gradients=ONES * 0.01)
    assert answer.line == ("FP16 is safe: without a loss scale it loses 0 % of the gradients, and 0 % lose digits.")
    assert answer.policy == Policy.O1("float16")
    # Nor do those of a step that was skipped change it.
    spoilt = made(step=1, skipped=True, weight_gradients=torch.full((9,), float("inf"))).steps
    fine = made(step=2, weights=ONES, activations=ONES, weight_gradients=ONES * 0.01)
    assert diagnose(dataclasses.replace(fine, steps=(*spoilt, *fine.steps))).formats[0] == answer


def test_small_gradients_need_the_highest_scale_that_fits():
    # 300 of 1000 below FP16's smallest number, one as large as 3: 2^14 · 3 is the last below 65504.
    gradients = torch.cat([torch.full((300,), 2.0**-27), torch.full((699,), 0.01), torch.tensor([3.0])])
    answer = fp16(weight_gradients=gradients)
    assert answer.is_safe
    assert answer.line == (
        "FP16 is safe with a loss scale: without one it loses 30 % of the gradients, those from 2^-27 to 2^-24, and 0 "
        "% lose digits; at 2^14, the highest loss scale that fits, it loses 0 % of the gradients."
    )
    assert answer.policy == Policy.O1("float16", loss_scale=LossScale.dynamic(init=2.0**14))


def test_gradients_further_apart_than_fp16_is_wide_are_not_saved_by_a_scale():
    gradients = torch.cat([torch.full((500,), 2.0**-26), torch.full((500,), 20000.0)])
    answer = fp16(activation_gradients=gradients)
    assert (answer.is_safe, answer.policy) == (False, None)
    assert answer.line == (
        "FP16 is not safe: at 2^1, the highest loss scale that fits, it loses 50 % of the gradients, those from 2^-27 "
        "to 2^-25."
    )


def test_weights_whose_gradients_are_flushed_for_the_most_part_are_named():
    evidence = made(weights=ONES, activations=ONES, weight_gradients=ONES.repeat(100))
    (step,) = evidence.steps
    small = {"stem": torch.full((100,), 2.0**-45), "head": torch.cat([torch.full((60,), -(2.0**-50)), ONES[:40]])}
    others = tuple(
        dataclasses.replace(step.tensors[2], module=module, histogram=exponent_histogram(values))
        for module, values in small.items()
    )
    evidence = dataclasses.replace(evidence, steps=(dataclasses.replace(step, tensors=(*step.tensors, *others)),))
    answer = diagnose(evidence).formats[0]
    assert (answer.is_safe, answer.policy) == (True, Policy.O1("float16", loss_scale=LossScale.dynamic(init=2.0**15)))
    assert answer.line.endswith(
        "; at 2^15 it flushes 100 % of those of stem.weight, and more than half of those of head.weight."
    )
    assert answer.line.count("stem") == 1


def test_what_lies_below_all_that_training_needs_makes_no_format_unsafe():
    gradients = torch.cat([torch.full((500,), 2.0**-40), torch.full((500,), 1000.0)])
    answer = fp16(activation_gradients=gradients)
    assert answer.is_safe
    assert answer.line == (
        "FP16 is safe: without a loss scale it loses 0 % of the gradients, and 0 % lose digits (50 % lie below 2^-27, "
        "where training does not need them)."
    )
    # Where nothing is larger, it is all that training has.
    line = fp16(activation_gradients=torch.full((500,), 2.0**-40)).line
    assert "without one it loses 100 % of the gradients, which lie below 2^-24, and 0 % lose digits; at" in line


def test_the_bands_are_those_of_powers_of_two():
    for power in (-28, -27, -26, -25, -24, -15, -14):
        values = torch.cat([torch.full((50,), 2.0**power * 1.5), torch.full((50,), 1.0)])
        line = fp16(weight_gradients=values).line
        lost, digits = (50 if low <= power < high else 0 for low, high in ((-27, -24), (-24, -14)))
        assert f"it loses {lost} % of the gradients" in line, power
        assert f"{digits} % lose digits" in line, power
        assert ("50 % lie below 2^-27" in line) == (power < -27), power


def test_what_overflows_without_a_loss_scale_is_named_and_bf16_is_what_to_write():
    for tensor_kind, name in (("weights", "the.weights.weight"), ("activations", "the.activations")):
        evidence = made(**{"weights": ONES, "activations": ONES, tensor_kind: ONES * 1e5})
        (step,) = evidence.steps
        outer = dataclasses.replace(step.tensors[tensor_kind == "activations"], module="the")  # hands it on
        step = dataclasses.replace(
            step, tensors=(outer, *step.tensors) if tensor_kind == "activations" else step.tensors
        )
        diagnosis = diagnose(dataclasses.replace(evidence, steps=(step,)))
        answer = diagnosis.formats[0]
        assert answer.line == (
            f"FP16 is not safe: {name} reaches 1e+05, beyond 65504, whatever the loss scale; "
            "mezzo tune finds what has to stay in FP32."
        )
        assert answer.policy is None
        assert diagnosis.policy == Policy.O1("bfloat16")
        assert diagnosis.formats[1].line == "BF16 is safe: it has FP32's range, and needs no loss scale."
    answer = diagnose(made(weights=ONES, activations=ONES)).formats[0]
    assert (answer.is_safe, answer.policy) == (False, None)
    assert answer.line == "FP16 holds all weights and activations; of gradients nothing is known."


def test_eight_bits_are_judged_tensor_by_tensor():
    wide = torch.logspace(-30, 0, 1000, base=2.0)
    diagnosis = diagnose(made(weights=ONES, activations=wide, weight_gradients=wide))
    answer = diagnosis.formats[2]
    assert not answer.is_safe
    # E4M3 holds 2^-9 to 448, 17 powers of two; the values lie in 30.
    assert "it flushes 4" in answer.line
    assert "of the.activations (activations)" in answer.line
    assert diagnose(made(weights=ONES, activations=ONES)).formats[2].is_safe


def test_a_diagnosis_prints_in_words():
    flushed = diagnose(made(policy="O1,dtype=float16,loss_scale=1", dtype="float16", weight_gradients=torch.zeros(100)))
    first, *rest, last = str(flushed).splitlines()
    assert first == "All gradients are zero without a loss scale."
    assert rest[0] == "  where  1 tensors in float16, 100 % of their values zero"
    assert rest[2].startswith('  write  policy="O1,dtype=float16,loss_scale=dynamic(init=2**24)')
    assert {row.line for row in flushed.formats} <= set(rest)
    assert last.startswith(f'policy="{flushed.policy}"   # The loss scale moves')
    safe = diagnose(made(weights=ONES, activations=ONES, weight_gradients=ONES))  # in FP32: the line says why already
    assert str(safe).splitlines() == [*(row.line for row in safe.formats), *safe.lines, f'policy="{safe.policy}"']
    plain = json.loads(json.dumps(safe.to_dict()))
    assert plain["policy"] == "O1,dtype=float16,loss_scale=dynamic(init=32768)"
    assert [row["format"] for row in plain["formats"]] == ["float16", "bfloat16", "float8_e4m3fn+float8_e5m2"]
    assert str(diagnose(dataclasses.replace(made(), steps=()))) == "No step was recorded."
    assert diagnose(made()).lines == ("The recorded steps had no tensor of 32 bits or less.",)
    torchs = diagnose(made(dtype="float16", weight_gradients=torch.zeros(100)))
    assert torchs.alerts[0].write == "torch.amp.GradScaler(init_scale=2.0**24)"


def test_masks_are_no_fault_and_nans_are():
    mask = torch.cat([ONES, torch.full((10,), -float("inf"))])
    diagnosis = diagnose(made(weights=ONES, activations=mask, weight_gradients=ONES))
    assert [alert.level for alert in diagnosis.alerts] == ["warn"]
    assert diagnosis.formats[0].is_safe
    diagnosis = diagnose(made(weights=ONES, activations=torch.cat([ONES, torch.full((10,), float("nan"))])))
    assert [alert.level for alert in diagnosis.alerts] == ["bad"]
    assert diagnosis.formats == ()  # they would say nothing of formats
    assert diagnosis.alerts[0].what == "10 activations are infinite or NaN at step 1."
    assert "whatever the format" in diagnosis.alerts[0].why


def test_activations_near_the_end_of_fp16_are_a_warning_and_a_healthy_run_keeps_its_policy():
    diagnosis = diagnose(made(policy="O1,dtype=float16", dtype="float16", weights=ONES, activations=ONES * 40000))
    assert [(alert.level, alert.what) for alert in diagnosis.alerts] == [
        ("warn", "Activations reach 61 % of FP16's range.")
    ]
    assert diagnose(made(dtype="float16", activations=ONES * 4000)).alerts == ()
    healthy = diagnose(made(policy="O1,dtype=bfloat16", dtype="bfloat16", weights=ONES, activations=ONES))
    assert (healthy.alerts, healthy.policy) == ((), None)


def trained(policy, lr=1e-3, size=1.0, steps=3, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    amp = mezzo.MixedPrecision(model, optimizer(model.parameters(), lr=lr), policy)
    with Recorder(model, every=1) as recorder:
        for _ in range(steps):
            with amp.autocast():
                loss = (model(torch.ones(8, 16)) - size).square().mean()
            amp.backward(loss)
            amp.step()
            amp.zero_grad()
    amp.close()
    return diagnose(recorder.evidence)


def test_weights_that_do_not_move_are_found_and_fp32_ones_move():
    diagnosis = trained("O3,dtype=bfloat16,emulate=true", lr=1e-5)
    assert diagnosis.alerts[0].level == "bad"
    assert diagnosis.alerts[0].what.endswith("of the weights with a gradient did not move.")
    assert "BF16" in diagnosis.alerts[0].why
    assert diagnosis.policy == Policy.O2("bfloat16", emulate=True)
    assert not any("swallow" in line for line in diagnosis.lines)  # the updates that are left were not
    cured = trained(diagnosis.policy, lr=1e-5)
    assert cured.alerts == ()
    assert any(line.startswith("Weights stored in BF16 alone swallow ") for line in cured.lines)


def learning(policy, size, lr=1e-2):
    """What a loss as small as ``size`` teaches, as the share of it that is left, and the diagnosis."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    amp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-30), policy)
    losses = []
    with Recorder(model, every=10) as recorder:
        for _ in range(40):
            with amp.autocast():
                loss = (model(torch.ones(8, 16)).float() - 1.0).square().mean()
            losses.append(loss.item())
            amp.backward(loss * size)
            amp.step()
            amp.zero_grad()
    amp.close()
    return losses[-1] / losses[0], diagnose(recorder.evidence)


@pytest.mark.parametrize("policy, size", [("O2,dtype=float16,loss_scale=1", 2.0**-16), ("O0", 2.0**-28)])
def test_gradients_that_fp16_flushes_are_found_and_the_suggested_scale_teaches(policy, size):
    _, diagnosis = learning(policy, size)
    if policy != "O0":
        assert [alert.level for alert in diagnosis.alerts] == ["bad"]
        assert "without a loss scale" in diagnosis.alerts[0].what
        assert f'policy="{diagnosis.policy}"' == diagnosis.alerts[0].write
    assert diagnosis.policy.dtype == torch.float16
    cured, rest = learning(diagnosis.policy, size)
    assert cured < 0.1
    assert not any(alert.level == "bad" for alert in rest.alerts)


def test_activations_that_fp16_cannot_hold_are_what_bf16_is_for():
    spoilt = torch.cat([ONES, torch.full((5,), float("inf"))])
    for policy in ("O1,dtype=float16", "O2,dtype=float16,emulate=true"):
        diagnosis = diagnose(made(policy=policy, dtype="float16", skipped=True, activations=spoilt))
        assert "FP16 ends at 65504" in diagnosis.alerts[0].why
        assert diagnosis.policy == Policy.parse(policy.replace("float16", "bfloat16"))
    assert diagnose(made(policy="O1", dtype="bfloat16", skipped=True, activations=spoilt)).policy is None
    diagnosis = diagnose(made(policy="O3,dtype=float16", dtype="float16", skipped=True, activations=spoilt))
    assert diagnosis.policy == Policy.O1("bfloat16")
    assert diagnose(made(policy="O0", dtype="float32", weights=spoilt)).policy is None


def test_how_near_activations_come_is_asked_of_all_steps():
    runs = [made(policy="O1,dtype=float16", dtype="float16", step=n, activations=ONES * 1e4 * (5 - n)) for n in (1, 2)]
    (alert,) = diagnose(dataclasses.replace(runs[0], steps=(*runs[0].steps, *runs[1].steps))).alerts
    assert alert.why.startswith("the.activations reaches 4e+04 of 65504")


# Runs that are sick ------------------------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    )


def steep(policy, factor, steps=8, sick=()):
    """A run whose gradient at the output is ``factor``; at some steps a thousand times that."""
    model = network()
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1e-9), policy)
    with Recorder(model, every=1, keep=None) as recorder:
        for step in range(1, steps + 1):
            with amp.autocast():
                loss = model(torch.ones(1, 16)).float().sum() * factor * (1000 if step in sick else 1)
            amp.backward(loss)
            amp.step()
            amp.zero_grad()
    amp.close()
    return recorder.evidence


def test_where_all_steps_are_skipped_it_is_said_and_nothing_of_formats():
    diagnosis = diagnose(steep("O2,dtype=float16,emulate=true", 1e6))
    (alert,) = diagnosis.alerts
    assert (alert.level, alert.what) == ("bad", "All recorded steps were skipped.")
    assert alert.where == "gradient of the output of 1.1 (float16)"
    assert "the last ones at loss scale 512:" in alert.why
    assert (diagnosis.formats, diagnosis.policy) == ((), None)
    # What a scale skips until it fits is no fault.
    assert diagnose(steep("O1,dtype=float16,emulate=true", 4.0, sick=(3,))).alerts == ()


def plain(dtype, factor, steps=3):
    """A loop that steps whatever the gradients are."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with Recorder(model, optimizer, every=1) as recorder:
        for _ in range(steps):
            with torch.autocast("cpu", dtype=dtype):
                loss = model(torch.ones(1, 16)).float().sum() * factor
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    return recorder.evidence


def test_gradients_that_reach_the_weights_are_found_where_they_begin():
    diagnosis = diagnose(plain(torch.float16, 1e6))
    (alert,) = diagnosis.alerts
    assert alert.level == "bad"
    assert alert.what.endswith("gradients are infinite or NaN at step 1.")
    assert alert.where.startswith("gradient of the output of 1.1 (float16), and ")
    assert "the step was taken all the same" in alert.why
    assert alert.write.startswith('MixedPrecision(model, optimizer, "O1,dtype=float16")')
    assert steep("O1,dtype=float16", 1e6).steps[-1].skipped
    assert diagnose(plain(torch.bfloat16, 1e6)).alerts == ()


def test_a_mask_in_an_early_step_does_not_hide_what_spoils_a_later_one():
    mask, spoilt = torch.cat([ONES, torch.full((4,), -float("inf"))]), torch.full((1,), float("nan"))

    def run(policy, **last):
        steps = [made(policy=policy, dtype=policy and "float16", step=1, weights=ONES, activations=mask)]
        steps.append(made(dtype=policy and "float16", step=3, **last))
        returned = dataclasses.replace(steps[0].steps[0].tensors[0], kind="activations", module="", name="output")
        steps = tuple(
            dataclasses.replace(evidence.steps[0], skipped=bool(policy), tensors=(*evidence.steps[0].tensors, returned))
            for evidence in steps
        )
        return diagnose(dataclasses.replace(made(policy=policy, dtype=policy and "float16"), steps=steps))

    assert [alert.level for alert in run(None, weights=ONES, activations=mask).alerts] == ["warn"]
    alert = run(None, weights=spoilt, activations=mask).alerts[0]
    assert (alert.level, alert.what) == ("bad", "1 weights are infinite or NaN at step 3.")
    # Where steps are skipped for the sake of the scale, infinities of the mask are not why.
    diagnosis = run("O1,dtype=float16,loss_scale=2**22", weights=ONES, weight_gradients=torch.full((1,), float("inf")))
    assert [(alert.level, alert.what) for alert in diagnosis.alerts] == [
        ("bad", "All recorded steps were skipped."),
        ("warn", "4 activations are infinite or NaN at step 1."),
    ]
    # What an optimizer computes in FP16 may break weights, and FP32 values save them.
    diagnosis = diagnose(made(policy="O3,dtype=float16", dtype="float16", weights=spoilt))
    assert "weights are infinite or NaN" in diagnosis.alerts[0].what
    assert diagnosis.policy == Policy.O2("float16")
