"""What is refused, as rows of one table a room: the error, its words, and that nothing has changed."""

import copy
import re
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from mezzo import LossScale, MixedPrecision, Policy
from mezzo.session.session import engine_of


def bits(tree):
    """Return everything in nested containers, down to the bit: NaN equals itself, and −0 is not 0."""
    leaves, structure = tree_flatten(tree)
    return str(structure), [_leaf(leaf) for leaf in leaves]


def _leaf(leaf):
    if isinstance(leaf, torch.Tensor):
        if leaf.is_sparse:
            return "sparse", _leaf(leaf._indices()), _leaf(leaf._values())
        return leaf.dtype, tuple(leaf.shape), leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return (type(leaf), struct.pack("d", leaf)) if isinstance(leaf, float) else (type(leaf), leaf)


def of_module(model):
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        yield name, id(value), str(value.dtype), value.requires_grad, value.grad
        yield None if value.is_meta or isinstance(value, nn.UninitializedParameter) else value
    for module in model.modules():
        yield sorted(vars(module)), {k: len(v) for k, v in vars(module).items() if k.endswith("hooks")}


def of_optimizer(optimizer):
    for group in optimizer.param_groups:
        yield {**group, "params": list(map(id, group["params"]))}
        yield [(dict(optimizer.state.get(param, {})), param.grad) for param in group["params"]]
    yield sorted(vars(optimizer)), {k: len(v) for k, v in vars(optimizer).items() if k.endswith("hooks")}


def of_session(amp):
    yield amp.loss_scale, amp.stats(), amp.max_grad_norm, amp.is_closed, engine_of(amp).writes.broken, repr(amp)
    if not amp.is_closed:
        yield [(value, value.grad) for value in amp.master_params()]
        yield [(each.now.passes, each.now.scale, each.now.found_inf) for each in engine_of(amp).windows]


def of_path(path):
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        yield str(each), each.read_bytes() if each.is_file() else each.exists()


LOOKS = {
    nn.Module: of_module,
    torch.optim.Optimizer: of_optimizer,
    MixedPrecision: of_session,
    torch.Tensor: lambda tensor: [tensor],
    Path: of_path,
}


def facts(*parts):
    """Return every bit of models, gradients, optimizers, sessions, tensors and files; other things say nothing."""
    found = [list(look(part)) for part in parts for kind, look in LOOKS.items() if isinstance(part, kind)]
    return bits(copy.deepcopy(found))


_CURE = re.compile(r"Policy\.O\d\([^()]*\)(?:\.\w+\([^()]*\))*(?:, (?:or )?the text [\w=.,*]*[\w*])?")


def cures(text):
    """Each policy that an error writes in Python's words is the one that it writes as a text."""
    for cure in _CURE.findall(text):
        python, _, words = cure.partition("the text ")
        assert words, f"{cure}: and as a policy's text?"
        assert eval(python.strip().removesuffix("or").strip(" ,")) == Policy.parse(words), cure
    for python, words in re.findall(r"mezzo\.(LossScale\.\w+\(\)), the text loss_scale=(\w+)", text):
        assert eval(python) == LossScale.parse(words)


@contextmanager
def refused(error, *words, parts=()):
    """The block raises an error that has these words, writes its cures truly, and changes no bit of the parts."""
    before = facts(*parts)
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    assert all(word in text for word in words), text
    cures(text)
    assert facts(*parts) == before, f"refused, and yet something changed: {text}"
