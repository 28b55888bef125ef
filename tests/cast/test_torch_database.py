"""Torch's own database of ops under O1 on a CPU: nothing raises where FP32 does not, and nothing is off."""

import fnmatch

import pytest

from .walked import LOW, fallen, units

#: What may raise, by ``op: form``, and why.
RAISES = {
    "nn.functional.binary_cross_entropy: *": "banned: its gradient overflows in 16 bits",
    "as_strided.partial_views: *": "strides in bytes of FP32, over a storage that is half as long",
    "addbmm: in place": "torch gives what it writes to another shape; where products are emulated that is refused",
    "sparse.sampled_addmm: backward": "torch has no gradient for this layout",
}
#: Results that are not FP32's within some units of the format, and why.
DIFFERS = {
    **dict.fromkeys(
        "normal* uniform* randn_like* rand_like* nn.functional.dropout* nn.functional.*dropout*".split(),
        "draws other numbers",
    ),
    **dict.fromkeys("empty* new_empty*".split(), "memory as it was"),
    **dict.fromkeys("fft.ihfft2: out= fft.ihfftn: out=".split(), "torch writes nothing there in FP32 either"),
    **dict.fromkeys("linalg.pinv.singular: *".split(), "where the rank is decided by rounding"),
    **dict.fromkeys("corrcoef: backward cov: backward".split(), "is zero, made of terms that cancel"),
    **dict.fromkeys(
        "*softmax*: backward masked.softmin: backward inner: backward".split(), "a sum of low terms that cancel"
    ),
    "logcumsumexp: backward": "exponentials of 10,000 in 16 bits",
}
#: How far results and gradients are off at most, in units of the format at the largest value.
UNITS = {"forward": 3, "in place": 5, "out=": 5, "backward": 8}


def listed(key, *tables):
    text = ": ".join(key)
    return any(fnmatch.fnmatchcase(text, glob if ":" in glob else f"{glob}: *") for table in tables for glob in table)


@pytest.mark.parametrize("dtype", LOW)
def test_every_op_of_torch_s_database_runs_as_in_fp32(dtype):
    fell = fallen("database", dtype, "4")
    raised = {key: words for key, words in fell.items() if "Error" in words and not listed(key, RAISES)}
    assert raised == {}
    differing = {
        key: words
        for key, words in fell.items()
        if "Error" not in words and units(words) > UNITS[key[1]] and not listed(key, DIFFERS)
    }
    assert differing == {}
