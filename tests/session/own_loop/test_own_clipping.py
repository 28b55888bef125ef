"""torch's clipping functions in a plain loop: unscaled gradients, by whatever name, of parameters and of masters."""

import warnings

import pytest
import torch
from torch.nn import utils
from torch.nn.utils import clip_grad as module
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from ..loops import network
from .loops import POLICIES, attached, build, loss_of, spoil

LIMIT = 0.05


def plain_gradients():
    model = network()
    loss_of(model, 0).backward()
    return model


def norm_of(model):
    return torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))


WAYS = {
    "imported before": lambda model, amp: clip_grad_norm_(model.parameters(), LIMIT),
    "of the package": lambda model, amp: utils.clip_grad_norm_(model.parameters(), LIMIT),
    "of the module": lambda model, amp: module.clip_grad_norm_(list(model.parameters()), LIMIT),
    "by keyword": lambda model, amp: clip_grad_norm_(parameters=tuple(model.parameters()), max_norm=LIMIT),
    "of masters": lambda model, amp: clip_grad_norm_(amp.master_params(), LIMIT),
    "of groups": lambda model, amp: clip_grad_norm_(amp._core.optimizers[0].param_groups[0]["params"], LIMIT),
    "in two": lambda model, amp: clip_grads_with_norm_(
        model.parameters(), LIMIT, get_total_norm([p.grad for p in model.parameters()])
    ),
    "foreach": lambda model, amp: clip_grad_norm_(model.parameters(), LIMIT, foreach=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["O0, scaled", "O1", "O2", "O2, bfloat16"])
def test_norms_are_clipped_unscaled(way, policy):
    expected = norm_of(plain_gradients())
    model, built = build()
    with attached(model, built, POLICIES[policy]) as amp:
        loss_of(model, 0).backward()
        found = WAYS[way](model, amp)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=0.0)
        updated = list(amp.master_params())
        torch.testing.assert_close(norm_of(torch.nn.ParameterList(updated)).item(), LIMIT, rtol=1e-3, atol=0.0)
        assert updated[0].grad is next(model.parameters()).grad
        before = [p.detach().clone() for p in updated]
        built.step()
        moves = [(a - b.detach()).flatten() for a, b in zip(before, updated, strict=True)]
        moved = torch.linalg.vector_norm(torch.cat(moves))
        assert float(moved) == pytest.approx(0.1 * LIMIT, rel=2e-3)  # the learning rate of SGD


@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_values_are_clipped_unscaled(policy):
    model, built = build()
    with attached(model, built, POLICIES[policy]) as amp:
        loss_of(model, 0).backward()
        clip_grad_value_(model.parameters(), 0.01)
        assert max(p.grad.abs().max() for p in amp.master_params()) == pytest.approx(0.01)


def test_an_infinity_that_is_clipped_to_a_number_skips_the_step():
    for policy in ("O1", "O2"):
        model, built = build()
        with attached(model, built, POLICIES[policy]) as amp:
            loss_of(model, 0).backward()
            spoil(model)
            clip_grad_value_(model.parameters(), 0.01)
            built.step()
            assert amp.last_step.skipped


def test_norms_alone_and_those_of_others():
    model, built = build()
    other = plain_gradients()
    with attached(model, built, "O2,emulate=true"):
        loss_of(model, 0).backward()
        mixed = [*(p.grad for p in model.parameters()), *(p.grad for p in other.parameters()), torch.ones(4)]
        both = get_total_norm(mixed)
        expected = (2 * norm_of(other) ** 2 + 4).sqrt()
        torch.testing.assert_close(both, expected, rtol=2e-2, atol=0.0)
        torch.testing.assert_close(clip_grad_norm_(other.parameters(), LIMIT), norm_of(plain_gradients()))


def test_a_tensor_alone_and_nothing_at_all():
    model, built = build()
    with attached(model, built, "O2,emulate=true"):
        loss_of(model, 0).backward()
        first, twin = next(model.parameters()), next(plain_gradients().parameters())
        torch.testing.assert_close(clip_grad_norm_(first, LIMIT), twin.grad.norm(), rtol=2e-2, atol=0.0)
        with pytest.warns(UserWarning, match="empty generator"):
            clip_grad_norm_((p for p in ()), 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert clip_grad_norm_([], 1.0) == 0


def test_accumulation_goes_on_after_clipping():
    model, built = build()
    twin, theirs = build()
    with attached(model, built, "O0,loss_scale=8"):
        for net in (model,):
            loss_of(net, 0).backward()
            clip_grad_norm_(net.parameters(), LIMIT)
            loss_of(net, 1).backward()
        built.step()
        found = [p.detach().clone() for p in model.parameters()]
    loss_of(twin, 0).backward()
    clip_grad_norm_(twin.parameters(), LIMIT)
    loss_of(twin, 1).backward()
    theirs.step()
    for mine, param in zip(found, twin.parameters(), strict=True):
        torch.testing.assert_close(mine, param.detach())


def test_non_finite_norms_raise_where_that_is_asked_for():
    model, built = build()
    with attached(model, built, "O1,emulate=true"):
        loss_of(model, 0).backward()
        spoil(model)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        built.zero_grad()
        loss_of(model, 0).backward()
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        built.step()
