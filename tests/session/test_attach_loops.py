"""Plain loops while a session is attached: when a backward pass has ended, gradients are FP32, unscaled and checked."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.session.observers import watching

from ..support.tables import pairwise, thinned
from .loops import (
    EVERY,
    FP32,
    INF,
    LOW,
    NAN,
    O3,
    OPTIMIZERS,
    Weights,
    assert_near,
    assert_same,
    attached,
    batch,
    built,
    facts,
    gradients,
    loss_of,
    network,
    spoil,
    train_plainly,
    weights,
)  # fmt: skip
from .test_windows import Fails

BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 22}


def assert_true(found, expected, policy):
    """Gradients are those of plain FP32: bit for bit at O0, else up to some ten roundings."""
    if policy in FP32:
        return assert_same(found, expected)
    mine, true = (torch.cat([g.flatten().float() for g in each]) for each in (found, expected))
    bits = BITS[mezzo.Policy.parse(policy).dtype]
    assert torch.linalg.vector_norm(mine - true) < 10 * 2.0**-bits * torch.linalg.vector_norm(true)
    return None


def assert_trained(found, plain, start, policy, optimizer):
    """Weights are those of plain FP32: bit for bit at O0, else by a share of the way."""
    if policy in FP32:
        assert_same(found, [p.detach() for p in plain.parameters()])
    assert_near(found, list(plain.parameters()), start, share=0.35 if optimizer != "SGD" else 0.1)


# What a pass leaves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, optimizer", thinned([*EVERY, *O3], OPTIMIZERS, every=2))
def test_gradients_are_fp32_unscaled_and_true_after_each_pass(policy, optimizer):
    model, made = built(optimizer)
    plain = network()
    with attached(model, made, policy):
        for number in range(3):
            loss_of(model, number).backward()
            loss_of(plain, number).backward()
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            assert_true(gradients(model), gradients(plain), policy)


#: What programs do to gradients between ``backward`` and ``step``.
EDITS = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "data.clamp_": lambda model: [p.grad.data.clamp_(-0.01, 0.01) for p in model.parameters()],
    "assigned": lambda model: [setattr(p, "grad", p.grad * 0.5) for p in model.parameters()],
    "assigned low": lambda model: [setattr(p, "grad", p.grad.to(p.dtype)) for p in model.parameters()],
    "dropped": lambda model: setattr(model[0].bias, "grad", None),
    "noise": lambda model: [
        p.grad.add_(torch.randn(p.grad.shape, generator=torch.Generator().manual_seed(5)), alpha=0.01)
        for p in model.parameters()
    ],
}


@pytest.mark.parametrize("policy, optimizer, edit", thinned(EVERY, OPTIMIZERS, EDITS, every=8))
def test_loops_that_edit_gradients_are_those_of_plain_torch(policy, optimizer, edit):
    model, made = built(optimizer)
    plain, theirs = built(optimizer)
    start = copy.deepcopy(list(plain.parameters()))
    with attached(model, made, policy) as amp:
        for number in range(4):
            train_plainly(model, made, number, edit=EDITS[edit])
            train_plainly(plain, theirs, number, edit=EDITS[edit])
        assert (amp.stats().steps, amp.stats().skipped) == (4, 0)
        found = weights(amp)
    assert_trained(found, plain, start, policy, optimizer)


@pytest.mark.parametrize("policy", EVERY)
def test_what_a_clipping_function_returns_is_the_true_norm(policy):
    model, made = built()
    plain = network()
    with attached(model, made, policy):
        loss_of(model, 0).backward()
        loss_of(plain, 0).backward()
        norms = [nn.utils.get_total_norm([p.grad for p in net.parameters()]) for net in (model, plain)]
        assert norms[0] == pytest.approx(float(norms[1]), rel=0 if policy in FP32 else 0.05)
        spoil(model)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("policy", EVERY)
def test_what_a_pass_has_found_is_skipped_whatever_is_done_to_gradients_after(policy):
    """An infinity that is clipped to a number trains in torch; here it was found when the pass ended."""
    for mend in (EDITS["clip_grad_value_"], lambda model: [p.grad.nan_to_num_(0, 0, 0) for p in model.parameters()]):
        model, made = built()
        with attached(model, made, policy) as amp:
            train_plainly(model, made, 0)
            before = weights(amp)
            out = model(batch(1)[0])
            (out * torch.full_like(out, INF).masked_fill_(torch.rand_like(out) > 0.5, 1.0)).sum().backward()
            mend(model)
            made.step()
            assert bool(amp.last_step.skipped)
            assert_same(before, weights(amp))
            made.zero_grad()
            train_plainly(model, made, 2)
            assert amp.stats().skipped == 1


@pytest.mark.parametrize("policy", EVERY)
def test_what_one_pass_has_found_is_skipped_with_the_next_ones(policy):
    """The loss is finite, and so are gradients by the time that the next pass adds to them."""
    model, made = built()
    with attached(model, made, policy) as amp:
        before = weights(amp)
        out = model(batch(1)[0])
        out.register_hook(lambda gradient: gradient * INF)
        out.sum().backward()
        for param in model.parameters():
            param.grad.nan_to_num_(0, 1, -1)
        loss_of(model, 2).backward()
        made.step()
        assert bool(amp.last_step.skipped)
        assert_same(before, weights(amp))


@pytest.mark.parametrize("policy", [policy for policy in EVERY if not policy.startswith("O2")])
def test_optimizers_of_the_same_weights_that_step_by_turns_skip_what_was_found_alike(policy):
    model = network()
    pair = [OPTIMIZERS[name](model.parameters()) for name in ("SGD", "mezzo")]
    with attached(model, pair, policy) as amp:
        before = weights(amp)
        out = model(batch(1)[0])
        (out * torch.full_like(out, INF).masked_fill_(torch.rand_like(out) > 0.5, 1.0)).sum().backward()
        for param in model.parameters():
            param.grad.nan_to_num_(0, 1, -1)
        for optimizer in pair:
            optimizer.step()
            assert bool(amp.last_step.skipped)
        assert_same(before, weights(amp))
        model.zero_grad(set_to_none=False)
        for optimizer in pair:
            optimizer.step()
            assert not bool(amp.last_step.skipped)


@pytest.mark.parametrize("policy, poison", pairwise(EVERY, [INF, NAN]))
def test_losses_that_are_not_finite_are_skipped_and_leave_the_scale(policy, poison):
    model, made = built("AdamW")
    with attached(model, made, policy) as amp:
        train_plainly(model, made, 0)
        before, scale = facts(model, made), float(amp.loss_scale)
        (loss_of(model, 1) * poison).backward()
        made.step()
        made.zero_grad()
        assert_same(before, facts(model, made))
        assert (amp.stats().skipped, float(amp.loss_scale)) == (1, scale)
        train_plainly(model, made, 2)
        assert amp.stats().skipped == 1


def test_observers_are_told_losses_as_the_loop_has_them():
    """What a report shows, and what is judged as a loss that failed itself."""

    losses = []

    class Told:
        def begins(self, engine, scale):
            pass

        def judged(self, engine, judged):
            losses.extend(float(loss) for loss in judged.losses)

        def stepped(self, engine, step):
            pass

    model, made = built("AdamW")
    with watching(Told()), attached(model, made, "O1,fp16,loss_scale=dynamic(init=1024)") as amp:
        loss = loss_of(model, 0)
        loss.backward()
        made.step()
        assert losses == [loss.item()]
        made.zero_grad()
        (loss_of(model, 1) * 1e36).backward()  # finite, and times 1024 it is not: an overflow
        made.step()
        assert (amp.stats().skipped, float(amp.loss_scale)) == (1, 512)


# Windows of a loop's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, optimizer, parts", thinned(EVERY, OPTIMIZERS, [2, 3], every=4))
def test_accumulation(policy, optimizer, parts):
    model, made = built(optimizer)
    plain, theirs = built(optimizer)
    start = copy.deepcopy(list(plain.parameters()))
    with attached(model, made, policy, max_grad_norm=None) as amp:
        for number in range(3):
            train_plainly(model, made, number, micro_batches=parts)
            train_plainly(plain, theirs, number, micro_batches=parts)
        found = weights(amp)
    assert_trained(found, plain, start, policy, optimizer)


@pytest.mark.parametrize("policy", EVERY)
def test_gradients_that_are_never_cleared_add_up_as_in_plain_torch(policy):
    ends = []
    for own in (True, False):
        model, made = built()
        with attached(model, made, policy) if own else contextlib.nullcontext():
            for number in range(3):
                loss_of(model, number).backward()
                made.step()
            ends.append([p.detach().float() for p in model.parameters()])
    if policy in FP32:
        assert_same(*ends)
    assert_near(*ends, list(network().parameters()), share=0.1)


@pytest.mark.parametrize("policy", EVERY)
def test_gradients_of_before_and_gradients_that_are_assigned_are_taken_as_they_are(policy):
    model, made = built(lambda p: torch.optim.SGD(p, lr=0.1))
    with attached(model, made, policy) as amp:
        before = weights(amp)
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        made.step()
        for was, now in zip(before, weights(amp), strict=True):
            torch.testing.assert_close(now, was - 0.05)
        made.zero_grad()
        before = weights(amp)
        for param in model.parameters():
            param.grad = torch.full_like(param, INF)
        made.step()
        assert_same(before, weights(amp))
    model, made = built()
    loss_of(model, 0).backward()
    with attached(model, made, "O0,loss_scale=1024"):
        loss_of(model, 1).backward()
        plain = network()
        loss_of(plain, 0).backward()
        loss_of(plain, 1).backward()
        assert_same(gradients(model), gradients(plain))


def test_a_step_without_gradients_does_nothing():
    for policy in EVERY:
        model, made = built()
        with attached(model, made, policy) as amp:
            before = weights(amp)
            made.step()
            assert amp.stats().steps == 0
            train_plainly(model, made, 0)
            made.step()
            assert amp.stats().steps == 1
            assert not all(map(torch.equal, before, weights(amp)))


# Which passes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O0,loss_scale=65536", "O1,dtype=bfloat16,emulate=true,loss_scale=1024"])
def test_a_pass_that_reaches_no_attached_parameter_is_untouched(policy):
    other, twin = network(), network()
    loss_of(twin, 3).backward()
    model, made = built()
    with attached(model, made, policy):
        loss_of(other, 3).backward()
        assert_same(gradients(other), gradients(twin))
        with torch.no_grad():
            x = model(batch(0)[0])
        leaf = torch.ones(3, requires_grad=True)
        (x.sum() + leaf.sum()).backward()
        assert torch.equal(leaf.grad, torch.ones(3))


@pytest.mark.parametrize("scale", [1024, 65536])
def test_leaves_that_no_optimizer_has_get_gradients_without_the_scale(scale):
    """Inputs, heads beside the model, parameters that are in no group: as plain torch."""

    def run(model, head, x):
        functional.cross_entropy(head(model(x)), batch(0)[1]).backward()
        return [x.grad, *gradients(head), *gradients(model)]

    with torch.random.fork_rng():
        torch.manual_seed(1)
        heads = [nn.Linear(3, 3) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    expected = run(network(), heads[0], batch(0)[0].requires_grad_())
    model = network()
    made = torch.optim.SGD(model[3].parameters(), lr=0.1)
    with attached(model, made, f"O0,loss_scale={scale}"):
        x = batch(0)[0].requires_grad_()
        assert_same(run(model, heads[1], x), expected)
        assert not x._backward_hooks
        run(model, heads[1], x)  # and a second time: they add up
        assert_same(x.grad, expected[0] * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_leaves_that_no_optimizer_has_are_unscaled_in_fp32(dtype):
    """1/3000 has an error of its own in sixteen bits."""
    model, made = built()
    factors = torch.linspace(-1.0, 1.0, 64)
    with attached(model, made, "O0,loss_scale=3000"):
        leaf = torch.zeros(64, dtype=dtype, requires_grad=True)
        (loss_of(model, 0) + (leaf.float() * factors).sum()).backward()
    over_scale = torch.tensor(1 / 3000, dtype=torch.float64).float()
    assert_same(leaf.grad, ((factors * 3000.0).to(dtype).float() * over_scale).to(dtype))


@pytest.mark.parametrize("policy", ["O0,loss_scale=8", "O1,dtype=bfloat16,emulate=true,loss_scale=64", *LOW])
def test_several_roots_parts_of_each_other_and_gradients_given_to_them(policy):
    def run(net):
        one, other = net(batch(0)[0]), net(batch(1)[0]).float().square().mean()
        torch.autograd.backward([one, other, other * 3], [torch.full_like(one, 0.25), None, None])
        return gradients(net)

    model, made = built()
    with attached(model, made, policy):
        found = run(model)
    assert_true(found, run(network()), "O0" if policy.startswith("O0") else policy)


@pytest.mark.parametrize("policy", ["O0,loss_scale=8", *LOW])
def test_inputs_and_retained_graphs_are_the_callers(policy):
    model, made = built()
    whole = network()
    loss_of(whole, 0).backward()
    with attached(model, made, policy):
        first, *_, last = model.parameters()
        loss = loss_of(model, 0)
        loss.backward(inputs=[first], retain_graph=True)
        assert [p.grad is not None for p in model.parameters()] == [True, *([False] * 5)]
        loss.backward(inputs=[last], retain_graph=True)
        assert_true([first.grad, last.grad], [gradients(whole)[0], gradients(whole)[-1]], policy)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        made.step()


@pytest.mark.parametrize("policy", ["O0,loss_scale=64", "O1,emulate=true,loss_scale=64", *LOW])
def test_gradients_that_are_only_returned_are_torchs_own(policy):
    """And a penalty made of them is differentiated again, as in WGAN-GP."""
    plain, x = network(), batch(0)[0].requires_grad_()
    (true,) = torch.autograd.grad(plain(x).sum(), x, create_graph=True)
    true.square().sum().backward()
    model, made = built()
    with attached(model, made, policy) as amp:
        x = batch(0)[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert_true([slope], [true], "O0" if policy.startswith("O0") else policy)
        slope.square().sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        expected = [p.grad for p in plain.parameters() if p.grad is not None]
        assert_true(found, expected, "O0" if policy.startswith("O0") else policy)
        made.step()
        assert not amp.last_step.skipped


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", EVERY)
def test_checkpoints_are_recomputed_in_the_region_and_change_no_bit(policy, reentrant):
    found = []
    for checkpoints in (True, False):
        model, made = built()
        with attached(model, made, policy):
            x, y = batch(0)
            x.requires_grad_()
            out = checkpoint(model, x, use_reentrant=reentrant) if checkpoints else model(x)
            functional.cross_entropy(out.float(), y).backward()
            found.append([x.grad, *gradients(model)])
    assert_same(*found)


class Functions(nn.Module):
    """Checkpoints of functions, in which nothing is a module that could enter a region."""

    def __init__(self, again):
        super().__init__()
        self.weight, self.again = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8)), again

    def forward(self, x, *, reentrant):
        def run(x):
            scores = functional.gelu(x @ self.weight).softmax(-1)
            return functional.layer_norm(scores @ self.weight, (8,)).tanh() / 8

        return checkpoint(run, x, use_reentrant=reentrant) if self.again else run(x)


class PartsInFunctions(Functions):
    """Checkpoints of functions that call several parts, none of which is called from outside the model."""

    def __init__(self, again):
        super().__init__(again)
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)
        for param in self.parameters():
            nn.init.uniform_(param, -1, 1, generator=torch.Generator().manual_seed(0))

    def forward(self, x, *, reentrant):
        def run(x):
            y = functional.silu(self.up(self.norm(x)))
            return (y.tanh() * y + y @ self.weight.to(y.dtype)) / 64

        return checkpoint(run, x, use_reentrant=reentrant) if self.again else run(x)


@pytest.mark.parametrize("kind", [Functions, PartsInFunctions])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", [*EVERY, "O1,bf16,emulate=true,low=softmax"])
def test_checkpointed_functions_are_recomputed_under_the_policy(policy, reentrant, kind):
    found = []
    for again in (True, False):
        model = kind(again)
        with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), policy):
            x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
            model(x, reentrant=reentrant).float().square().sum().backward()
            found.append([x.grad, *gradients(model)])
    assert_same(*found)


@pytest.mark.parametrize("policy", [*EVERY, *O3])
def test_a_pass_that_fails_leaves_nothing_behind(policy):
    ends = []
    for fails in (True, False):
        model, made = built()
        with attached(model, made, policy) as amp:
            loss_of(model, 0).backward()
            x = batch(0)[0].requires_grad_()
            if fails:
                with pytest.raises(RuntimeError, match="of the user's"):
                    Fails.apply(model(x)).sum().backward()
            assert not x._backward_hooks
            loss_of(model, 1).backward()
            made.step()
            ends.append((weights(amp), amp.stats()))
    assert_same(*ends)


@pytest.mark.parametrize("policy", [*EVERY, *O3])
def test_gradients_that_are_cleared_to_zeros_begin_anew(policy):
    ends = []
    for overflows in (True, False):
        model, made = built()
        with attached(model, made, policy) as amp:
            if overflows:
                (loss_of(model, 0) * float("inf")).backward()
                model.zero_grad(set_to_none=False)
            loss_of(model, 1).backward()
            made.step()
            ends.append((weights(amp), bool(amp.last_step.skipped)))
    assert_same(*ends)
    assert not ends[0][1]


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_gradients_are_differentiated_again_where_there_is_no_scale():
    def penalized(model, made):
        loss_of(model, 0).backward(create_graph=True)
        sum(param.grad.float().square().sum() for param in model.parameters()).backward()
        made.step()

    ends = []
    for policy in (None, "O0"):
        model, made = built()
        with contextlib.nullcontext() if policy is None else attached(model, made, policy):
            penalized(model, made)
            model.zero_grad()  # torch warns of the cycle otherwise
        ends.append(list(model.parameters()))
    assert_same(*ends)


@pytest.mark.parametrize("policy", ["O0", "O0,loss_scale=1024", "O1,dtype=bfloat16,emulate=true"])
def test_hooks_of_parameters_see_the_scale_and_one_warning_names_them(policy):
    model, made = built()
    seen = []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    scaled = "1024" in policy
    with attached(model, made, policy), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(2):
            train_plainly(model, made, number)
    assert [each.category for each in told] == [UserWarning] * scaled
    assert not scaled or "0.weight" in str(told[0].message)


# Several optimizers ---------------------------------------------------------------------------------------------------


def gan():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return net, critic, *(torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (net, critic))


@pytest.mark.parametrize(
    "policy, detached, clears", thinned(EVERY, [True, False], ["critic first", "after", "both"], every=4)
)
def test_gans_of_the_usual_forms(policy, detached, clears):
    """With a step of either skipped: as plain torch without that step."""
    ends = []
    for own in (True, False):
        net, critic, for_net, for_critic = gan()
        start = [p.detach().clone() for p in (*net.parameters(), *critic.parameters())]
        context = attached([net, critic], [for_net, for_critic], policy) if own else contextlib.nullcontext()
        with context as amp:
            for number in range(4):
                noise = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
                real, ones, zeros = batch(number)[0], torch.ones(16, 1), torch.zeros(16, 1)
                loss = functional.binary_cross_entropy_with_logits
                fake = net(noise)
                if clears != "after":
                    critic.zero_grad()
                if clears == "both":
                    net.zero_grad()
                loss(critic(real).float(), ones).backward()
                loss(critic(fake.detach() if detached else fake).float(), zeros).backward(retain_graph=not detached)
                if number == 1 and own:
                    spoil(critic, NAN)
                if own or number != 1:
                    for_critic.step()
                if clears == "after":
                    critic.zero_grad()
                net.zero_grad()
                loss(critic(fake if detached else net(noise)).float(), ones).backward()
                if number == 2 and own:
                    spoil(net)
                if own or number != 2:
                    for_net.step()
                if clears == "after":
                    critic.zero_grad()
            assert amp is None or amp.stats().skipped == 2
            models = (net, critic)
            ends.append([v for m in models for v in m.state_dict().values()])
    if policy in FP32 and clears != "critic first":  # where what is spoilt is not added to
        assert_same(*ends)
    if clears != "critic first":
        assert_near(*ends, start, share=0.35)


@pytest.mark.parametrize("policy", EVERY)
def test_requires_grad_is_toggled(policy):
    model = network()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model[0], model[3])]
    with attached(model, optimizers, policy):
        for number in range(4):
            turn = number % 2
            for place, part in enumerate((model[0], model[3])):
                part.requires_grad_(place == turn)
            before = [part.weight.detach().clone() for part in (model[0], model[3])]
            optimizers[turn].zero_grad()
            loss_of(model, number).backward()
            optimizers[turn].step()
            now = (model[0].weight, model[3].weight)
            assert [torch.equal(a, b) for a, b in zip(before, now, strict=True)] == [turn == 1, turn == 0]


def test_a_window_that_stays_open_while_the_scale_moves():
    for level in ("O0", "O2,dtype=bfloat16,emulate=true"):
        model = Weights(2, 2)
        fast, slow = (torch.optim.SGD([param], lr=1.0) for param in model.each)
        with attached(model, [fast, slow], f"{level},loss_scale=dynamic(init=256,interval=1)"):
            for step in range(3):
                fast.zero_grad()
                model.loss(1, 2.0**step).backward()
                fast.step()
            slow.step()
        assert [p.tolist() for p in model.each] == [[-3.0, -3.0], [-7.0, -7.0]]


# Masters that programs edit, and gradients that they clear ------------------------------------------------------------


@pytest.mark.parametrize("between", ["loads", "adds a group", "steps with another"])
def test_an_edit_of_a_master_is_kept(between):
    """Such as SAM's: a program writes what the optimizer updates, and the next forward pass computes with it."""
    model = Weights(2, 2, 2, value=1.0)
    first, second = (torch.optim.SGD([param], lr=1.0) for param in model.each[:2])
    with attached(model, [first, second], "O2,dtype=bfloat16,emulate=true"):
        model.loss(1, 0, 0).backward()
        if between == "loads":
            model.load_state_dict(model.state_dict())
        with torch.no_grad():
            second.param_groups[0]["params"][0].fill_(0.5)
        if between == "adds a group":
            first.add_param_group({"params": [model.each[2]]})
        elif between == "steps with another":
            first.step()
        assert float(model.loss(0, 1, 0).detach()) == 1.0
        assert model.each[1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("clear", ["model.zero_grad()", "model.zero_grad(); optimizer.zero_grad(set_to_none=False)"])
def test_a_step_without_a_gradient_moves_nothing_as_in_plain_torch(clear):
    """Momentum and decay would move weights whose gradients are zeros."""
    for policy in EVERY:
        model = Weights(2, value=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5, weight_decay=0.5)
        with attached(model, optimizer, policy):
            model.loss(1).backward()
            optimizer.step()
            exec(clear, {"model": model, "optimizer": optimizer})
            before = model.each[0].tolist()
            optimizer.step()
            assert model.each[0].tolist() == before


@pytest.mark.parametrize("how", ["in place", "anew"])
def test_zeros_in_the_place_of_an_overflow_begin_a_new_window(how):
    for policy in EVERY:
        model = Weights(2, value=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with attached(model, optimizer, policy) as amp:
            model.loss(INF).backward()
            grad = model.each[0].grad
            model.each[0].grad = grad.zero_() if how == "in place" else torch.zeros_like(grad)
            model.loss(0.5).backward()
            optimizer.step()
            assert not amp.last_step.skipped
            assert model.each[0].tolist() == [0.5, 0.5]


# Optimizers that ask again --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
def test_closures_that_are_evaluated_once(policy):
    for optimizer in OPTIMIZERS:
        ends = []
        for closes in (True, False):
            model, made = built(optimizer)
            with attached(model, made, policy) as amp:
                for number in range(3):

                    def closure(number=number, model=model, made=made):
                        made.zero_grad()
                        loss = loss_of(model, number)
                        loss.backward()
                        return loss

                    loss = made.step(closure) if closes else (closure(), made.step())[0]
                    assert loss.requires_grad
                ends.append((weights(amp), amp.stats()))
        assert_same(*ends)


@pytest.mark.parametrize("policy", EVERY)
def test_lbfgs(policy):
    ends = []
    for own in (True, False):
        model, made = built(lambda p: torch.optim.LBFGS(p, max_iter=3))
        losses = []
        with attached(model, made, policy) if own else contextlib.nullcontext():
            for number in range(2):

                def closure(number=number, model=model, made=made):
                    made.zero_grad()
                    loss = loss_of(model, number)
                    loss.backward()
                    return loss

                losses.append(made.step(closure))
            ends.append([p.detach().float() for p in model.parameters()])
    if policy in FP32:
        assert_same(*ends)
    assert_near(*ends, list(network().parameters()), share=0.2)
    assert all(isinstance(loss, torch.Tensor) for loss in losses)


@pytest.mark.parametrize("policy, by_hand, optimizer", pairwise(EVERY, [True, False], ["SGD", "AdamW"]))
def test_sharpness_aware_minimization(policy, by_hand, optimizer):
    """``first_step`` and ``second_step`` of the well-known class, and its ``step(closure)``."""
    from .programs import SAM

    base = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[optimizer]
    ends = []
    for own in (True, False):
        model, made = built(lambda p: SAM(p, base, lr=0.02))
        context = attached(model, made, policy) if own else contextlib.nullcontext()
        with context:
            for number in range(4):

                def closure(number=number, model=model):
                    loss = loss_of(model, number)
                    loss.backward()
                    return loss

                closure()
                if by_hand:
                    made.first_step(zero_grad=True)
                    closure()
                    made.second_step(zero_grad=True)
                else:
                    made.step(closure)
                    made.zero_grad()
            ends.append([v.clone() for v in model.state_dict().values()])
    if policy in FP32:
        assert_same(*ends)
    assert_near(*ends, list(network().parameters()), share=0.35)


# Schedulers -----------------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "StepLR": lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5),
    "chained": lambda made: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5), torch.optim.lr_scheduler.ConstantLR(made, 1.0, 1)]
    ),
    "sequence": lambda made: torch.optim.lr_scheduler.SequentialLR(
        made, [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5), torch.optim.lr_scheduler.StepLR(made, 1)], [100]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("hold", [True, False])
def test_schedulers_wait_where_a_step_was_skipped(kind, early, hold):
    model, made = built()
    scheduler = SCHEDULERS[kind](made) if early else None
    with attached(model, made, "O1,emulate=true", hold_schedulers=hold):
        scheduler = scheduler or SCHEDULERS[kind](made)
        for number, rate in enumerate([0.05, 0.05, 0.025] if hold else [0.05, 0.025, 0.0125]):
            train_plainly(model, made, number, spoilt=number == 1)
            scheduler.step()
            assert made.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_scheduler_of_epochs_waits_for_no_single_skipped_step():
    model, made = built()
    with attached(model, made, "O1,emulate=true"):
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda epoch: 0.5**epoch)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made)
        for number in range(3):
            train_plainly(model, made, number, spoilt=number == 1)
        scheduler.step()
        plateau.step(1.0)
        assert (scheduler.last_epoch, plateau.last_epoch) == (1, 1)
        train_plainly(model, made, 3, spoilt=True)
        scheduler.step()
        plateau.step(1.0)
        assert (scheduler.last_epoch, plateau.last_epoch) == (1, 1)
        scheduler.step()  # nothing was stepped since: torch's own
        assert scheduler.last_epoch == 2
