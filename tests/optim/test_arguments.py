"""Constructors against torch's own signatures: the same arguments, and a reason for each that is left out."""

import inspect

import pytest
import torch
from torch import nn

from mezzo import optim
from mezzo.errors import PolicyError

from .halved import halved

TORCHS = [(optim.AdamW, torch.optim.AdamW), (optim.Adam, torch.optim.Adam), (optim.SGD, torch.optim.SGD)]
TORCHS += [(optim.Muon, torch.optim.Muon)]


def parameter():
    return [nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]


def arguments(optimizer_class):
    return {name: p for name, p in inspect.signature(optimizer_class).parameters.items() if p.kind is not p.VAR_KEYWORD}


@pytest.mark.parametrize("mine, theirs", TORCHS)
def test_torch_s_arguments_are_taken_or_refused_by_name(mine, theirs):
    ours, torchs = arguments(mine), arguments(theirs)
    positional = [name for name, p in torchs.items() if p.kind is not p.KEYWORD_ONLY]
    assert [name for name, p in ours.items() if p.kind is not p.KEYWORD_ONLY] == positional
    for name, theirs_is in torchs.items():
        if name in ours:
            assert ours[name].default == theirs_is.default, name
        elif theirs_is.default:
            with pytest.raises(PolicyError, match=f"^{mine.__name__} takes no {name}=(.|\n)*write  leave it out"):
                mine(parameter(), **{name: theirs_is.default})
        else:
            assert name not in mine(parameter(), **{name: theirs_is.default}).defaults


def test_bytes_kept_of_a_parameter():
    """Beside two halves and a gradient of 2 bytes each, which are the model's: 14 with AdamW, 8.125 with codes."""
    for optimizer_class, options, expected in [
        (optim.SGD, {}, 0),
        (optim.SGD, {"momentum": 0.9}, 4),
        (optim.SGD, {"momentum": 0.9, "state_dtype": "bfloat16"}, 2),
        (optim.Lion, {}, 4),
        (optim.AdamW, {}, 8),
        (optim.AdamW, {"state_dtype": "bfloat16"}, 4),
        (optim.AdamW, {"amsgrad": True}, 12),
        (optim.AdamW, {"state_dtype": "int8"}, 2.125),
        (optim.Adam, {"state_dtype": "int8", "amsgrad": True}, 3.1875),
        (optim.SGD, {"momentum": 0.9, "state_dtype": "int8"}, 1.0625),
        (optim.Lion, {"state_dtype": "int8"}, 1.0625),
        (optim.Muon, {}, 4),
        (optim.Muon, {"state_dtype": "bfloat16"}, 2),
        (optim.Muon, {"state_dtype": "int8"}, 1.0625),
    ]:
        weight = nn.Parameter(torch.randn(64, 32))
        optimizer = optimizer_class([weight], **options)
        halved([weight], torch.bfloat16)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        kept = [value for name, value in optimizer.state[weight].items() if name != "step"]
        assert sum(tensor.nbytes for tensor in kept) == expected * weight.numel(), (optimizer_class, options)
        assert weight.hi.nbytes + weight.lo.nbytes == 4 * weight.numel()


def test_short_words_for_the_dtype_of_the_state_are_its_names():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "state_dtype": "fp32"}]
    optimizer = optim.AdamW(groups, state_dtype="bf16")
    for word in ("bf16", "BF16", torch.bfloat16, torch.int8):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "state_dtype": word})
    assert [group["state_dtype"] for group in optimizer.param_groups] == [
        "bfloat16",
        "float32",
        *["bfloat16"] * 3,
        "int8",
    ]
