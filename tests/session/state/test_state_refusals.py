"""States that belong to another session, or to wrapped models: all differences are listed, and nothing is loaded."""

import copy
import itertools

import pytest
import torch
from torch import nn

from mezzo import MixedPrecision, StateError, optim

from .runs import POLICIES, linear, one_step, through_a_file

# What is refused -----------------------------------------------------------------------------------------


def all_of(run):
    grads = [p.grad for p in (*run.model.parameters(), *run.amp.master_params())]
    return [run.model.state_dict(), [o.state_dict() for o in run.optimizers], run.amp.state_dict(), grads]


REFUSED = {
    "FP32 weights in O3": (
        {"policy": "O1 fp16"}, {"policy": "O3 fp16"},
        ["policy level: O1 → O3", "parameter weight: float32 [3, 4] → float16 [3, 4] without a master",
         "parameter bias: float32 [3] → float16 [3] without a master"],
    ),
    "masters in O3": (
        {"policy": "O2 fp16"}, {"policy": "O3 fp16"},
        ["policy level: O2 → O3", "parameter weight: float16 [3, 4] with a master → float16 [3, 4] without a master"],
    ),
    "another low precision": (
        {"policy": "O3 fp16"}, {"policy": "O3 bf16"},
        ["policy dtype: float16 → bfloat16", "parameter weight: float16 [3, 4] → bfloat16 [3, 4] without a master"],
    ),
    "shapes": (
        {"policy": "O1 fp16"}, {"policy": "O1 fp16", "width": 5},
        ["parameter weight: float32 [3, 4] → float32 [5, 4]", "parameter bias: float32 [3] → float32 [5]"],
    ),
    "names": (
        {"policy": "O1 fp16"}, {"policy": "O1 fp16", "bias": False}, ["parameter bias: float32 [3] → missing"],
    ),
    "more names": (
        {"policy": "O2 fp16", "bias": False}, {"policy": "O2 fp16"}, ["parameter bias: missing → float16 [3]"],
    ),
    "losses": (
        {"policy": "O1 fp16", "num_losses": 2}, {"policy": "O2 fp16"}, ["losses: 2 → 1", "policy level: O1 → O2"],
    ),
}  # fmt: skip

