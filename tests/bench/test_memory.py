"""The count of what training keeps, held against bytes that are added up by hand."""

import math

import pytest
import torch

import memory

CASES = [(model, name) for model in memory.MODELS for name in ("torch.amp", "O1", "O2, torch's AdamW", "O2")]


@pytest.mark.parametrize("model, name", CASES, ids=[f"{model.name}, {name}" for model, name in CASES])
def test_bytes_are_those_of_the_shapes(model, name):
    row = memory.counted(model, model.least, name)
    net = model.build(**model.least)
    shapes = {path: tuple(param.shape) for path, param in net.named_parameters()}
    sizes = {path: math.prod(shape) for path, shape in shapes.items()}
    # What a linear or a convolution alone reads; a tied head's weight is the embedding's.
    products = {
        path
        for path, shape in shapes.items()
        if sum(size > 1 for size in shape) > 1 and path not in ("tokens.weight", "places.weight")
    }
    large = products | ({"tokens.weight", "places.weight"} & {*shapes})
    buffers = sum(buffer.nbytes for buffer in net.buffers())
    in_halves, num = name.startswith("O2"), sum(sizes.values())
    assert row.num_parameters == num
    assert row.num_in_halves == (sum(sizes[path] for path in large) if in_halves else 0)
    assert row.weights == 4 * num + buffers
    assert row.gradients == 4 * num - (2 * sum(sizes[path] for path in products) if name == "O2" else 0)
    assert 8 * num <= row.moments <= 8 * num + 8 * len(shapes)  # and counts of steps
    cast = products | ({"tokens.weight"} if model.name == "GPT-2 small" else set())  # its head's
    assert row.casts == (0 if in_halves else 2 * sum(sizes[path] for path in cast))
    assert row.step == (4 * row.num_in_halves if name == "O2, torch's AdamW" else 0)
    assert row.kept == row.weights + row.gradients + row.moments


def test_models_are_those_of_the_papers():
    with torch.device("meta"):
        nets = {model.name: model.build(**model.full) for model in memory.MODELS}
    counts = {name: sum(param.numel() for param in net.parameters()) for name, net in nets.items()}
    # transformers' GPT2Model, torchvision's resnet50, JackFram/llama-160m
    assert counts == {"GPT-2 small": 124_439_808, "ResNet-50": 25_557_032, "LLaMA 160M": 162_417_408}


def test_what_a_loss_allocates_is_some_tensors_of_logits():
    peaks = {}
    for policy in ("O0", "O1,bf16", "O2,bf16"):
        for name in ("two calls", "in four chunks"):
            row = memory.loss_bytes("", 1024, 16, 512, policy=policy, name=name)
            peaks[policy, name] = row.peak / (4 * 1024 * 512)
    # In FP32 the log-softmax and its gradient and one more; from 16 bits the logits as well.
    assert all(3 <= peak <= 4.5 for (_, name), peak in peaks.items() if name == "two calls"), peaks
    assert all(peak <= 1.5 for (_, name), peak in peaks.items() if name == "in four chunks"), peaks
