"""``restore_buffers``: batch norm's statistics after a skipped step are those from before its first forward pass."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import MixedPrecision

from ..loops import Syncs

POLICIES = ["O0", "O1,emulate=true", "O2,emulate=true", "O2,dtype=bfloat16,emulate=true,keep_batchnorm_fp32=false"]
INF = float("inf")


class Network(nn.Module):
    """Three kinds of running statistics; the last counts its batches to average over all of them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norms = nn.Sequential(
            nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.SiLU()
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))

    def forward(self, x):
        return self.head(self.norms(self.conv(x)))


def batch(number, spoilt=False):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(8, 1, 5, 5, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    if spoilt:
        x[0, 0, 0, 0] = INF  # the forward pass itself is poisoned, and so are the statistics
    return x, y


def session(policy, restore_buffers=True, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return model, MixedPrecision(model, optimizer, policy, restore_buffers=restore_buffers, **options)


def forward(amp, model, number, spoilt=False):
    x, y = batch(number, spoilt)
    with amp.autocast():
        return functional.cross_entropy(model(x), y)


def train(amp, model, number, spoilt=False):
    amp.backward(forward(amp, model, number, spoilt))
    step = amp.step()
    amp.zero_grad()
    return step


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name, buffer in one.items():
        assert torch.equal(buffer, two[name]), name


def assert_all_differ(one, two):
    counts_never = "norms.1.num_batches_tracked"  # instance norm's, which torch leaves at 0
    assert {name for name, buffer in one.items() if torch.equal(buffer, two[name])} <= {counts_never}


# Restored, and not restored -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_skipped_step_leaves_the_statistics_of_before(policy):
    model, amp = session(policy)
    assert len(statistics(model)) == 9
    for first in range(2):
        assert not train(amp, model, first).skipped
        before = statistics(model)
        assert bool(train(amp, model, 7, spoilt=True).skipped)
        assert_same(statistics(model), before)


@pytest.mark.parametrize("policy", POLICIES)
def test_good_steps_keep_what_their_forward_passes_learnt(policy):
    (model, amp), (other, plain) = session(policy), session(policy, restore_buffers=False)
    for number in range(4):
        before = statistics(model)
        train(amp, model, number)
        train(plain, other, number)
        assert_same(statistics(model), statistics(other))
        assert_all_differ(statistics(model), before)


def test_off_by_default():
    with torch.random.fork_rng():
        model = Network()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1,emulate=true")
    before = statistics(model)
    assert bool(train(amp, model, 0, spoilt=True).skipped)
    assert_all_differ(statistics(model), before)
    assert model.norms[0].running_mean.isinf().any()


@pytest.mark.parametrize("poison", [0, 1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_accumulation_windows_are_restored_whole(policy, poison):
    model, amp = session(policy)
    train(amp, model, 0)
    before = statistics(model)
    for part in range(3):
        amp.backward(forward(amp, model, part, spoilt=part == poison) / 3)
    assert bool(amp.step().skipped)
    amp.zero_grad()
    assert_same(statistics(model), before)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_forward_passes_and_an_evaluation_between(policy):
    model, amp = session(policy)
    train(amp, model, 0)
    before = statistics(model)
    loss = forward(amp, model, 1)
    model.eval()
    with torch.no_grad():
        forward(amp, model, 2)
    model.train()
    amp.backward(loss + forward(amp, model, 3, spoilt=True))
    assert bool(amp.step().skipped)
    assert_same(statistics(model), before)


def test_an_evaluation_before_the_first_forward_pass():
    model, amp = session("O1,emulate=true")
    model.eval()
    with torch.no_grad():
        forward(amp, model, 2)
    assert not amp._core.buffers.before  # what does not train is not copied
    model.train()
    before = statistics(model)
    assert bool(train(amp, model, 0, spoilt=True).skipped)
    assert_same(statistics(model), before)


def test_layers_that_begin_to_train_inside_a_window():
    model, amp = session("O1,emulate=true")
    before = statistics(model)
    model.head.eval()
    amp.backward(forward(amp, model, 0))
    assert_same({n: b for n, b in statistics(model).items() if n.startswith("head")},
                {n: b for n, b in before.items() if n.startswith("head")})  # fmt: skip
    model.train()
    amp.backward(forward(amp, model, 1, spoilt=True))
    assert bool(amp.step().skipped)
    assert_same(statistics(model), before)


def test_a_gradient_that_overflows_alone_restores_too():
    model, amp = session("O1,emulate=true")
    train(amp, model, 0)
    before = statistics(model)
    amp.backward(forward(amp, model, 1))
    model.conv.weight.grad[0] = INF
    assert bool(amp.step().skipped)
    assert_same(statistics(model), before)


# However the loop is written ----------------------------------------------------------------------------


def clears_before_forward(amp, model, number, spoilt):
    amp.zero_grad()
    amp.backward(forward(amp, model, number, spoilt))
    return amp.step()


def clears_before_backward(amp, model, number, spoilt):
    loss = forward(amp, model, number, spoilt)
    amp.zero_grad()
    amp.backward(loss)
    return amp.step()


def clears_by_habit(amp, model, number, spoilt):
    loss = forward(amp, model, number, spoilt)
    amp._core.optimizers[0].zero_grad()
    amp.backward(loss)
    return amp.step()


@pytest.mark.parametrize("loop", [train, clears_before_forward, clears_before_backward, clears_by_habit])
@pytest.mark.parametrize("policy", POLICIES)
def test_wherever_gradients_are_cleared(policy, loop):
    model, amp = session(policy)
    for number in range(6):
        before = statistics(model)
        spoilt = number % 2 == 1
        assert bool(loop(amp, model, number, spoilt).skipped) == spoilt
        if spoilt:
            assert_same(statistics(model), before)
        else:
            assert_all_differ(statistics(model), before)


def test_a_region_may_be_made_once_and_entered_for_each_batch():
    model, amp = session("O1,emulate=true")
    region = amp.autocast()
    for number in range(4):
        before = statistics(model)
        x, y = batch(number, spoilt=number % 2 == 1)
        with region:
            loss = functional.cross_entropy(model(x), y)
        amp.backward(loss)
        assert bool(amp.step().skipped) == number % 2
        amp.zero_grad()
        if number % 2:
            assert_same(statistics(model), before)


def test_a_region_may_decorate_a_function():
    model, amp = session("O1,emulate=true")

    @amp.autocast()
    def loss_of(x, y):
        return functional.cross_entropy(model(x), y)

    for number in range(4):
        before = statistics(model)
        amp.backward(loss_of(*batch(number, spoilt=number % 2 == 1)))
        assert bool(amp.step().skipped) == number % 2
        amp.zero_grad()
        if number % 2:
            assert_same(statistics(model), before)


def test_a_batch_that_the_user_drops_counts_as_seen():
    """Whoever clears gradients of a window has decided: later skips go back to after it, not to before."""
    model, amp = session("O1,emulate=true")
    amp.backward(forward(amp, model, 0))
    amp.zero_grad()
    before = statistics(model)
    assert bool(train(amp, model, 1, spoilt=True).skipped)
    assert_same(statistics(model), before)


def test_closures_are_restored_to_before_the_first_evaluation():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Network()
    amp = MixedPrecision(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), "O1,emulate=true",
                         restore_buffers=True)  # fmt: skip
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        amp.zero_grad()
        loss = forward(amp, model, 0, spoilt=evaluations % 3 == 2)
        amp.backward(loss)
        return loss

    before = statistics(model)
    assert bool(amp.step(closure=closure).skipped)
    assert evaluations == 2
    assert_same(statistics(model), before)


def test_several_models():
    (one, _), (two, _) = session("O0"), session("O0")
    one, two = copy.deepcopy(one), copy.deepcopy(two)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
    amp = MixedPrecision([one, two], optimizers, "O1,emulate=true", restore_buffers=True)
    before = statistics(one), statistics(two)
    amp.backward(forward(amp, one, 0) + forward(amp, two, 1, spoilt=True))
    assert bool(amp.step().skipped)
    amp.zero_grad()
    assert_same(statistics(one), before[0])
    assert_same(statistics(two), before[1])
    amp.backward(forward(amp, one, 0) + forward(amp, two, 1))
    assert not amp.step().skipped
    assert_all_differ(statistics(two), before[1])


def test_an_explained_step_is_restored_as_well(caplog):
    model, amp = session("O1,emulate=true", on_overflow="explain")
    before = statistics(model)
    step = train(amp, model, 0, spoilt=True)
    assert bool(step.skipped)
    assert step.overflow is not None
    assert_same(statistics(model), before)


def test_a_compiled_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.compile(Network(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = MixedPrecision(model, optimizer, "O1,dtype=bfloat16,lists=device,emulate=false", restore_buffers=True)
    assert not train(amp, model, 0).skipped
    before = statistics(model)
    assert bool(train(amp, model, 1, spoilt=True).skipped)
    assert_same(statistics(model), before)


# Costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_costs_no_host_sync(policy, spoilt):
    (model, amp), (other, plain) = session(policy), session(policy, restore_buffers=False)
    counts = []
    for net, each in ((model, amp), (other, plain)):
        train(each, net, 0)
        with Syncs() as syncs:
            train(each, net, 1, spoilt)
        counts.append(syncs.count)
    assert counts[0] == counts[1]
    assert counts[0] <= 1  # momentum=None averages by a count that torch reads


def test_nothing_is_kept_between_steps():
    model, amp = session("O1,emulate=true")
    train(amp, model, 0)
    assert not amp._core.buffers.before
