"""What cannot be measured, and what is lacking, is said in one sentence."""

import pytest
import torch

from mezzo.errors import PolicyError, UnsupportedError
from stepping import bench_step
from training import bench_train

from ..support.refusals import refused

ROWS = [
    (bench_step, {"dtype": "float32"}, PolicyError, ("unknown dtype 'float32'",)),
    (bench_step, {"contenders": ["apex"]}, PolicyError, ("unknown contender 'apex'",)),
    (bench_step, {"device": "gpu"}, PolicyError, ("unknown device 'gpu'", "write  cpu or cuda")),
    (bench_step, {"device": "meta"}, UnsupportedError, ("nothing is measured on meta",)),
    (bench_train, {"net": "gpt2"}, PolicyError, ("unknown net 'gpt2'", "did you mean 'gpt2-small'")),
    (bench_train, {"size": "smal"}, PolicyError, ("unknown size 'smal'", "did you mean 'small'")),
    (bench_train, {"dtype": "float32"}, PolicyError, ("unknown dtype 'float32'", "valid: bfloat16, float16")),
    (bench_train, {"ways": ["mezzo O1", "mezo O2"]}, PolicyError, ("unknown way 'mezo O2'", "did you mean 'mezzo O2'")),
    (bench_train, {"repetitions": 0}, PolicyError, ("no rounds to time: 0 repetitions",)),
    (bench_train, {"dtype": "half", "ways": ["apex"]}, PolicyError, ("2 problems", "'half'", "'apex'")),
    (bench_train, {"device": "meta"}, UnsupportedError, ("nothing is measured on meta",)),
]  # fmt: skip


def test_what_cannot_be_measured():
    usual = {bench_step: {"name": "200-tiny"}, bench_train: {"net": "64-tiny", "size": "least"}}
    for measure, options, error, words in ROWS:
        with refused(error, *words):
            measure(**usual[measure] | options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        bench_step("200-tiny", device="cuda")
