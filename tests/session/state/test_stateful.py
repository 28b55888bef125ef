"""`amp.stateful()` in one process: what it holds goes on bit for bit from a folder or file, or is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import mezzo
from mezzo import MixedPrecision, StateError, UnsupportedError, optim

from ...support.tables import pairwise

# What torch says of a checkpoint in one process, and of its own options.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]

OPTIMIZERS = {
    "split": lambda params: optim.AdamW(params, lr=0.01),
    "full": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, master="full"),
    "lion": lambda params: optim.Lion(params, lr=0.01, state_dtype="bfloat16"),
    "damped": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), fused=True),
    "torch damped": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
POLICIES = [
    "O0",
    *(f"{level},dtype={dtype},emulate=true" for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")),
]
LOW, FP16 = "O2,dtype=bfloat16,emulate=true", "O2,emulate=true"


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def session(policy, name, seed=0):
    model = net(seed)
    optimizer = OPTIMIZERS[name](model.parameters())
    return model, optimizer, MixedPrecision(model, optimizer, policy)


def backward(model, amp, number):
    x = torch.sin(torch.arange(24.0) * (number + 1)).view(4, 6)
    with amp.autocast():
        loss = model(x).float().square().mean()
    amp.backward(loss)


def train(model, amp, numbers):
    for number in numbers:
        backward(model, amp, number)
        amp.step()
        amp.zero_grad()


def everything(model, amp):
    state = amp.state_dict()
    return [model.state_dict(), state["masters"], state["loss_scales"], state["stats"]]


def held(optimizer, bits):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    options = [
        sorted((key, value) for key, value in each.items() if key != "params") for each in optimizer.param_groups
    ]
    return bits([[sorted(optimizer.state[param].items()) for param in params], options])


def through_folder(one, other, folder):
    checkpoint.save({"app": one.stateful()}, checkpoint_id=folder, no_dist=True)
    checkpoint.load({"app": other.stateful()}, checkpoint_id=folder, no_dist=True)


def through_file(one, other, folder):
    mezzo.save(one.stateful().state_dict(), folder / "state.pt")
    other.stateful().load_state_dict(mezzo.load(folder / "state.pt"))


WAYS = [through_folder, through_file]


TABLE = [
    row
    for row in pairwise(POLICIES, list(OPTIMIZERS), WAYS, [0, 2])
    if row.values[0] != "O3,dtype=float16,emulate=true" or "sgd" in row.values[1] or "damped" in row.values[1]
]  # of the others the epsilon is zero in FP16


@pytest.mark.parametrize("policy, name, way, steps", TABLE)
def test_a_run_goes_on_bit_for_bit(policy, name, way, steps, tmp_path, bits):
    model, optimizer, amp = session(policy, name)
    train(model, amp, range(steps))
    other, second, same = session(policy, name, seed=1)
    way(amp, same, tmp_path)
    assert bits(everything(other, same)) == bits(everything(model, amp))
    train(model, amp, range(5, 8))
    train(other, same, range(5, 8))
    assert bits(everything(other, same)) == bits(everything(model, amp))
    assert held(optimizer, bits) == held(second, bits)


def values(amp):
    """Return what a state holds, whatever its dtypes."""
    state = amp.stateful().state_dict()
    moments = {
        name: {k: v.double().tolist() for k, v in held.items()} for name, held in state["optimizers"]["0"].items()
    }
    return {name: value.tolist() for name, value in state["model"].items()}, moments


KINDS, PAIRS = (
    ["O0", "O1,emulate=true", LOW, FP16],
    [("adamw",) * 2, ("split",) * 2, ("adamw", "split"), ("split", "adamw")],
)


@pytest.mark.parametrize("before, after, names", pairwise(KINDS, KINDS, PAIRS))
def test_any_policy_continues_any_other_that_has_the_same_weights(before, after, names, tmp_path):
    model, _, amp = session(before, names[0])
    train(model, amp, range(3))
    other, _, same = session(after, names[1], seed=1)
    through_folder(amp, same, tmp_path)
    assert values(same) == values(amp)
    train(other, same, range(3, 5))


def test_it_is_the_state_of_a_plain_model_in_fp32():
    model, _, amp = session(LOW, "split")
    train(model, amp, range(2))
    state = amp.stateful().state_dict()["model"]
    plain = net(seed=1)
    plain.load_state_dict(state)
    masters = amp.state_dict()["masters"]
    assert all(torch.equal(value, masters[name]) for name, value in plain.named_parameters() if name in masters)
    assert len(masters) == 4


def test_torch_s_converters_go_from_file_to_folder_and_back(tmp_path, bits):
    model, _, amp = session(LOW, "split")
    train(model, amp, range(2))
    mezzo.save({"app": amp.stateful().state_dict()}, tmp_path / "one.pt")
    torch_save_to_dcp(tmp_path / "one.pt", tmp_path / "folder")
    dcp_to_torch_save(tmp_path / "folder", tmp_path / "two.pt")
    for number in range(2):
        _, _, same = session(LOW, "adamw", seed=1)
        if number:
            same.stateful().load_state_dict(mezzo.load(tmp_path / "two.pt")["app"])
        else:
            checkpoint.load({"app": same.stateful()}, checkpoint_id=tmp_path / "folder", no_dist=True)
        assert values(same) == values(amp)
        assert bits(same.state_dict()["masters"]) == bits(amp.state_dict()["masters"])


@pytest.mark.parametrize("name", ["split", "full", "adamw", "torch damped"])
@pytest.mark.parametrize("policy", [LOW, "O1,emulate=true"])
def test_asking_changes_nothing(policy, name, bits):
    model, optimizer, amp = session(policy, name)
    other, second, same = session(policy, name)
    for numbers in (range(2), range(2, 4)):
        before = bits([optimizer.state_dict(), model.state_dict()])
        amp.stateful().state_dict()
        assert bits([optimizer.state_dict(), model.state_dict()]) == before
        assert all(param.grad is None for param in (*model.parameters(), *amp.master_params()))
        train(model, amp, numbers)
        train(other, same, numbers)
    assert bits(everything(model, amp)) == bits(everything(other, same))
    assert bits(optimizer.state_dict()) == bits(second.state_dict())


def test_beside_a_tie_in_fp16_both_runs_hold_the_same_halves(bits):
    """FP16 has two pairs of halves for one FP32 value there; the run that saves takes that of one that loads."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    amp = MixedPrecision(model, optimizer, FP16)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0**-24, 3 * 2.0**-24]]))
        optimizer.state[model.weight]["remainder"].copy_(torch.tensor([[2**14, 2**14]]))
    value = optimizer.master_of(model.weight).clone()
    state = amp.stateful().state_dict()
    assert torch.equal(optimizer.master_of(model.weight), value)
    other = nn.Linear(2, 1, bias=False)
    second = optim.SGD(other.parameters(), lr=0.1)
    MixedPrecision(other, second, FP16).stateful().load_state_dict(state)
    assert bits([other.weight, second.state[other.weight]["remainder"]]) == bits(
        [model.weight, optimizer.state[model.weight]["remainder"]]
    )


