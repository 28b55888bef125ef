"""ExactLoading: weights that a session's model loads in another precision keep all their bits."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

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
