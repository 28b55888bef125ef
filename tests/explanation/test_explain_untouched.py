"""Nothing of the user's is changed, whatever is explained."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import mezzo
from mezzo import Policy
from mezzo.explanation import explain

from ..support.refusals import bits, facts

POLICIES = ["O0", "O1,dtype=bfloat16,emulate=false", "O2,dtype=float16,emulate=true", "O3,dtype=bfloat16,emulate=true"]


class Everything(nn.Module):
    """Batch norm's statistics, dropout's randomness, an input changed in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.frozen.eval()

    def forward(self, x, scale):
        scale.mul_(2)
        noise = random.random() + float(np.random.rand())
        y = self.drop(self.norm(self.conv(x * noise))).mean((2, 3))
        return self.frozen(y) * scale


def fresh():
    torch.manual_seed(0)
    model = Everything()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    return model


def modes():
    now = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    return *map(len, now), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_is_as_it_was(policy):
    model = fresh()
    x, scale = torch.randn(2, 3, 6, 6, requires_grad=True), torch.ones(8)
    broken = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)))

    def everything():
        states = bits([torch.get_rng_state()]), random.getstate(), str(np.random.get_state()), modes()
        places = [(id(p.grad), p.data_ptr(), p._version) for p in model.parameters()]
        return facts(model, x, scale), states, places, [module.training for module in model.modules()], x.grad

    before = everything()
    assert explain(model, (x, scale), policy, loss=lambda output: output.float().sum()).rows
    assert everything() == before

    def failing(output):
        raise KeyError("the user's own error")

    with pytest.raises(KeyError, match="the user's own error"):
        explain(model, (x, scale), policy, loss=failing)
    assert everything() == before
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        explain(broken, torch.ones(3, 4), Policy.O1("bfloat16", emulate=True).keep_fp32(modules=["0.1"]))
    assert everything() == before


def test_the_explanation_is_the_same_twice_and_inside_other_contexts(two_layers):
    model, x = two_layers
    policy = "O1,dtype=bfloat16,emulate=true"
    alone = explain(model, x, policy)
    assert explain(model, x, policy) == alone
    with torch.no_grad():
        assert explain(model, x, policy) == alone
    with torch.inference_mode():
        assert explain(model, x.clone(), policy) == alone
    with mezzo.autocast("O1,dtype=float16,emulate=true,fp32=linear"):
        assert explain(model, x, policy) == alone


def test_kinds_of_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, *, mask=None):
            logits = self.layer(x)
            return {"logits": logits if mask is None else logits * mask, "tokens": torch.arange(3)}

    x = torch.randn(3, 4)
    assert len(explain(Model(), x, "O0").rows) == len(explain(Model(), (x,), "O0").rows) == 1
    by_name = explain(Model(), {"x": x, "mask": torch.ones(4)}, "O0")
    assert [row.op for row in by_name.rows] == ["linear", "mul"]
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    explanation = explain(nn.LSTM(4, 4), (packed,), "O2,dtype=bfloat16,emulate=true")
    assert {row.op: row.returns for row in explanation.rows}["lstm"] == ("bfloat16",)
    seen, mode = [], nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    mode.register_forward_hook(lambda module, args, output: seen.append(module))
    assert "dropout" not in {row.op for row in explain(mode.eval(), x, "O0").rows}  # nothing is computed
    assert "dropout" in {row.op for row in explain(mode.train(), x, "O0").rows}
    assert len(seen) == 2
    assert mode not in seen  # copies run


def test_a_compiled_model_is_explained_as_it_was_written():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(3, 4))
    rows = explain(compiled, torch.randn(3, 4), "O1,dtype=bfloat16,emulate=true").rows
    assert [(row.module, row.op) for row in rows] == [("_orig_mod.0", "linear"), ("_orig_mod.1", "relu")]


def test_a_prepared_model(two_layers):
    model, x = two_layers
    plain = explain(model, x, "O1")
    mezzo.prepare(model, "O2,dtype=bfloat16,emulate=true")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert explain(model, x, "O1").rows == plain.rows  # of its copy, which is a plain FP32 model
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32
        assert torch.equal(param, before[name])
