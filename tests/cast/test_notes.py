"""Casting says what it does while a watcher is there, and keeps nothing of it."""

import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.cast.notes import WATCHERS, notes, watched

POLICY = "O1,dtype=bfloat16,emulate=true,norms=fp32_math"


class Listener(TorchDispatchMode):
    """Write down what is noted around each kernel."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.heard.append((func._schema.name.removeprefix("aten::"), [note.kind for note in notes()]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))


def heard(model, x):
    with mezzo.autocast(POLICY), Listener() as forward:
        loss = model(x).sum()
    with Listener() as backward:
        loss.backward()
    return forward.heard, backward.heard


def test_each_kernel_is_a_cast_of_emulation_or_of_the_op(model):
    with watched():
        forward, backward = heard(model, torch.ones(2, 4))
    casts = {tuple(kinds) for name, kinds in forward if name == "_to_copy"}
    assert casts == {("op", "cast"), ("op", "emulation")}
    assert ("mm", ["op", "emulation"]) in forward
    assert ("native_layer_norm", ["op"]) in forward
    assert {tuple(kinds) for name, kinds in backward if name == "mm"} == {("emulation",)}
    assert ("native_layer_norm_backward", []) in backward
    assert notes() == []
    assert WATCHERS == []


def test_nothing_is_noted_while_nobody_watches(model):
    forward, backward = heard(model, torch.ones(2, 4))
    assert all(not kinds for _, kinds in (*forward, *backward))


def test_the_boundary_of_a_converted_model_is_a_cast():
    model = nn.Linear(4, 4)
    mezzo.prepare(model, "O2,dtype=bfloat16,emulate=true,output_dtype=float32")
    with watched(), Listener() as listener:
        model(torch.ones(2, 4))
    copies = [kinds for name, kinds in listener.heard if name == "_to_copy"]
    assert copies[0][0] == copies[-1][0] == "cast"


def test_an_error_leaves_no_note(model):
    with watched(), mezzo.autocast(POLICY), pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert notes() == []


def test_each_thread_has_notes_of_its_own(model):
    found = []

    def run():
        found.extend(heard(model, torch.ones(2, 4)))

    with watched(), mezzo.autocast(POLICY), Listener():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert notes() == []
    assert any(kinds == ["op", "emulation"] for _, kinds in found[0])
