"""What splits, storages and update rules refuse."""

import math

import torch

from mezzo.errors import NumericsError, PolicyError
from mezzo.step.storage import decode, encode, encode_into
from mezzo.step.update import rule

from ..support.refusals import refused

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONE, TWO, LOW, REST = torch.ones(3), torch.ones(2), torch.ones(2).half(), torch.ones(2, dtype=torch.int16)

REFUSED = [
    (lambda: encode(TWO.double(), BF16), "torch.float64 tensor"),
    (lambda: encode(TWO, FP32), "torch.float32 high half"),
    (lambda: encode([1.0], BF16), "split storage of [1.0]"),
    (lambda: decode(TWO, REST), "a torch.float32 tensor as its high half"),
    (lambda: decode(LOW, REST.int()), "torch.int32 tensor as its remain"),
    (lambda: decode(None, None), "split storage with None as its high half"),
    (lambda: decode(LOW, torch.ones(3, dtype=torch.int16)), "(2,) and (3,)"),
    (lambda: encode(torch.tensor([1e6, math.inf]), FP16, name="scale"), "largest 1e+06",
     'keep_fp32(params=["scale"]), the text fp32_param=scale; or bfloat16'),
    (lambda: encode(torch.tensor([1.0, 65504.004, -65504.004]), FP16, name="a.weight"), "2 of 3 weights",
     "a.weight, shape (3,)", "65504"),
    (lambda: encode(torch.tensor([1.0, 3.3961776e38]), BF16, name="a.weight"), "1 of 2 weights", "3.396"),
    (lambda: encode_into(TWO.double(), LOW, REST), "torch.float64 tensor"),
    (lambda: encode_into(TWO, TWO, REST), "a torch.float32 tensor as its high half"),
    (lambda: encode_into(TWO, LOW, REST.int()), "torch.int32 tensor as its remain"),
    (lambda: encode_into(ONE, LOW, REST), "(3,) and (2,)"),
    (lambda: rule("adamv"), "unknown update rule 'adamv'", "did you mean 'adam"),
    (lambda: rule("adamw", "amsgrod"), "unknown option 'amsgrod' of adamw", "'amsgrad'"),
    (lambda: rule("lion", "amsgrad"), "unknown option 'amsgrad' of lion"),
    (lambda: rule("sgd", "nesterov"), "nesterov without momentum", "momentum=0.9"),
]  # fmt: skip


def test_what_makes_no_sense_is_refused_and_nothing_written():
    for call, *words in REFUSED:
        with refused((NumericsError, PolicyError), *words, parts=(ONE, TWO, LOW, REST)):
            call()
    largest = torch.tensor([65504.0, -65504.0])
    assert torch.equal(decode(*encode(largest, FP16)), largest)