REFUSED_IN_A_WINDOW = {
    "another policy": (
        {"policy": "O1 fp16"}, {"policy": "O0"},
        ["policy level: O1 → O0", "gradients of an unfinished accumulation window, which belong to the saved policy"],
    ),
    "another emulation": (
        {"policy": "O1 fp16"}, {"policy": POLICIES["O1 fp16"].replace("emulate=true", "emulate=false")},
        ["policy emulate: true → false", "gradients of an unfinished accumulation window"],
    ),
    "losses without a scale": ({"policy": "O1 bf16", "num_losses": 2}, {"policy": "O1 bf16"}, ["losses: 2 → 1"]),
    "optimizers": (
        {"policy": "O1 fp16", "optimizers": 2}, {"policy": "O1 fp16"}, ["optimizers with gradients: 2 → 1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "before, after, lines, in_window",
    [(*case, False) for case in REFUSED.values()] + [(*case, True) for case in REFUSED_IN_A_WINDOW.values()],
    ids=[*REFUSED, *REFUSED_IN_A_WINDOW],
)
def test_what_cannot_be_continued_is_refused_with_all_differences(before, after, lines, in_window, bits):
    run = linear(**before)
    one_step(run)
    if in_window:
        one_step(run, finish=False)
    other = linear(**after)
    one_step(other)
    untouched = bits(all_of(other))
    with pytest.raises(StateError, match="the state belongs to another session") as caught:
        other.amp.load_state_dict(through_a_file(run.amp.state_dict()))
    for line in lines:
        assert line in str(caught.value)
    assert bits(all_of(other)) == untouched


def test_weights_beyond_fp16_are_refused(bits):
    run = linear("O2 bf16")
    with torch.no_grad():
        run.model.weight[0, 0] = 1e5
    other = linear("O2 fp16")
    untouched = bits(all_of(other))
    with pytest.raises(StateError, match=r"parameter weight: values beyond 65504 → float16 \[3, 4\]"):
        other.amp.load_state_dict(run.amp.state_dict())
    assert bits(all_of(other)) == untouched


def test_nothing_is_loaded_into_an_open_window(bits):
    run, other = linear("O2 fp16"), linear("O2 fp16")
    one_step(other, finish=False)
    untouched = bits(all_of(other))
    for state in (run.amp.state_dict(), torch.amp.GradScaler("cpu").state_dict(), {}, 7):
        with pytest.raises(StateError, match=r"inside an accumulation window(.|\n)*after 1 backward"):
            other.amp.load_state_dict(state)
    assert bits(all_of(other)) == untouched
    other.amp.zero_grad()
    other.amp.load_state_dict(run.amp.state_dict())


def test_many_differences_are_counted():
    def build(count):
        model = nn.ModuleList([nn.Linear(1, 1) for _ in range(count)])
        return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O0")

    with pytest.raises(StateError, match=r"parameter 20.bias: missing → float32 \[1\]\n +and 2 more\n") as caught:
        build(22).load_state_dict(build(1).state_dict())
    assert len(str(caught.value).splitlines()) < 50


def test_a_closed_session_has_no_state():
    run = linear("O2 fp16")
    state = run.amp.state_dict()
    run.amp.close()
    for call in (run.amp.state_dict, lambda: run.amp.load_state_dict(state)):
        with pytest.raises(StateError, match=r"after close\(\)"):
            call()


# Wrapped models ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # inside torch's own dynamo
@pytest.mark.parametrize("policy", ["O1 fp16", "O2 fp16"])
def test_wrappers_change_no_names(policy, bits):
    """Compiled, data parallel and plain sessions continue each other, in whatever order."""

    def build(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return model, MixedPrecision(wrap(model), torch.optim.SGD(model.parameters(), lr=0.1), POLICIES[policy])

    wraps = [
        lambda model: model,
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    ]
    saved = []
    for wrap in wraps:
        model, amp = build(wrap)
        amp.backward(amp._core.models[0](torch.ones(2, 4)).float().square().mean())
        amp.step()
        amp.zero_grad()
        saved.append((copy.deepcopy(model.state_dict()), amp.state_dict()))
    assert list(saved[0][1]["parameters"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert len({str(bits(state)) for state in saved}) == 1
    weights, state = saved[0]
    for wrap in wraps:
        for session_first in (True, False):
            model, amp = build(wrap)
            loads = [lambda model=model: model.load_state_dict(weights), lambda amp=amp: amp.load_state_dict(state)]
            for load in reversed(loads) if session_first else loads:
                load()
            assert bits((model.state_dict(), amp.state_dict())) == bits(saved[0])


@pytest.mark.parametrize("order", list(itertools.permutations(["model", "optimizer", "amp"])))
def test_fp16_halves_beside_a_tie_of_subnormals_are_loaded_as_they_were(order):
    """There two pairs of halves stand for one FP32 value, and the forward pass reads only one half."""
    tie = torch.nextafter(torch.tensor(3 * 2.0**-24 + 2.0**-25), torch.tensor(0.0)).reshape(1)

    def parts():
        model = nn.Module()
        model.weight = nn.Parameter(tie.clone())
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "amp": MixedPrecision(model, optimizer, "O2,emulate=true")}

    kept, resumed = parts(), parts()
    saved = {name: copy.deepcopy(part.state_dict()) for name, part in kept.items()}
    for name in order:
        resumed[name].load_state_dict(saved[name])
    before = kept["optimizer"].master_of(kept["model"].weight)
    kept["model"].load_state_dict(saved["model"])
    for part in (kept, resumed):
        assert torch.equal(part["model"].weight, saved["model"]["weight"])
        assert torch.equal(part["optimizer"].master_of(part["model"].weight), before)
