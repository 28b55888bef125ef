"""What products below sixteen bits remember from step to step, against lists in plain Python; saved and loaded."""

import itertools
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import MixedPrecision, StateError, optim
from mezzo.cast.products import ROLES, operands
from mezzo.cast.products.memory import moved_on
from mezzo.session.capture import Captured
from mezzo.session.session import engine_of, weights_of

from ..acceptance.captured import predicated
from ..support.refusals import bits, refused
from .capture.host_graph import HostGraph
from .loops import on_disk

LENGTH = 4
DELAYED = f"fp8_recipe=delayed,fp8_history={LENGTH},fp8_module=*"
NVFP4 = "nvfp4_module=*"


class Net(nn.Module):
    """Two layers between two ends that stay low; one of them is run again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.mid, self.again, self.last = (nn.Linear(32, 32) for _ in range(4))
        self.is_whole = True

    def forward(self, x):
        x = self.mid(self.first(x)) if self.is_whole else self.first(x)
        return self.last(checkpoint(self.again, x, use_reentrant=False))


def network(build=Net):
    torch.manual_seed(0)
    return build()


def batch(number):
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(number)) * 2.0 ** (number % 5)


def session(text=DELAYED, level="O1,dtype=bfloat16", optimizer=torch.optim.SGD):
    model = network()
    made = optimizer(model.parameters(), lr=0.01)
    return model, made, MixedPrecision(model, made, f"{level},{text}")


def backward(model, amp, number):
    with amp.autocast():
        loss = model(batch(number)).float().square().mean()
    amp.backward(loss)
    return loss.item()


def train(model, amp, number):
    loss = backward(model, amp, number)
    amp.step()
    amp.zero_grad()
    return loss


def histories(amp):
    names = weights_of(amp).names()
    memories = weights_of(amp).memories()
    return {names[id(weight)]: history.tolist() for memory in memories for weight, history in memory.histories()}


class Plainly:
    """Delayed scaling in plain Python: of each layer and operand a list of the largest values, the newest first."""

    def __init__(self, model, takes):
        self.takes = max if takes == "max" else lambda known: known[0]
        self.known = {name: {role: [0.0] * LENGTH for role in ROLES} for name in ("mid", "again")}
        self.seen = {name: dict.fromkeys(ROLES, 0.0) for name in self.known}
        for name in self.known:
            model.get_submodule(name).register_forward_hook(lambda m, x, out, name=name: self.see(name, m, x[0], out))

    def see(self, name, layer, x, out):
        if not out.requires_grad:
            return
        values = {"activation": x.detach().bfloat16(), "weight": layer.weight.detach().bfloat16()}
        now = {role: float(value.abs().max()) for role, value in values.items()}
        out.register_hook(lambda gradient: self.note(name, {**now, "gradient": float(gradient.abs().max())}))

    def note(self, name, now):
        for role, value in now.items():
            self.seen[name][role] = max(self.seen[name][role], value)

    def step(self, skipped):
        for name, roles in self.known.items():
            for role, known in roles.items():
                if not skipped:
                    known[:] = [self.seen[name][role] or known[0], *known[:-1]]
        self.clear()

    def clear(self):
        self.seen = {name: dict.fromkeys(ROLES, 0.0) for name in self.known}

    @property
    def histories(self):
        return {f"{name}.weight": list(roles.values()) for name, roles in self.known.items()}


@pytest.mark.parametrize("takes", ["max", "latest"])
@pytest.mark.parametrize("seed", range(4))
def test_histories_are_those_of_lists_whatever_the_loop_does(seed, takes, monkeypatch):
    draw = random.Random(seed)
    model, optimizer, amp = session(f"fp8_amax={takes},{DELAYED}")
    plain, given = Plainly(model, takes), []
    real = operands.quantized

    def quantized(x, form, dim, *, key, amax):
        given.append((float(x.abs().max()), float(amax), x.shape))
        return real(x, form, dim, key=key, amax=amax)

    monkeypatch.setattr(operands, "quantized", quantized)
    for number in range(60):
        action = draw.choice(
            ["pass"] * 4 + ["step"] * 3 + ["skipped step", "eval", "no_grad", "clear", "clear theirs", "part"]
        )
        if action in ("pass", "part"):
            given.clear()
            model.is_whole = action == "pass"
            if not any(param.grad is not None for param in model.parameters()):
                plain.clear()  # a window begins anew
            backward(model, amp, number)
            expected = [amax for roles in plain.known.values() for amax in map(plain.takes, roles.values())]
            for now, amax, _ in given:
                assert amax in expected or (amax == now and 0.0 in expected)
            # The checkpoint's weight and input are written down once more, and no gradient is twice.
            assert len(given) == (8 if model.is_whole else 5)
            model.is_whole = True
        elif action == "eval":
            model.eval()(batch(number))
            model.train()
        elif action == "no_grad":
            with torch.no_grad(), amp.autocast():
                model(batch(number))
        elif action == "clear":
            amp.zero_grad(set_to_none=draw.random() < 0.5)
            plain.clear()
        elif action == "clear theirs":
            optimizer.zero_grad()
        elif engine_of(amp).windows[0].now.passes and model.again.weight.grad is not None:
            skips = action == "skipped step"
            if skips:
                model.first.weight.grad.fill_(float("inf"))
            assert bool(amp.step().skipped) == skips
            amp.zero_grad()
            plain.step(skips)
        assert histories(amp) == plain.histories
    assert any(known[-1] for roles in plain.known.values() for known in roles.values())


@pytest.mark.parametrize("window, known", [(2.0, 2.0), (0.0, 1.0), (float("inf"), 1.0), (float("nan"), 1.0)])
def test_what_a_step_has_not_seen_stays_what_it_was(window, known):
    history, window = torch.tensor([[[1.0, 4.0, 3.0]]]), torch.tensor([[window]])
    assert moved_on(history, window, torch.tensor(False)).tolist() == [[[known, 1.0, 4.0]]]
    assert moved_on(history, window, torch.tensor(True)).tolist() == history.tolist()


def test_a_loop_of_ones_own_moves_histories_as_five_lines_do():
    ends = []
    for is_attached in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        begin = mezzo.attach if is_attached else MixedPrecision
        amp = begin(model, optimizer, f"O1,dtype=bfloat16,{DELAYED}")
        for number in (1, 2, 4, 6):
            for scale in (64, 1):  # a pass that is given up, and the step's
                optimizer.zero_grad()
                if is_attached:
                    model(batch(number) * scale).float().square().mean().backward()
                else:
                    with amp.autocast():
                        loss = model(batch(number) * scale).float().square().mean()
                    amp.backward(loss)
            optimizer.step() if is_attached else amp.step()
        ends.append(histories(amp))
        if is_attached:
            amp.detach()
    assert ends[0] == ends[1]
    assert max(ends[0]["mid.weight"][0]) < 64


def test_gradients_that_the_session_clears_to_zeros_set_no_scale():
    model, _, amp = session()
    for scale in (64, 1):
        amp.zero_grad(set_to_none=False)
        with amp.autocast():
            loss = model(batch(1) * scale).float().square().mean()
        amp.backward(loss)
    amp.step()
    assert max(histories(amp)["mid.weight"][0]) < 64


def test_what_lies_beyond_the_history_saturates_and_is_no_nan(monkeypatch):
    model, _, amp = session()
    train(model, amp, 1)
    seen = []
    monkeypatch.setattr(
        operands, "quantized", lambda *a, real=operands.quantized, **k: seen.append(real(*a, **k)) or seen[-1]
    )
    with amp.autocast():
        loss = model(batch(1) * 1024).float().square().mean() * 1024
    amp.backward(loss)
    assert {float(operand.values.float().abs().max()) for operand in seen} >= {448.0, 57344.0}
    assert all(bool(operand.values.float().isfinite().all()) for operand in seen)
    assert not bool(amp.step().skipped)
    amp.zero_grad()
    with amp.autocast():
        loss = model(torch.full((32, 32), float("nan"))).float().sum()
    amp.backward(loss)
    before = histories(amp)
    assert bool(amp.step().skipped)
    assert histories(amp) == before


def test_two_optimizers_and_two_models_keep_histories_of_their_own():
    one, other = network(), network(lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, other)]
    amp = MixedPrecision([one, other], optimizers, f"O1,dtype=bfloat16,{DELAYED}")
    with amp.autocast():
        loss = other(one(batch(1))).float().square().mean()
    amp.backward(loss)
    amp.step()
    amp.zero_grad()
    amaxes = histories(amp)
    assert {*amaxes} == {"0.mid.weight", "0.again.weight", "1.1.weight"}
    for name, weight in (("0.mid.weight", one.mid.weight), ("1.1.weight", other[1].weight)):
        assert amaxes[name][1][1:] == [0.0] * (LENGTH - 1)
        assert amaxes[name][1][0] == pytest.approx(float(weight.detach().abs().max()), rel=0.01)
    assert len(amp.state_dict()["products"]["draws"]) == 2


def test_each_draw_of_noise_is_another_one_and_the_sessions_own():
    model, _, amp = session(NVFP4)
    generator = torch.get_rng_state()
    memory = weights_of(amp).memories()[0]
    memory.counts = True  # as in a backward pass of the session
    drawn = [int(memory.draw(torch.device("cpu"))) for _ in range(100)]
    assert len({*drawn}) == 100
    steps = {(b - a) % 2**32 for a, b in itertools.pairwise(drawn)}
    assert len(steps) == 99  # noise of numbers in a row would be that of the draw before, an element further
    train(model, amp, 1)
    assert amp.state_dict()["products"]["draws"] == [104]  # two layers, each along two dimensions
    assert torch.equal(torch.get_rng_state(), generator)


# Saved and loaded ----------------------------------------------------------------------------------------------------

LEVELS = ["O1,dtype=bfloat16", "O2,dtype=bfloat16", "O2,dtype=float16,loss_scale=dynamic(init=1024,interval=2)"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("text", [DELAYED, f"fp8_amax=latest,{DELAYED}", NVFP4])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(text, level):
    model, optimizer, amp = session(text, level)
    for number in range(3):
        train(model, amp, number)
    saved = on_disk(model, optimizer, amp)
    on = [train(model, amp, number) for number in range(3, 8)]
    again = session(text, level)
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    assert [train(again[0], again[2], number) for number in range(3, 8)] == on
    assert bits(again[0].state_dict()) == bits(model.state_dict())
    assert bits(again[2].state_dict()) == bits(amp.state_dict())
    fresh = session(text, level)
    fresh[0].load_state_dict(saved[0])
    fresh[1].load_state_dict(saved[1])
    assert [train(fresh[0], fresh[2], number) for number in range(3, 8)] != on  # the session's state is needed


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_distributed_checkpoints_hold_what_is_remembered(tmp_path):
    model, _, amp = session()
    train(model, amp, 1)
    train(model, amp, 2)
    dcp.save({"amp": amp}, checkpoint_id=tmp_path, no_dist=True)
    _, _, other = session()
    dcp.load({"amp": other}, checkpoint_id=tmp_path, no_dist=True)
    assert histories(other) == histories(amp)


def test_a_state_without_histories_lets_all_begin_anew_and_one_with_them_is_taken_by_a_session_without():
    model, _, amp = session()
    train(model, amp, 1)
    without = session("low=linear@first")[2]
    without.load_state_dict(amp.state_dict())
    assert "products" not in without.state_dict()
    amp.load_state_dict(without.state_dict())
    assert all(value == 0.0 for history in histories(amp).values() for entry in history for value in entry)
    model, _, amp = session(NVFP4)
    train(model, amp, 1)
    amp.load_state_dict(without.state_dict())
    assert amp.state_dict()["products"]["draws"] == [0]


def test_histories_of_another_length_are_refused_with_the_text_that_takes_them():
    model, _, amp = session()
    train(model, amp, 1)
    other = session(DELAYED.replace("history=4", "history=5"))[2]
    with refused(StateError, "the amax histories of the state have another length", "fp8_history=4 → 5",
                 "policy.evolve(fp8_history=4), the text fp8_history=4", parts=[other]):  # fmt: skip
        other.load_state_dict(amp.state_dict())


def changed(**histories):
    return lambda state: state["products"]["histories"].update(
        {f"{name}.weight": history for name, history in histories.items()}
    )


DAMAGES = {
    "one of another length": changed(again=torch.zeros(3, 5)),
    "one step for all": changed(again=torch.ones(3, 1)),
    "no steps": changed(mid=torch.zeros(3, 0), again=torch.zeros(3, 0)),
    "other operands": changed(mid=torch.zeros(2, 4)),
    "another dtype": changed(mid=torch.zeros(3, 4, dtype=torch.int64)),
    "complex": changed(mid=torch.zeros(3, 4, dtype=torch.complex64)),
    "sparse": changed(mid=torch.zeros(3, 4).to_sparse()),
    "without values": changed(mid=torch.zeros(3, 4, device="meta")),
    "NaN": changed(mid=torch.full((3, 4), float("nan"))),
    "infinite": changed(mid=torch.full((3, 4), float("inf"))),
    "negative": changed(mid=torch.full((3, 4), -1.0)),
    "a list": changed(mid=[[0.0] * 4] * 3),
    "none": lambda state: state.update(products=None),
    "no draws": lambda state: state["products"].pop("draws"),
    "no histories": lambda state: state["products"].pop("histories"),
    "negative draws": lambda state: state["products"].update(draws=[-1]),
    "draws without end": lambda state: state["products"].update(draws=[2**70]),
    "half a draw": lambda state: state["products"].update(draws=[0.5]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_state_changes_nothing(name):
    model, _, amp = session()
    train(model, amp, 1)
    state = amp.state_dict()
    DAMAGES[name](state)
    train(model, amp, 2)
    before = bits(amp.state_dict())
    with pytest.raises(StateError):
        amp.load_state_dict(state)
    assert bits(amp.state_dict()) == before


def test_weights_that_pruning_has_taken_away_are_scaled_by_themselves():
    model, _, amp = session()
    prune.l1_unstructured(model.mid, "weight", 0.5)
    train(model, amp, 1)
    amaxes = histories(amp)
    assert {*amaxes} == {"again.weight"}
    assert amaxes["again.weight"][0][0] > 0


@pytest.mark.parametrize("text", [DELAYED, NVFP4])
def test_a_captured_step_moves_histories_and_draws_as_others_do(text):
    runs = []
    for captures in (False, True):
        model, _, amp = session(text, optimizer=lambda params, lr: optim.AdamW(params, lr=lr))

        def step(x, model=model, amp=amp):
            with amp.autocast():
                loss = model(x).float().square().mean()
            amp.backward(loss)
            taken = amp.step()
            amp.zero_grad()
            return loss.detach(), taken.skipped

        with predicated():
            called = Captured(step, amp, HostGraph()) if captures else step
            for number in range(8):
                x = batch(number) * (float("inf") if number == 5 else 1.0)
                loss, skipped = called(x)
                assert bool(skipped) == (number == 5)
        runs.append((loss, amp.state_dict()["products"], model.state_dict()))
    assert bits(runs[0]) == bits(runs[1])
    assert runs[0][1]["draws"] == ([0] if text == DELAYED else [32])
