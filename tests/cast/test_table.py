"""The op table on a CPU, at sizes beyond 256: every row gives what FP32 gives, within its format's rounding."""

import fnmatch

import pytest

from .table import unnamed
from .walked import LOW, fallen, units

#: What may raise, by ``op: form``, and why.
RAISES = {
    "*fused_moving_avg_obs_*: *": "statistics are FP32, written in place: low ones are torch's error",
    "sparse_sampled_addmm: out=": "a result of another pattern is not copied into what is given",
}
#: Results that are not FP32's within some units of the format, and why.
DIFFERS = {
    "*_cell: sparse": "a product inside C++, which adds up in 16 bits for this layout",
    "rnn_relu*: backward": "the gradient jumps where a sum is nearly zero",
    **dict.fromkeys("svd_lowrank: * pca_lowrank: *".split(), "singular vectors have a sign of their own"),
}
#: How far results are off at most, in units of the format at the largest value.
UNITS = {"forward": 3, "in place": 3, "out=": 3, "backward": 4, "sparse": 3}


def listed(key, table):
    return any(fnmatch.fnmatchcase(": ".join(key), glob) for glob in table)


def test_every_row_has_arguments():
    assert unnamed() == [], "a new row of the op table needs its arguments in tests/cast/table.py"


@pytest.mark.parametrize("dtype", LOW)
def test_every_row_gives_what_fp32_gives(dtype):
    fell = fallen("table", dtype)
    raised = {key: words for key, words in fell.items() if "Error" in words and not listed(key, RAISES)}
    assert raised == {}
    off = {key: words for key, words in fell.items() if "Error" not in words and units(words) > UNITS[key[1]]}
    assert {key: words for key, words in off.items() if not listed(key, {**RAISES, **DIFFERS})} == {}
