"""Nothing of the user's is changed, and what cannot be explained says what to write."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import mezzo
from mezzo import Policy, PolicyError, UnsupportedError
from mezzo.explanation import explain

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


def snapshot(model):
    return {
        "state": {name: (value.clone(), value.dtype) for name, value in model.state_dict().items()},
        "identity": [(name, id(p), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()],
        "grads": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "training": [module.training for module in model.modules()],
        "hooks": [
            (dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._backward_hooks)) for m in model.modules()
        ],
        "versions": [p._version for p in model.parameters()],
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(policy, fails):
    model = fresh()
    x, scale = torch.randn(2, 3, 6, 6, requires_grad=True), torch.ones(8)
    before, kept = snapshot(model), scale.clone()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def loss(output):
        if fails:
            raise KeyError("the user's own error")
        return output.float().sum()

    if fails:
        with pytest.raises(KeyError, match="the user's own error"):
            explain(model, (x, scale), policy, loss=loss)
    else:
        assert explain(model, (x, scale), policy, loss=loss).rows
    assert same(before, snapshot(model))
    assert torch.equal(scale, kept)
    assert x.grad is None
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert all(np.array_equal(a, b) for a, b in zip(states[2], np.random.get_state(), strict=True))
    assert _get_current_function_mode_stack() == _get_current_dispatch_mode_stack() == []
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_inside_a_module_leaves_nothing_behind():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))

        def forward(self, x):
            return self.inner(x)

    model = Broken()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        explain(model, torch.randn(3, 4), Policy.O1("bfloat16", emulate=True).keep_fp32(modules=["inner.1"]))
    assert _get_current_function_mode_stack() == _get_current_dispatch_mode_stack() == []
    assert not torch.is_autocast_enabled("cpu")


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


def test_evaluation_mode_is_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    ops = {row.op for row in explain(model.eval(), torch.randn(3, 4), "O0").rows}
    assert "dropout" not in ops  # nothing is computed
    assert "dropout" in {row.op for row in explain(model.train(), torch.randn(3, 4), "O0").rows}
    assert model.training


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


def test_packed_sequences_go_in_a_tuple():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    explanation = explain(nn.LSTM(4, 4), (packed,), "O2,dtype=bfloat16,emulate=true")
    assert {row.op: row.returns for row in explanation.rows}["lstm"] == ("bfloat16",)


def test_a_compiled_model_is_explained_as_it_was_written():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(3, 4))
    rows = explain(compiled, torch.randn(3, 4), "O1,dtype=bfloat16,emulate=true").rows
    assert [(row.module, row.op) for row in rows] == [("_orig_mod.0", "linear"), ("_orig_mod.1", "relu")]


# Errors ---------------------------------------------------------------------------------------------


def test_inputs_of_another_kind(two_layers):
    model, x = two_layers
    with pytest.raises(PolicyError) as caught:
        explain(model, [x], "O0")
    assert str(caught.value) == (
        "the inputs are a list\n"
        "  why    a tensor is the model's one argument, a tuple its positional ones, a mapping its keyword arguments\n"
        "  write  mezzo.explain(model, (inputs,), policy)   # one argument, whatever it is"
    )
    with pytest.raises(PolicyError, match="the inputs are a PackedSequence"):
        explain(nn.LSTM(4, 4), nn.utils.rnn.pack_sequence([x]), "O0")
    with pytest.raises(PolicyError, match="the inputs are a dict"):
        explain(model, {0: x}, "O0")


def test_no_model_and_a_wrong_policy(two_layers):
    with pytest.raises(PolicyError, match=r"a model must be an nn\.Module, not function"):
        explain(lambda x: x, torch.ones(1), "O0")
    with pytest.raises(PolicyError, match="unknown level 'O9'"):
        explain(*two_layers, "O9")
    with pytest.raises(PolicyError, match="the module glob 'heads' matches no module"):
        explain(*two_layers, "O1,fp32_module=heads")


def test_a_model_that_cannot_be_copied():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.doubled = self.layer.weight * 2

        def forward(self, x):
            return x

    with pytest.raises(UnsupportedError) as caught:
        explain(Cached(), torch.randn(3, 4), "O0")
    text = str(caught.value)
    assert text.startswith("the model cannot be copied, and yours must stay as it is\n  where  Cached\n")
    assert "copy.deepcopy: RuntimeError: Only Tensors created explicitly by the user" in text
    assert "write  mezzo.explain(build_model(), inputs, policy), a model that has not run" in text


def test_a_prepared_model(two_layers):
    model, x = two_layers
    plain = explain(model, x, "O1")
    mezzo.prepare(model, "O2,dtype=bfloat16,emulate=true")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert explain(model, x, "O1").rows == plain.rows  # of its copy, which is a plain FP32 model
    for name, param in model.named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, before[name])


def test_scripted_and_meta_models():
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        scripted = nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4), check_trace=False))
    with pytest.raises(UnsupportedError, match="scripted modules cannot be explained") as caught:
        explain(scripted, torch.randn(3, 4), "O0")
    assert "write  the module as it was before torch.jit.script or torch.jit.trace" in str(caught.value)
    with pytest.raises(UnsupportedError, match="a model on the meta device cannot be explained") as caught:
        explain(nn.Linear(4, 4, device="meta"), torch.randn(3, 4), "O0")
    assert 'write  model.to_empty(device="cpu")' in str(caught.value)


@pytest.mark.parametrize(
    "value, shown",
    [(torch.ones(2), r"\(2,\) torch.float32"), (torch.tensor(1), r"\(\) torch.int64"), (1.0, "float")],
)
def test_a_loss_that_is_no_scalar(two_layers, value, shown):
    with pytest.raises(PolicyError, match="loss= must return one floating number") as caught:
        explain(*two_layers, "O0", loss=lambda output: value)
    assert caught.match(f"where  it returned {shown}")
    assert caught.match(r"write  loss=lambda output: criterion\(output, target\)")


def test_an_output_without_floating_tensors():
    class Argmax(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).argmax(-1)

    with pytest.raises(PolicyError, match="the model's output holds no floating tensor") as caught:
        explain(Argmax(), torch.randn(3, 4), "O0")
    assert "write  mezzo.explain(model, inputs, policy, loss=lambda output: …)" in str(caught.value)


def test_a_banned_op_raises_as_in_training():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return nn.functional.binary_cross_entropy(self.layer(x).sigmoid(), torch.ones(3, 1))

    with pytest.raises(UnsupportedError, match="binary_cross_entropy is banned"):
        explain(Model(), torch.randn(3, 4), "O1,dtype=bfloat16,emulate=true")


def test_copies_are_made_before_anything_runs(two_layers):
    model, x = two_layers
    model.register_forward_hook(lambda module, args, output: seen.append(module))
    seen = []
    explain(model, x, "O0")
    assert len(seen) == 1
    assert seen[0] is not model
