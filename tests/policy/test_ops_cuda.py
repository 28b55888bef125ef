"""The op table against torch itself: CUDA's autocast simulated at the dispatcher, and the CPU's own."""

import functools

import pytest
import torch

from mezzo import Policy, PolicyError
from mezzo.policy.ops import OPS, resolve

from ..distributed.ranks import on_ranks
from .cuda_on_cpu import compared

# Where the portable lists give another dtype than CUDA's autocast, on purpose. Rows without a low kernel on CUDA are
# not repeated: CUDA raises, and so does the simulation, except on empty inputs.
ON_PURPOSE = {
    "trace": "CUDA's kernel is diagonal().sum(), which returns FP32 there; the CPU's kernel is another",
    "histc": "counts, which 16 bits cannot hold",
    "ldexp": "made of pow: always FP32, where CUDA lets a 0-d exponent give way to a low tensor",
}
#: Variances are FP32, and products whose samples have an inner size of one add up nothing.
ARGUMENTS_DECIDE = "var std var_mean std_mean torch addr einsum bmm".split()
#: Losses, FP32 as every other; torch's kernel of them gives the dtype of its rows.
IN_CHUNKS = "nn.functional.linear_cross_entropy."
# Left to torch, which casts the products inside.
COMPOSED_OF_PRODUCTS = {"linalg_matrix_exp", "linalg_pinv"}


def is_error(outcome):
    return isinstance(outcome, str) and ":" in outcome


@functools.cache
def row_of(name):
    """The row of an operator of torch's samples: nn.functional.pad.reflect → pad."""
    for part in (name, name.rpartition(".")[0]):
        try:
            return OPS.get(resolve(part))
        except PolicyError:
            continue
    return None


@pytest.fixture(scope="module")
def rows():
    (table,) = on_ranks(1, compared, 1, timeout=300, backend=None)
    return table


def test_the_samples_are_many(rows):
    assert len({row["op"] for row in rows}) > 450
    assert len(rows) > 1200
    changed = {row["op"] for row in rows if row["cuda"] != row["plain"]}
    assert len(changed) > 120


def test_portable_lists_give_cuda_dtypes_on_a_cpu(rows):
    wrong = {}
    for row in rows:
        op = row_of(row["op"])
        newer = row["op"] == "nn.functional.rms_norm" and torch.__version__ < (2, 12)  # then on no list of torch's
        known = newer or row["op"] in ON_PURPOSE or (op is not None and op.reason == "no low kernel")
        known |= row["op"].partition(".")[0] in ARGUMENTS_DECIDE or row["op"] == "nn.functional.conv3d"
        known |= row["op"].startswith(IN_CHUNKS)
        # Where CUDA's autocast raises for want of a kernel, anything that works is an improvement.
        if row["mezzo"] != row["cuda"] and not is_error(row["cuda"]) and not known:
            wrong.setdefault(row["op"], row)
    assert wrong == {}
    for name in ON_PURPOSE:
        assert any(row["mezzo"] != row["cuda"] for row in rows if row["op"] == name)


def test_rows_without_a_low_kernel_always_give_fp32(rows):
    low = {"bfloat16", "float16", "complex32"}
    wrong = {
        row["op"]: row["mezzo"]
        for row in rows
        if (op := row_of(row["op"])) is not None and (op.portable, op.reason) == ("fp32", "no low kernel")
        if not is_error(row["mezzo"])
        if low & set([row["mezzo"]] if isinstance(row["mezzo"], str) else map(str, row["mezzo"]))
    }
    assert wrong == {}


def test_the_ban_is_cudas(rows):
    banned = [row for row in rows if row["op"] == "nn.functional.binary_cross_entropy"]
    assert {row["cuda"] for row in banned} == {"RuntimeError: banned"}
    assert all("UnsupportedError: binary_cross_entropy is banned" in row["mezzo"] for row in banned)


@pytest.mark.parametrize("column, at_least", [("cuda", 75), ("cpu", 60)])
def test_each_column_says_what_torch_does(rows, column, at_least):
    """Inputs of the dtype that the treatment changes: an fp32 op widens low ones, a low op narrows wide ones."""
    changes = {"fp32": ("low", ("float32", "complex64", "int64")), "low": ("wide", ("bfloat16",))}
    wrong, checked = {}, set()
    for row in rows:
        op = row_of(row["op"])
        if op is None or op.name in ON_PURPOSE or row["variant"] == "extra" or row["op"].endswith("with_dtype"):
            continue
        inputs, expected = changes.get(getattr(op, column), ("", ()))
        if row["inputs"] == inputs and isinstance(row[column], str) and not is_error(row[column]):
            checked.add(op.name)
            if row[column] not in expected:
                wrong.setdefault(op.name, row)
    # Of the ways to pad only reflection and replication are on the list.
    assert set(wrong) == ({"pad"} if column == "cpu" else set()), wrong
    assert len(checked) > at_least


def test_native_rows_are_left_alone_by_torch_on_both_devices(rows):
    wrong = {
        op.name: row
        for row in rows
        if (op := row_of(row["op"])) is not None and (op.cuda, op.cpu) == ("native", "native") and not op.parts
        if row["variant"] != "extra" and op.portable == "native"
        for column in ("cuda", "cpu")
        if row[column] != row["plain"] and not is_error(row[column]) and not is_error(row["plain"])
    }
    assert wrong == {}


TRICKY = [
    ("x @ y.T", "bfloat16"), ("x ** 2", "float32"), ("2 ** x", "float32"), ("1 / x", "float32"),
    ("1 - x", "bfloat16"), ("x.norm()", "float32"), ("torch.norm(dim)", "float32"),
    ("pairwise_distance", "float32"), ("gumbel_softmax", "float32"), ("softmin", "float32"),
    ("instance_norm", "bfloat16"), ("interpolate(nearest)", "float32"), ("interpolate(area)", "bfloat16"),
    ("pad(reflect)", "bfloat16"), ("gaussian_nll_loss", "float32"),
    ("triplet_margin_with_distance_loss", "float32"), ("embedding_bag", "bfloat16"), ("exp_", "bfloat16"),
    ("x **= 2", "bfloat16"), ("exp(out=)", "bfloat16"), ("sum(dtype)", "float64"), ("softmax(dtype)", "bfloat16"),
    ("multi_head_attention", ["bfloat16", "float32"]),
]  # fmt: skip


def test_tricky_ones_by_name(rows):
    """Written out, so that a reader sees what CUDA's autocast makes of low inputs."""
    for name, low in TRICKY:
        (row,) = (row for row in rows if row["op"] == name and row["inputs"] == "low")
        assert (row["cuda"], row["mezzo"]) == (low, low), name


def test_what_is_said_to_be_left_to_torch_is_left_alone_by_cudas_lists(rows):
    """``explain`` for an accelerator, against CUDA's lists as the dispatcher carries them out."""
    policy = Policy.O1("bfloat16", emulate=False)
    left = {
        op.name
        for row in rows
        if (op := row_of(row["op"])) is not None and policy.explain(op.name, device_type="cuda").source == "torch"
    }
    wrong = {
        op.name: row
        for row in rows
        if (op := row_of(row["op"])) is not None and op.name in left
        if row["cuda"] != row["plain"] and not is_error(row["cuda"])
    }  # fmt: skip
    assert set(wrong) == COMPOSED_OF_PRODUCTS
    assert len(left) > 35
