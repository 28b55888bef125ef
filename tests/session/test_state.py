"""A session's state: what is loaded continues bit for bit, under another policy too, or is refused."""

import copy
import io
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import LossScale, MixedPrecision, NumericsError, ScaleCollapsed, StateError, optim
from mezzo.session.window.window import Window

DYNAMIC = "dynamic(init=1024,interval=3)"
POLICIES = {
    "O0": "O0",
    "O1 fp16": f"O1,dtype=float16,emulate=true,loss_scale={DYNAMIC}",
    "O1 bf16": "O1,dtype=bfloat16,emulate=true",
    "O2 fp16": f"O2,dtype=float16,emulate=true,loss_scale={DYNAMIC}",
    "O2 bf16": "O2,dtype=bfloat16,emulate=true",
    "O3 fp16": "O3,dtype=float16,emulate=true",
    "O3 bf16": "O3,dtype=bfloat16,emulate=true",
}
EXACT = [name for name in POLICIES if not name.startswith("O3")]  # those that stand for FP32 weights
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4, fused=True),
}


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6) / 8)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens) + self.table))


class Run:
    """Two models, of which one has tied weights and batch norm, two optimizers and two losses."""

    def __init__(self, policy, optimizer="sgd", *, seed=0, num_losses=2, **options):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.trunk, self.tail = Trunk(), nn.Linear(11, 3)
        self.one, self.two = (
            OPTIMIZERS[optimizer](self.trunk.parameters()),
            OPTIMIZERS[optimizer](self.tail.parameters()),
        )
        policy = POLICIES.get(policy, policy)
        self.amp = MixedPrecision(
            [self.trunk, self.tail], [self.one, self.two], policy, num_losses=num_losses, max_grad_norm=1.0, **options
        )
        self.parts = {"trunk": self.trunk, "tail": self.tail, "one": self.one, "two": self.two, "amp": self.amp}

    def losses(self, number):
        generator = torch.Generator().manual_seed(number)
        tokens, target = (torch.randint(0, n, (8,), generator=generator) for n in (11, 3))
        with self.amp.autocast():
            hidden = self.trunk(tokens)
            first, second = (
                functional.cross_entropy(hidden, tokens),
                functional.cross_entropy(self.tail(hidden), target),
            )
        # Every fifth batch overflows on its way back, while the loss itself stays finite.
        return first * (1e36 if number % 5 == 4 else 1), second

    def backward(self, number, loss_id=None):
        first, second = self.losses(number)
        if loss_id is None:
            self.amp.backward(first + second)
        else:
            self.amp.backward((first, second)[loss_id], loss_id=loss_id)

    def train(self, numbers):
        for number in numbers:
            self.backward(2 * number, 0)
            self.backward(2 * number + 1, 1)
            self.amp.step()
            self.amp.zero_grad()

    def saved(self):
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load(self, saved, order=None):
        saved = copy.deepcopy(saved)  # torch's optimizers go on in the tensors that they load
        for name in order or self.parts:
            self.parts[name].load_state_dict(saved[name])

    def everything(self):
        """What loading may change, and what a refusal may not."""
        tensors = [t for m in (self.trunk, self.tail) for t in m.parameters()] + list(self.amp.master_params())
        return self.saved(), [None if t.grad is None else t.grad for t in tensors]

    def fp32(self):
        """The weights that an optimizer updates, in FP32, by name."""
        names = [
            f"{n}.{name}" for n, model in enumerate((self.trunk, self.tail)) for name, _ in model.named_parameters()
        ]
        return dict(zip(names, self.amp.master_params(), strict=True))