def test_parameters_that_have_not_begun_begin_after_loading(tmp_path, bits):
    """torch's SGD takes a first gradient whole, and later ones damped."""
    runs = []
    for is_loaded in (False, True):
        model, optimizer, amp = session("O1,dtype=bfloat16,emulate=true", "torch damped")
        model[3].requires_grad_(False)
        train(model, amp, range(2))
        model[3].requires_grad_(True)
        if is_loaded:
            other, second, same = session("O1,dtype=bfloat16,emulate=true", "torch damped", seed=1)
            through_folder(amp, same, tmp_path / "folder")
            model, optimizer, amp = other, second, same
        train(model, amp, range(2, 4))
        runs.append(bits([model.state_dict(), optimizer.state_dict()]))
    assert runs[0] == runs[1]


def test_schedules_and_options_are_loaded_with_it(tmp_path):
    model, optimizer, amp = session(LOW, "fused")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, amp, range(1))
    scheduler.step()
    other, second, same = session(LOW, "fused", seed=1)
    rate = second.param_groups[0]["lr"]
    through_folder(amp, same, tmp_path / "folder")
    group = second.param_groups[0]
    assert isinstance(group["lr"], torch.Tensor)
    assert (float(group["lr"]), float(rate), group["betas"]) == (
        pytest.approx(0.005),
        pytest.approx(0.01),
        (0.9, 0.999),
    )
    train(other, same, range(1, 2))


def test_several_models_and_optimizers_load_together(tmp_path, bits):
    def made(seed):
        models = [net(seed), torch.compile(net(seed + 1), backend="eager")]
        optimizers = [optim.AdamW(models[0].parameters(), lr=0.01), torch.optim.SGD(models[1].parameters(), 0.1, 0.9)]
        return models, MixedPrecision(models, optimizers, LOW)

    (models, amp), (others, same) = made(0), made(2)
    x = torch.ones(4, 6)
    for _ in range(2):
        with amp.autocast():
            loss = (models[0](x) * models[1]._orig_mod(x)).float().square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()
    through_folder(amp, same, tmp_path / "folder")
    assert bits([model.state_dict() for model in models]) == bits([model.state_dict() for model in others])
    assert bits(amp.state_dict()["masters"]) == bits(same.state_dict()["masters"])


