"""The benchmark of ranks: every way trains, and what is counted is what placements and dtypes say."""


import pytest
import torch

import distributed as bench
from training.nets import NETS

from ..distributed.ranks import on_ranks

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def rows(repetitions, folder):
    """What rank 0 shows, and the others do not."""
    found = []
    words = ["--size", "least", "--repetitions", str(repetitions), "--out", folder]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bench, "show", lambda each, title: found.append((each, title)))
        patched.setattr("sys.argv", ["distributed.py", *words])
        bench.benchmark(bench.options())
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The rows of rank 0, by way, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("results")
    ((found, title),), others = on_ranks(2, rows, 1, str(folder), timeout=120)
    assert others == []  # the first rank alone shows
    assert title == "gpt2-small, size least, 2 ranks over gloo"
    return {row.way: row for row in found}, folder


def test_what_all_ranks_keep_of_a_parameter(measured):
    found, _ = measured
    kept = {way: row.kept_bytes for way, row in found.items()}
    # Moments are 8, FP32 weights 4 and their gradients 4; as halves 2 and 2, with gradients of 2. DDP keeps all twice.
    assert kept == pytest.approx(
        {
            "FSDP2, BF16 from FP32 shards": 16, "FSDP2, FP32": 16, "FSDP2, mezzo O2, torch's AdamW": 16,
            "FSDP2, mezzo O2, AdamW split": 14, "DDP, torch.amp": 32, "DDP, mezzo O2, AdamW split": 28,
        },
        rel=0.01,  # step counters, and the padding of parts
    )  # fmt: skip


def test_what_travels_has_the_dtype_that_is_said(measured):
    found, _ = measured
    model, _ = NETS["gpt2-small"].make("least", CPU)
    total = sum(param.numel() for param in model.parameters())
    blocks = sum(param.numel() for param in model.blocks.parameters())
    # A block is gathered before its forward and its backward pass; what is left stays after the forward pass.
    gathered = (total + blocks) / total
    for way, size in (("FSDP2, BF16 from FP32 shards", 2), ("FSDP2, FP32", 4), ("FSDP2, mezzo O2, AdamW split", 2)):
        row = found[way]
        assert row.gathered_bytes == pytest.approx(size * gathered, rel=0.02), way
        assert row.reduced_bytes == pytest.approx(4, rel=0.02), way
        assert row.wire_bytes == pytest.approx((size * gathered + 4) / 2, rel=0.02), way
        assert row.collectives == 5, way  # three gatherings, two reductions
    for way, size in (("DDP, torch.amp", 4), ("DDP, mezzo O2, AdamW split", 2)):
        row = found[way]
        assert (row.gathered_bytes, row.collectives) == (0, 1), way
        assert row.reduced_bytes == pytest.approx(size, rel=0.02), way
        assert row.wire_bytes == pytest.approx(size, rel=0.02), way


def test_halves_are_gathered_without_a_cast_and_steps_exchange_little(measured):
    found, _ = measured
    model, _ = NETS["gpt2-small"].make("least", CPU)
    weights = len(list(model.parameters()))
    inner = len(list(model.blocks.parameters()))
    casts = {way: row.weight_casts for way, row in found.items()}
    assert casts["FSDP2, mezzo O2, AdamW split"] == casts["DDP, mezzo O2, AdamW split"] == 0
    assert casts["FSDP2, BF16 from FP32 shards"] == weights + inner
    for way, most, size in (
        ("FSDP2, mezzo O2, AdamW split", 2, 8 * weights + 64),
        ("FSDP2, mezzo O2, torch's AdamW", 2, 8 * weights + 64),
        ("DDP, mezzo O2, AdamW split", 1, 64),
    ):
        assert found[way].exchanges <= most, way
        assert found[way].exchanged_bytes <= size, way
