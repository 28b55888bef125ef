"""@mezzo.low and @mezzo.fp32 on functions and module classes."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import PolicyError

O1 = "O1,dtype=bfloat16,emulate=true"
x = torch.randn(4, 8)


@mezzo.low
def scores(a, *, scale=1.0):
    """Say something."""
    return (a * scale).softmax(-1), torch.exp(a), functional.layer_norm(a, (8,)), a @ a.T


@mezzo.fp32
def exact(a, b):
    return a @ b.T


def test_low_runs_every_op_low():
    with mezzo.autocast(O1, "cpu"):
        assert [out.dtype for out in scores(x, scale=2.0)] == [torch.bfloat16] * 4
        assert torch.exp(x.bfloat16()).dtype == torch.float32  # and the region goes on as before


def test_low_changes_nothing_without_autocast():
    assert [out.dtype for out in scores(x)] == [torch.float32] * 4
    with mezzo.autocast("O0", "cpu"):
        assert scores(x)[3].dtype == torch.float32
    assert scores(x.bfloat16())[0].dtype == torch.bfloat16


def test_fp32_casts_inputs_and_nothing_inside():
    low = x.bfloat16()
    with mezzo.autocast(O1, "cpu"):
        assert (low @ low.T).dtype == torch.bfloat16
        out = exact(low, b=low)
    assert out.dtype == torch.float32
    assert torch.equal(out, low.float() @ low.float().T)
    assert exact(low, low).dtype == torch.bfloat16  # without autocast the result goes back


def test_fp32_works_under_torch_s_own_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert exact(x, x).dtype == torch.float32


def test_the_function_keeps_its_name_and_words():
    assert (scores.__name__, scores.__doc__) == ("scores", "Say something.")


@mezzo.fp32
class Head(nn.Linear):
    pass


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_pinned_class_computes_in_fp32_at_every_level(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Head(8, 8), nn.Linear(8, 8))
    handle = mezzo.prepare(model, f"{level},dtype=bfloat16,emulate=true")
    seen = []
    model[1].register_forward_hook(lambda module, args, out: seen.append((module.weight.dtype, out.dtype)))
    with handle.autocast():
        out = model(x)
    assert seen == [(torch.float32, torch.float32)]
    out.float().sum().backward()
    assert model[1].weight.grad.dtype == torch.float32


def test_a_rule_of_the_policy_comes_before_a_pinned_class():
    model = nn.Sequential(Head(8, 8))
    mezzo.prepare(model, "O2,dtype=bfloat16,low_module=0")
    assert model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("wrong, says", [(int, "int is a class, and not one of modules"), (3, "3 cannot be pinned")])
def test_other_things_cannot_be_pinned(wrong, says):
    with pytest.raises(PolicyError, match=says):
        mezzo.fp32(wrong)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_checkpoint_contexts_serve_a_bare_backward(dtype):
    def body(a, w):
        return (a @ w).softmax(-1).exp()

    def gradients(run):
        torch.manual_seed(0)
        w = torch.randn(8, 8, requires_grad=True)
        with mezzo.autocast(f"O1,dtype={dtype},emulate=true", "cpu"):
            loss = run(w).square().sum()
        loss.backward()
        return w.grad

    plain = gradients(lambda w: body(x, w))
    again = gradients(lambda w: checkpoint(body, x, w, use_reentrant=False, context_fn=mezzo.checkpoint_contexts))
    assert torch.equal(plain, again)


def test_checkpoint_contexts_outside_a_region_do_nothing():
    first, again = mezzo.checkpoint_contexts()
    with first, again:
        assert (x @ x.T).dtype == torch.float32
