"""What splits, storages and update rules refuse: one table."""

import math

import pytest
import torch

from mezzo.errors import NumericsError, PolicyError
from mezzo.step.split import decode, encode, encode_into
from mezzo.step.update import rule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TWO, LOW, REST = torch.ones(2), torch.ones(2).half(), torch.ones(2, dtype=torch.int16)

REFUSED = [
    (lambda: encode(TWO.double(), BF16), r"torch\.float64 tensor"),
    (lambda: encode(TWO, FP32), r"torch\.float32 high half"),
    (lambda: encode([1.0], BF16), r"split storage of \[1\.0\]"),
    (lambda: decode(TWO, REST), r"a torch\.float32 tensor as its high half"),
    (lambda: decode(LOW, REST.int()), r"torch\.int32 tensor as its remain"),
    (lambda: decode(None, None), r"split storage with None as its high half"),
    (lambda: decode(LOW, torch.ones(3, dtype=torch.int16)), r"\(2,\) and \(3,\)"),
    (lambda: encode(torch.tensor([1e6, math.inf]), FP16, name="scale"),
     r"largest 1e\+06(?s:.*)keep_fp32\(params=\['scale'\]\), the text fp32_param=scale; or bfloat16"),
    (lambda: encode_into(TWO.double(), LOW, REST), r"torch\.float64 tensor"),
    (lambda: encode_into(TWO, TWO, REST), r"a torch\.float32 tensor as its high half"),
    (lambda: encode_into(TWO, LOW, REST.int()), r"torch\.int32 tensor as its remain"),
    (lambda: encode_into(torch.ones(3), LOW, REST), r"\(3,\) and \(2,\)"),
    (lambda: rule("adamv"), "unknown update rule 'adamv'(?s:.*)did you mean 'adam"),
    (lambda: rule("adamw", "amsgrod"), "unknown option 'amsgrod' of adamw(?s:.*)'amsgrad'"),
    (lambda: rule("lion", "amsgrad"), "unknown option 'amsgrad' of lion"),
    (lambda: rule("sgd", "nesterov"), "nesterov without momentum(?s:.*)momentum=0.9"),
]  # fmt: skip


@pytest.mark.parametrize("call, match", REFUSED)
def test_what_makes_no_sense_is_refused(call, match):
    with pytest.raises((NumericsError, PolicyError), match=match):
        call()
