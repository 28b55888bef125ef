"""What all rooms say of tensors."""

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch

import mezzo
from mezzo.compat import paddle
from mezzo.compat import torch as torch_like
from mezzo.compat.apex import options
from mezzo.tensors import each_tensor, mark, moved, tensors


def test_what_is_there_already_is_not_copied():
    number = torch.tensor(2.0)
    assert moved(number, torch.device("cpu")) is number
    assert moved(number, torch.device("cpu"), torch.float64).dtype == torch.float64


def test_the_host_waits_for_what_it_is_to_read_and_no_device_does(monkeypatch):
    waits = []
    plain = torch.Tensor.to

    def to(tensor, device, dtype, *, non_blocking):
        waits.append((device.type, non_blocking))
        return plain(tensor, device, dtype)

    monkeypatch.setattr(torch.Tensor, "to", to)
    moved(torch.tensor(2.0), torch.device("cpu"))
    moved(torch.tensor(2.0), torch.device("meta"))
    assert waits == [("cpu", False), ("meta", True)]


@dataclass
class Point:
    x: torch.Tensor
    rest: list


def test_tensors_in_containers():
    a, b, c, d = (torch.tensor(float(number)) for number in range(4))
    value = (a, {"b": [b, None, 3]}, Point(c, [d]), OrderedDict(e=a), "text", Point)
    assert [(path, int(tensor)) for path, tensor in each_tensor(value)] == [
        ("[0]", 0), ("[1]['b'][0]", 1), ("[2].x", 2), ("[2].rest[0]", 3), ("[3]['e']", 0),
    ]  # fmt: skip
    assert [path for path, _ in each_tensor(a)] == [""]
    assert [int(tensor) for tensor in tensors(({"b": [b, (None, a)]}, "text", Point(c, [d]), OrderedDict(e=c)))] == [
        1,
        0,
        2,
    ]


def test_marks_tell_writing_and_other_memory():
    weight = torch.zeros(3)
    before = mark(weight)
    weight.add_(1)
    written = mark(weight)
    weight.data = torch.ones(3)
    assert len({before, written, mark(weight)}) == 3
    with torch.inference_mode():
        made = torch.zeros(3)
    assert mark(made) == (-1, made.data_ptr())
    sparse = torch.eye(2).to_sparse()
    assert mark(sparse) == (sparse._version, 0)


@pytest.mark.parametrize("word", ["bf16", "BF16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_words_for_a_dtype_are_known_wherever_one_stands(word):
    assert [each.dtype for each in mezzo.weights.encode(torch.ones(3), word)] == [torch.bfloat16, torch.int16]
    for region in (torch_like.autocast("cpu", dtype=word), paddle.auto_cast(dtype=word)):
        with region:
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    assert options.policy_of("O2", word).dtype == torch.bfloat16
    assert options.policy_of("O2", cast_model_outputs=word).output_dtype == torch.bfloat16