# What is refused --------------------------------------------------------------------------------------------


def larger(seed):
    return nn.Sequential(*net(seed), nn.Linear(3, 2))


def wider(seed):
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))


def smaller(seed):
    return net(seed)[:2]


@pytest.mark.parametrize("build", [larger, wider, smaller])
def test_the_state_of_another_model_is_refused_and_nothing_loaded(build, tmp_path, bits):
    model, _, amp = session(LOW, "split")
    train(model, amp, range(2))
    checkpoint.save({"app": amp.stateful()}, checkpoint_id=tmp_path / "folder", no_dist=True)
    other = build(1)
    second = optim.AdamW(other.parameters(), lr=0.01)
    same = MixedPrecision(other, second, LOW)
    before = bits([other.state_dict(), second.state_dict(), same.state_dict()])
    with pytest.raises((StateError, checkpoint.CheckpointException, RuntimeError, ValueError), match=r"3\.|0\."):
        checkpoint.load({"app": same.stateful()}, checkpoint_id=tmp_path / "folder", no_dist=True)
    with pytest.raises(StateError, match=r"belongs to another session(.|\n)*(3\.weight|0\.weight)"):
        same.stateful().load_state_dict(amp.stateful().state_dict())
    assert bits([other.state_dict(), second.state_dict(), same.state_dict()]) == before


def test_a_window_that_is_open_is_refused():
    model, _, amp = session(LOW, "split")
    state = amp.stateful().state_dict()
    backward(model, amp, 0)
    for call in (amp.stateful().state_dict, lambda: amp.stateful().load_state_dict(state)):
        with pytest.raises(StateError, match=r"an accumulation window is open(.|\n)*amp\.step\(\)"):
            call()
    amp.step()
    amp.stateful().load_state_dict(state)


def drop_session(state):
    del state["session"]


def other_groups(state):
    names = state["session"][0]["optimizers"][0]["groups"][0]["names"]
    state["session"][0]["optimizers"][0]["groups"][0]["names"] = names[:2]


def more_optimizers(state):
    state["session"][0]["optimizers"] *= 2


def other_moment(state):
    state["optimizers"]["0"]["0.weight"]["exp_avg"] = torch.zeros(2, 3)


def damaged(state):
    state["session"][0]["loss_scales"][0]["scale"] = -1.0


@pytest.mark.parametrize(
    "change, says",
    [
        (drop_session, r"not the state of amp\.stateful\(\)"),
        (other_groups, "parameter group"),
        (more_optimizers, "2 optimizers → 1"),
        (other_moment, r"exp_avg of 0\.weight: \[2, 3\] → \[8, 6\]"),
        (damaged, r"loss_scales\[0\]\.scale is -1\.0"),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_loaded(change, says, bits):
    model, optimizer, amp = session(FP16, "split")
    train(model, amp, range(2))
    state = copy.deepcopy(amp.stateful().state_dict())
    train(model, amp, range(2, 4))
    before = bits([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    change(state)
    with pytest.raises(StateError, match=says):
        amp.stateful().load_state_dict(state)
    for wrong in (None, {}, amp.state_dict(), {"session": ({},), "model": {}}):
        with pytest.raises(StateError, match=r"not the state of amp\.stateful\(\)"):
            amp.stateful().load_state_dict(wrong)
    assert bits([model.state_dict(), optimizer.state_dict(), amp.state_dict()]) == before


def test_weights_that_do_not_fit_are_refused_before_anything_is_loaded(bits):
    model, _, amp = session(LOW, "adamw")
    with torch.no_grad():
        model[3].weight[0, 0] = 1e6
    other, second, same = session(FP16, "split", seed=1)
    before = bits([other.state_dict(), second.state_dict()])
    with pytest.raises(UnsupportedError, match=r"values do not fit float16(.|\n)*3\.weight"):
        same.stateful().load_state_dict(amp.stateful().state_dict())
    assert bits([other.state_dict(), second.state_dict()]) == before


def test_optimizers_that_cannot_say_what_they_keep_are_refused_by_name():
    model = net()
    amp = MixedPrecision(model, torch.optim.LBFGS(model.parameters()), "O1,emulate=true")
    with pytest.raises(UnsupportedError, match=r"does not say what it keeps(.|\n)*LBFGS"):
        amp.stateful().state_dict()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = MixedPrecision(model, optimizer, "O1,emulate=true")
    optimizer.state[model[0].weight]["history"] = [torch.zeros(3)]
    with pytest.raises(UnsupportedError, match=r"SGD keeps tensors in nested containers(.|\n)*0\.weight: history"):
        amp.stateful().state_dict()