def through_a_file(saved):
    """As the next process reads it."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


#: The orders of loading a model, an optimizer and a session; the second of each kind follows the first.
ORDERS = [
    [
        name
        for kind in order
        for name in {"model": ("trunk", "tail"), "optimizer": ("one", "two"), "amp": ("amp",)}[kind]
    ]
    for order in itertools.permutations(("model", "optimizer", "amp"))
]


# Continuing under the same policy -------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_steps_after_loading_are_the_same_in_whatever_order(policy, optimizer, bits):
    run = Run(policy, optimizer)
    run.train(range(4))
    saved, saved_with_gradients = through_a_file(run.saved()), copy.deepcopy(run.everything())
    run.train(range(4, 14))
    stats = [run.amp.stats(loss_id) for loss_id in (0, 1)]
    assert stats[0].steps == 14
    if "fp16" in policy:
        assert stats[0].skipped >= 2
    for order in ORDERS:
        again = Run(policy, optimizer, seed=1)
        again.load(saved, order)
        assert bits(again.everything()) == bits(saved_with_gradients)
        if order in (ORDERS[0], ORDERS[-1]):
            again.train(range(4, 14))
            assert bits(again.everything()) == bits(run.everything())
            assert [again.amp.stats(loss_id) for loss_id in (0, 1)] == stats


def two_micro_batches(run):
    run.backward(100)
    run.backward(101)


def set_aside(run):
    run.backward(100, 0)
    run.backward(101, 1)
    run.backward(102, 0)


def set_aside_with_an_overflow(run):
    run.backward(104, 0)
    run.backward(101, 1)


def unscaled(run):
    run.backward(100)
    run.amp.unscale_()


def unscaled_edited_and_more(run):
    two_micro_batches(run)
    run.amp.unscale_()
    with torch.no_grad():
        for param in run.amp.master_params():
            param.grad.clamp_(-1e-2, 1e-2)
    run.backward(102)


def one_optimizer_has_stepped(run):
    """The other's gradients carry a scale that is not the current one, though it may have the same value."""
    run.backward(100, 1)
    run.amp.step(run.one)


def both_carry_an_old_scale(run):
    run.backward(100, 1)
    run.amp.step(run.one)
    for param in run.trunk.parameters():
        param.grad = None
    run.backward(101, 1)


def a_gradient_on_the_way(run):
    """``grad`` overflowed, which the next step's scale has to hear of."""
    first, second = run.losses(103)
    run.amp.grad(first * 1e36, run.trunk.norm.weight, retain_graph=True)
    run.amp.backward(second)


WINDOWS = [
    two_micro_batches, set_aside, set_aside_with_an_overflow, unscaled, unscaled_edited_and_more,
    one_optimizer_has_stepped, both_carry_an_old_scale, a_gradient_on_the_way,
]  # fmt: skip


