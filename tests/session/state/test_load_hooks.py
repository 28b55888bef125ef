"""Weights that a session's model loads in another precision keep all their bits."""

import copy
import itertools
import logging
import operator
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, UnsupportedError


def build(policy, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, MixedPrecision(model, optimizer, policy)


def fp32_weights(seed=1):
    return {name: value.clone() for name, value in build("O0", seed)[0].state_dict().items()}


def masters(amp):
    return dict(zip(["0.weight", "0.bias", "2.weight", "2.bias"], amp.master_params(), strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fp32_weights_reach_the_masters_whole(dtype, bits):
    model, amp = build(f"O2,dtype={dtype},emulate=true")
    weights = fp32_weights()
    before = {name: value.clone() for name, value in weights.items()}
    model.load_state_dict(weights)
    assert bits({name: m.detach() for name, m in masters(amp).items()}) == bits(weights) == bits(before)
    assert all(torch.equal(p, weights[name].to(p.dtype)) for name, p in model.named_parameters())


def test_a_part_of_a_model_loads_as_exactly(bits):
    model, amp = build("O2,emulate=true")
    weights = fp32_weights()
    model[2].load_state_dict({name: weights[f"2.{name}"] for name in ("weight", "bias")})
    assert bits(masters(amp)["2.weight"].detach()) == bits(weights["2.weight"])
    assert bits(masters(amp)["0.weight"].detach()) != bits(weights["0.weight"])


def test_low_precision_weights_leave_masters_that_round_to_them(bits):
    """A master that does not takes the weight, also where the model's own format could not hold it."""
    model, amp = build("O2,dtype=float16,emulate=true")
    with torch.no_grad():
        masters(amp)["0.weight"][0, 0] = 1e-30  # zero in the model
    kept = {name: m.detach().clone() for name, m in masters(amp).items()}
    state = {name: value.to(torch.bfloat16) for name, value in kept.items()}
    state["0.bias"][1] = 3e-20  # below anything that float16 holds
    model.load_state_dict(state)
    amp.state_dict()  # takes over what the parameters have become
    kept["0.bias"][1] = torch.tensor(3e-20).bfloat16().float()
    assert bits({name: m.detach() for name, m in masters(amp).items()}) == bits(kept)


def test_tied_weights_under_both_names(bits):
    def build_tied(policy, seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"in": nn.Embedding(5, 4), "out": nn.Linear(4, 5, bias=False)})
        model["out"].weight = model["in"].weight
        return model, MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)

    model, amp = build_tied("O2,emulate=true", 3)
    weights, state = copy.deepcopy(model.state_dict()), amp.state_dict()
    assert len(weights) == 2
    again, resumed = build_tied("O1,emulate=true", 4)
    resumed.load_state_dict(state)
    again.load_state_dict(weights)
    assert bits(again["in"].weight) == bits(next(amp.master_params()))
    assert again["out"].weight is again["in"].weight


def test_values_beyond_fp16_are_refused():
    model, _ = build("O2,dtype=float16,emulate=true")
    weights = fp32_weights()
    weights["2.bias"][0] = 7e4
    with pytest.raises(UnsupportedError, match=r"values do not fit float16(.|\n)*2\.bias(.|\n)*beyond 65504"):
        model.load_state_dict(weights)
    wide, _ = build("O2,dtype=bfloat16,emulate=true")
    wide.load_state_dict(weights)
    weights["2.bias"][0] = float("inf")  # which was infinite before
    model.load_state_dict(weights)


def test_other_shapes_and_missing_weights_are_torch_s_to_tell(bits):
    model, amp = build("O2,emulate=true")
    before = bits({name: m.detach() for name, m in masters(amp).items()})
    with pytest.raises(RuntimeError, match=r"Missing key(.|\n)*size mismatch for 0.weight"):
        model.load_state_dict({"0.weight": torch.zeros(3, 3)})
    model.load_state_dict({"2.bias": torch.ones(2)}, strict=False)
    after = {name: m.detach() for name, m in masters(amp).items()}
    assert torch.equal(after.pop("2.bias"), torch.ones(2))
    assert bits(after)[1] == before[1][:-1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("policy", ["O1,emulate=true", "O2,emulate=true"])
def test_a_copied_model_loads_like_any_other(policy, copied, bits):
    model, amp = build(policy)
    before = bits([*amp.master_params()])
    other = copied(model)
    weights = fp32_weights()
    other.load_state_dict(weights)
    assert all(torch.equal(p, weights[name].to(p.dtype)) for name, p in other.named_parameters())
    assert bits([*amp.master_params()]) == before
    amp.close()
    assert any(module._load_state_dict_pre_hooks for module in other.modules()) == policy.startswith("O2")
    other.load_state_dict(weights)


def hooks(model):
    return sum(len(module._load_state_dict_pre_hooks) for module in model.modules())


def test_the_hooks_are_there_only_where_they_are_needed():
    for policy, expected in (("O0", 0), ("O1,emulate=true", 0), ("O2,emulate=true", 2), ("O3,emulate=true", 0)):
        model, amp = build(policy)
        assert hooks(model) == expected
        amp.close()
        assert hooks(model) == 0
    model, amp = build("O1,emulate=true")
    state = build("O2,emulate=true")[1].state_dict()
    amp.load_state_dict(state)
    amp.load_state_dict(state)
    assert hooks(model) == 2
    amp.close()
    assert hooks(model) == 0
    model.load_state_dict(fp32_weights())


def test_what_was_restored_is_forgotten_at_the_next_step(bits):
    """From then on the weights are the session's own, and a loaded state dict means what it says."""
    before, amp = build("O2,emulate=true")
    low, state = copy.deepcopy(before.state_dict()), amp.state_dict()
    model, resumed = build("O1,emulate=true")
    resumed.load_state_dict(state)
    with resumed.autocast():
        loss = model(torch.zeros(1, 4)).sum() * 0
    resumed.backward(loss)
    resumed.step()
    assert bits([*resumed.master_params()]) == bits([*amp.master_params()])
    model.load_state_dict(low)
    assert bits(dict(model.state_dict())) == bits({name: value.float() for name, value in low.items()})


def test_a_forgotten_session_leaves_the_model_alone(bits):
    model, amp = build("O2,emulate=true")
    del amp
    weights = fp32_weights()
    model.load_state_dict(weights)
    assert bits(dict(model.state_dict())) == bits({name: value.half() for name, value in weights.items()})


def test_an_o1_model_pickles_without_mezzo():
    model, amp = build("O1,emulate=true")
    read = "import sys, pickle; pickle.load(sys.stdin.buffer); assert 'mezzo' not in sys.modules"
    subprocess.run([sys.executable, "-c", read], input=pickle.dumps(model), check=True)
    amp.close()


@pytest.mark.parametrize("order", list(itertools.permutations(("model", "optimizer", "session"))), ids="-".join)
def test_a_master_that_is_edited_after_loading_is_saved_as_it_was_edited(order):
    states = {name: copy.deepcopy(part.state_dict()) for name, part in parts_of_o2().items()}
    parts = parts_of_o2()
    for name in order:
        parts[name].load_state_dict(states[name])
    (master,) = parts["session"].master_params()
    with torch.no_grad():
        expected = master.mul_(0.5).clone()
    saved = parts["model"].state_dict()["weight"]
    parts["session"].state_dict()
    assert torch.equal(master, expected)
    assert torch.equal(saved, expected.half())


def parts_of_o2():
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "session": mezzo.MixedPrecision(model, optimizer, "O2,emulate=true"),
    }


# Edits, copies ------------------------------------------------------------------------------------------

KEEPERS = {
    "torch": lambda params: torch.optim.SGD(params, lr=0.0),
    "split": lambda params: mezzo.optim.SGD(params, lr=0.0),
    "full": lambda params: mezzo.optim.SGD(params, lr=0.0, master="full"),
}
#: What is loaded after an edit, and whether it has the edit, as it would in FP32 training with torch alone.
LOADED = {
    "a state dict from before, which is the model's own memory": (lambda model: model.state_dict(), None, True),
    "a state dict from after": (None, lambda model: model.state_dict(), True),
    "a copy from after": (None, lambda model: copy.deepcopy(model.state_dict()), True),
    "a copy from before": (lambda model: copy.deepcopy(model.state_dict()), None, False),
}


@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_edited_master_outlives_the_model_s_own_state(dtype, keeper, loaded):
    before, after, has_edit = LOADED[loaded]
    model = nn.Linear(4, 2)
    amp = MixedPrecision(model, KEEPERS[keeper](model.parameters()), f"O2,dtype={dtype},emulate=true")
    with torch.no_grad(), amp.autocast():
        model(torch.ones(1, 4))
    original = {name: value.clone() for name, value in model.state_dict().items()}
    state = before(model) if before else None
    with torch.no_grad():
        for master in amp.master_params():
            master.fill_(1.2345)
    model.load_state_dict(after(model) if after else state)
    with amp.autocast():
        loss = model(torch.ones(1, 4)).square().mean()
    amp.backward(loss)
    amp.step()
    for name, param in model.named_parameters():
        expected = torch.full_like(param, 1.2345) if has_edit else original[name]
        assert torch.equal(param, expected)
    if has_edit and keeper == "torch":
        assert {m.unique().item() for m in amp.master_params()} == {torch.tensor(1.2345).item()}


def test_an_edited_master_is_saved_with_the_model_and_edits_of_parameters_count_first():
    model, amp = build("O2,dtype=bfloat16,emulate=true")
    master = masters(amp)["0.weight"]
    version = model[2].weight._version
    with torch.no_grad():
        master.clamp_(-0.01, 0.01)
    assert torch.equal(model.state_dict()["0.weight"], master.bfloat16())
    assert model[2].weight._version == version  # autograd is told of nothing
    with torch.no_grad():
        master.fill_(1.0)
        model[0].weight.fill_(2.0)
    assert model[0].state_dict()["weight"].unique().item() == 2.0
    assert master.unique().item() == 2.0


@pytest.mark.parametrize(
    "keeper, averaged",
    [
        ("torch", "amp.master_params()"),
        ("split", "optimizer.master_of(p) for p in amp.master_params()"),
        ("full", "optimizer.master_of(p) for p in amp.master_params()"),
    ],
)
def test_a_copy_of_the_model_is_said_once_to_be_low(caplog, keeper, averaged):
    model = nn.Linear(4, 2)
    optimizer = KEEPERS[keeper](model.parameters())
    fp32 = torch.optim.swa_utils.AveragedModel(model)
    amp = MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
    with caplog.at_level(logging.WARNING):
        pickle.loads(pickle.dumps(model))
        assert not caplog.messages
        low = torch.optim.swa_utils.AveragedModel(model)
        copy.deepcopy(model)
    assert caplog.messages == [
        "the weights of a copied model are bfloat16\n"
        "  where  copy.deepcopy(model), which AveragedModel(model) and other averages of weights begin with\n"
        "  why    their FP32 values are kept by the session; an average in bfloat16 swallows what each step adds\n"
        "  write  AveragedModel(model) before MixedPrecision(model, …), and after each step\n"
        f"         averaged.update_parameters(nn.ParameterList({averaged}))"
    ]
    assert next(low.parameters()).dtype == torch.bfloat16
    weights = [p if keeper == "torch" else optimizer.master_of(p) for p in amp.master_params()]
    fp32.update_parameters(nn.ParameterList(weights))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(fp32.parameters(), weights, strict=True))


@pytest.mark.parametrize("policy", ["O0", "O1,emulate=true", "O3,dtype=bfloat16,emulate=true"])
def test_copies_without_masters_lack_nothing(caplog, policy):
    model, _ = build(policy)
    with caplog.at_level(logging.WARNING):
        copy.deepcopy(model)
    assert not caplog.messages


@pytest.mark.parametrize("begin", ["MixedPrecision", "mezzo.attach"])
def test_parameters_that_would_be_replaced_are_refused(begin, bits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = {"MixedPrecision": MixedPrecision, "mezzo.attach": mezzo.attach}[begin](
        model, optimizer, "O2,dtype=bfloat16,emulate=true"
    )
    try:
        params, before = list(model.parameters()), bits(model.state_dict())
        with pytest.raises(mezzo.StateError, match="puts other parameters in the place") as refused:
            model.load_state_dict(fp32_weights(), assign=True)
        assert "0.weight, 0.bias" in str(refused.value)
        assert f"before {begin}(model, …)" in str(refused.value)
        assert all(map(operator.is_, model.parameters(), params))
        assert bits(model.state_dict()) == before
        model[1].load_state_dict({}, assign=True)  # has none
    finally:
        amp.close()
    model.load_state_dict(fp32_weights(), assign=True)
    assert bits(dict(model.state_dict())) == bits(fp32_weights())