@pytest.mark.parametrize("open_window", WINDOWS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_window_continues_where_it_was_saved(policy, open_window, bits):
    run = Run(policy, restore_buffers=True)
    run.train(range(3))
    open_window(run)
    before = bits(run.everything())
    saved = through_a_file(run.saved())
    assert bits(run.everything()) == before  # saving changes nothing

    def finish(each):
        if open_window in (one_optimizer_has_stepped, set_aside):
            each.one.zero_grad()  # what it left, or what is set aside as well
        if open_window not in (unscaled, a_gradient_on_the_way):
            each.backward(200, 1)
        each.amp.step()
        each.amp.zero_grad()
        each.train(range(3, 8))

    finish(run)
    for order in ORDERS:
        again = Run(policy, seed=1, restore_buffers=True)
        again.load(saved, order)
        assert bits(again.everything()) == before
        if order in (ORDERS[0], ORDERS[-1]):
            finish(again)
            assert bits(again.everything()) == bits(run.everything())


@pytest.mark.parametrize("policy", ["O1 fp16", "O2 fp16", "O2 bf16"])
def test_sparse_gradients_in_a_window(policy, bits):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, MixedPrecision(model, optimizer, POLICIES[policy])

    def backward(model, amp, number):
        with amp.autocast():
            loss = model(torch.arange(number, number + 3)).square().mean()
        amp.backward(loss)

    model, optimizer, amp = build()
    backward(model, amp, 1)
    saved = through_a_file([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    again = build()
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    for each, session in ((model, amp), (again[0], again[2])):
        backward(each, session, 3)
        session.step()
    assert bits(model.state_dict()) == bits(again[0].state_dict())
    assert bits(amp.state_dict()) == bits(again[2].state_dict())


def test_batch_norm_is_put_back_to_before_the_window_it_was_saved_in(bits):
    run = Run("O1 fp16", restore_buffers=True)
    before = bits(run.trunk.norm.state_dict())
    run.backward(100)
    saved = through_a_file(run.saved())
    assert bits(run.trunk.norm.state_dict()) != before
    again = Run("O1 fp16", seed=1, restore_buffers=True)
    again.load(saved)
    again.backward(104)  # overflows
    assert again.amp.step().skipped
    assert bits(again.trunk.norm.state_dict()) == before


def test_loading_goes_back_in_time_within_one_session(bits):
    """As after a divergence: nothing of what happened since may stay."""
    run = Run("O2 fp16", restore_buffers=True)
    run.train(range(2))
    two_micro_batches(run)
    saved, before = through_a_file(run.saved()), bits(run.everything())
    run.amp.step()
    run.amp.zero_grad()
    run.train(range(2, 9))
    run.losses(0)
    run.amp.grad(run.losses(4)[0] * 1e36, run.trunk.norm.weight)
    run.load(saved)
    assert bits(run.everything()) == before


def test_a_state_shares_no_memory_with_the_session(bits):
    run = Run("O2 fp16", restore_buffers=True)
    set_aside(run)
    state = run.amp.state_dict()
    before = bits(state)
    again = Run("O2 fp16", seed=1, restore_buffers=True)
    again.amp.load_state_dict(state)
    for each in (run, again):
        each.backward(5, 0)
        each.amp.step()
        each.amp.zero_grad()
        each.train(range(3))
    assert bits(state) == before


def test_every_field_of_a_window_is_saved():
    saved = Window().state_dict(name_of=lambda tensor: "", number_of=lambda scale: 0)
    named = {"unscaled_sums": "aside", "new_gradients": "beside"}  # as states have called them from the first
    assert saved.keys() == {named.get(field, field) for field in vars(Window())}


def test_an_edited_weight_is_not_overwritten():
    """The FP32 weights come with the model; what its user did to them since stays."""
    run, other = linear("O1 fp16"), linear("O2 fp16")
    other.model.load_state_dict(run.model.state_dict())
    with torch.no_grad():
        other.model.weight[0, 0] = 5.0
    other.amp.load_state_dict(run.amp.state_dict())
    assert other.model.weight[0, 0] == 5.0
    assert next(other.amp.master_params())[0, 0] == 5.0


@pytest.mark.parametrize("state", [{"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}, None])
def test_a_loaded_scale_knows_nothing_of_overflows_before(state):
    run = linear("O1 fp16")
    state = run.amp.state_dict() if state is None else state
    with run.amp.autocast():
        loss = run.model(torch.ones(1, 4)).float().sum()
    run.amp.grad(loss * 1e38, run.model.bias)
    run.amp.load_state_dict(state)
    before = float(run.amp.loss_scale)
    one_step(run)
    assert float(run.amp.loss_scale) == before


def test_parameters_of_no_model_are_refused_where_they_would_be_lost():
    for policy, dtype, window, refused in (
        ("O1 fp16", torch.float32, False, False),
        ("O1 fp16", torch.float32, True, True),
        ("O2 fp16", torch.float32, False, False),
        ("O2 fp16", torch.float16, False, True),
    ):
        run = linear(policy)
        run.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(5, dtype=dtype))]})
        one_step(run, finish=not window)
        if not refused:
            run.amp.load_state_dict(run.amp.state_dict())
            continue
        with pytest.raises(StateError, match=r"belong to no model of the session\n  where  float32 \[5\]\n"):
            run.amp.state_dict()


@pytest.mark.parametrize("error, poison", [(ScaleCollapsed, "gradients"), (NumericsError, "loss")])
def test_patience_goes_on_counting(error, poison):
    state = None
    for _ in range(3):  # a process for each step
        run = linear("O1,emulate=true,loss_scale=dynamic(init=1,patience=3)")
        if state is not None:
            run.amp.load_state_dict(state)
        with run.amp.autocast():
            loss = run.model(torch.ones(1, 4)).float().sum()
        run.amp.backward(loss * float("inf") if poison == "loss" else loss)
        if poison == "gradients":
            run.model.weight.grad.fill_(float("inf"))
        run.amp.step()
        state = through_a_file(run.amp.state_dict())
    with pytest.raises(error, match="3 overflows in a row" if poison == "gradients" else "for 3 steps in a row"):
        run.amp.step()


def test_gradients_that_a_step_left_are_refused_after_loading_too():
    run = Run("O1 fp16")
    one_optimizer_has_stepped(run)
    again = Run("O1 fp16", seed=1)
    again.load(through_a_file(run.saved()))
    for each in (run, again):
        with pytest.raises(StateError, match="the last step's gradients are still there"):
            each.backward(0, 0)


def test_edits_of_scaled_gradients_are_noticed_after_loading_too(caplog):
    caplog.set_level("INFO", logger="mezzo")
    run = Run("O1 fp16")
    run.backward(100)
    again = Run("O1 fp16", seed=1)
    again.load(through_a_file(run.saved()))
    nn.utils.clip_grad_norm_([*again.trunk.parameters(), *again.tail.parameters()], 1.0)
    again.amp.max_grad_norm = None
    again.amp.step()
    assert "gradients were edited while they still carry the loss scale" in caplog.text


# Continuing under another policy ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])  # with 0, fresh masters round to most of the saved weights
@pytest.mark.parametrize("before, after", [*itertools.permutations(EXACT, 2)])
def test_fp32_weights_and_optimizer_state_survive_a_change_of_policy(before, after, seed, bits):
    run = Run(before, "adamw")
    run.train(range(3))
    saved, weights = through_a_file(run.saved()), bits(run.fp32())
    assert all(weight.dtype == torch.float32 for weight in run.fp32().values())
    ends = set()
    for order in ORDERS:
        again = Run(after, "adamw", seed=seed)
        again.load(saved, order)
        assert bits(again.fp32()) == weights
        assert bits([again.one.state_dict(), again.two.state_dict()]) == bits([saved["one"], saved["two"]])
        for model in (again.trunk, again.tail):  # and the model computes with these very weights
            rounded = {
                name: again.fp32()[f"{int(model is again.tail)}.{name}"].to(p.dtype)
                for name, p in model.named_parameters()
            }
            assert bits(rounded) == bits(dict(model.named_parameters()))
        if "fp16" in before and "fp16" in after:
            assert again.amp.state_dict()["loss_scales"] == saved["amp"]["loss_scales"]
            assert again.amp.stats() == run.amp.stats()
        else:
            fresh = LossScale.parse(DYNAMIC if "fp16" in after else None).start().state_dict()
            assert again.amp.state_dict()["loss_scales"] == [fresh, fresh]
            now, then = again.amp.stats(), run.amp.stats()
            assert (now.steps, now.skipped) == (then.steps, then.skipped)
            assert (now.growths, now.backoffs) == (0, 0)
            assert now.lowest_scale == now.highest_scale == now.scale
        ends.add(str(bits(again.everything())))
    assert len(ends) == 1
    again.train(range(3, 4))


def test_a_chain_of_policies_loses_nothing(bits, caplog):
    """FP32 → O1 → O2 → O1 → FP32, as processes that only load and save."""
    run = Run("O0", "adamw")
    run.train(range(3))
    start, weights = run.saved(), bits(run.fp32())
    saved = start
    for number, policy in enumerate(["O1 fp16", "O2 bf16", "O2 fp16", "O1 bf16", "O0"]):
        run = Run(policy, "adamw", seed=number)
        with caplog.at_level(logging.INFO, logger="mezzo"):
            run.load(through_a_file(saved), ORDERS[number])
        saved = run.saved()
    assert "level: O1 → O0" in caplog.text
    assert bits(run.fp32()) == weights
    same = ("one", "two", "trunk", "tail")
    assert bits([saved[name] for name in same]) == bits([start[name] for name in same])
    run.train(range(3, 5))
    plain = Run("O0", "adamw", seed=7)
    plain.load(start)
    plain.train(range(3, 5))
    assert bits(run.fp32()) == bits(plain.fp32())


def test_the_step_count_goes_on_whatever_the_losses(bits):
    run = Run("O0", num_losses=2)
    run.train(range(3))
    again = Run("O1 bf16", num_losses=1)
    again.load(run.saved())
    assert again.amp.stats().steps == 3


@pytest.mark.parametrize(
    "before, after, scale",
    [
        ("dynamic(init=2**20)", "dynamic(ceiling=2**17)", 2.0**17),
        ("dynamic(init=1,floor=2**-9)", "dynamic(floor=64)", 64.0),
        ("dynamic(init=4096)", "dynamic(init=16,skip_rate_limit=0.5,interval=9)", 4096.0),
        ("dynamic(init=4096,skip_rate_limit=0.5,interval=9)", "dynamic", 4096.0),
        ("constant(128)", "constant(1024)", 1024.0),
        ("constant(128)", "dynamic(init=16)", 16.0),
        ("dynamic(init=16)", "constant(128)", 128.0),
    ],
)
def test_a_loss_scale_under_other_rules(before, after, scale):
    run = Run(f"O1,emulate=true,loss_scale={before}")
    run.train(range(1))
    again = Run(f"O1,emulate=true,loss_scale={after}")
    again.train(range(3))  # which a fresh start forgets
    again.load(through_a_file(run.saved()))
    assert again.amp.loss_scale.tolist() == [scale, scale]
    again.train(range(3, 13))
    assert again.amp.stats().steps == 11


@pytest.mark.parametrize("order", ORDERS)
def test_o3_continues_as_o2_exactly(order, bits):
    for dtype in ("fp16", "bf16"):
        run = Run(f"O3 {dtype}")
        run.train(range(3))
        low = {name: param.float() for name, param in run.fp32().items()}
        for after in (f"O2 {dtype}", "O0", "O2 fp16"):
            again = Run(after)
            again.load(through_a_file(run.saved()), order)
            assert bits(again.fp32()) == bits({name: nn.Parameter(value) for name, value in low.items()})


def test_frozen_weights_follow_the_policy(bits):
    """What no optimizer updates has no master: the model's state dict and the policy say what it is."""

    def build(policy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        return model, optimizer, MixedPrecision(model, optimizer, policy)

    first = build("O1,emulate=true")
    second = build("O2,emulate=true")
    for part, mine in zip(first, second, strict=True):
        mine.load_state_dict(part.state_dict())
    assert torch.equal(second[0][0].weight, first[0][0].weight.half())
    assert bits([*second[2].master_params()]) == bits([*first[2].master_params()])


# What is refused ---------------------------------------------------------------------------------------


def linear(policy, *, width=3, bias=True, num_losses=1, optimizers=1, dtype=None):
    """A small session; returns its parts."""
    torch.manual_seed(0)
    model = nn.Linear(4, width, bias=bias).to(dtype or torch.float32)
    params = list(model.parameters())
    groups = [params] if optimizers == 1 else [params[:1], params[1:]]
    built = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups]
    amp = MixedPrecision(model, built, POLICIES.get(policy, policy), num_losses=num_losses)
    return SimpleNamespace(model=model, optimizers=built, amp=amp)


def one_step(run, *, finish=True):
    with run.amp.autocast():
        loss = run.model(torch.ones(2, 4)).square().mean()
    run.amp.backward(loss)
    if finish:
        run.amp.step()
        run.amp.zero_grad()


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


# Wrapped models ----------------------------------------------------------------------------------------


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
