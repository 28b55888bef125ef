"""The step benchmark: shapes, counted bytes, ratios, refusals."""

import importlib
import io
import math
from unittest import mock

import pytest
import torch
from rich.console import Console

from mezzo.errors import PolicyError, UnsupportedError
from stepping import bench_step
from stepping.contenders import CONTENDERS
from stepping.shapes import shapes

step_module = importlib.import_module("stepping.bench")


@pytest.fixture(scope="module", autouse=True)
def _small():
    """Few tensors, and a copy to compare bandwidths with that takes no time."""
    with (
        mock.patch.dict(step_module.COPY_BYTES, cpu=1 << 20),
        mock.patch.object(step_module, "shapes", lambda name: shapes(name)[:20]),
    ):
        yield


@pytest.fixture(scope="module")
def result():
    return bench_step("200-tiny", dtype="float16", repetitions=2)


def test_every_contender_is_measured_against_the_first(result):
    assert [row.name for row in result.rows] == list(CONTENDERS)
    assert result.rows[0].ratio == 1.0
    assert all(row.step_ms > 0 and row.ratio_p10 <= row.ratio <= row.ratio_p90 for row in result.rows)
    assert result.num_parameters == 20 * 64 * 64


def test_a_narrow_terminal_cuts_no_number(result):
    wide = Console(width=200, file=io.StringIO())
    wide.print(result.table())
    for width in (60, 100):
        console = Console(width=width, file=io.StringIO())
        console.print(result.table())
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
        digits = [sum(map(str.isdigit, part.file.getvalue())) for part in (console, wide)]
        assert digits[0] == digits[1]


def test_bytes_kept_are_those_of_the_tensors(result):
    kept = {row.name: row.kept_bytes for row in result.rows}
    assert kept["torch.amp, fused AdamW"] == pytest.approx(16, abs=0.01)
    assert kept["mezzo O2, AdamW split"] == pytest.approx(14, abs=0.01)
    assert kept["mezzo O2, torch's fused AdamW"] == pytest.approx(16, abs=0.01)
    assert kept["mezzo O2, AdamW split, BF16 moments"] == pytest.approx(10, abs=0.01)
    assert kept["mezzo O2, AdamW split, int8 moments"] == pytest.approx(8.125, abs=0.01)


def test_only_fp32_weights_are_cast_by_the_next_forward_pass(result):
    cast = {row.name for row in result.rows if row.casts_ms > 0}
    assert cast == {name for name in CONTENDERS if "torch.amp" in name or "O1" in name}


def test_all_contenders_take_the_same_step():
    """What is timed is the same update: weights agree within the low precision's rounding."""
    sizes, dtype, after = [(16, 16), (16,)], torch.bfloat16, {}
    for name, contender in CONTENDERS.items():
        ready = contender.build(sizes, dtype, torch.device("cpu"))
        for _ in range(3):
            ready.before()
            ready.step()
        after[name] = [tensor.detach().float() for tensor in ready.kept()[:2]]
    first = after["torch.amp, fused AdamW"]
    for name, weights in after.items():
        for mine, rival in zip(weights, first, strict=True):
            assert mine.shape == rival.shape, name
            torch.testing.assert_close(mine, rival, rtol=2**-7, atol=4e-3, msg=name)


def test_shapes_are_those_of_the_networks():
    assert sum(map(math.prod, shapes("gpt2-small"))) == 124_439_808  # transformers' GPT2Model
    assert len(shapes("resnet-50")) == 161  # torchvision's resnet50
    with pytest.raises(PolicyError, match=r"unknown shapes 'gpt2'(.|\n)*did you mean 'gpt2-"):
        shapes("gpt2")


def test_a_captured_contender_is_there_on_cuda_alone():
    from stepping.contenders import CAPTURED

    with pytest.raises(UnsupportedError, match=r"there is no CUDA graph on cpu(.|\n)*write  mezzo O2, AdamW split\b"):
        bench_step("200-tiny", contenders=["mezzo O2, AdamW split, captured"])
    for contender in CAPTURED.values():  # where nothing is captured they are plain steps
        ready = contender.build([(16, 16), (16,)], torch.bfloat16, torch.device("cpu"))
        for _ in range(3):
            ready.before()
            before = ready.kept()[0].clone()
            ready.step()
            assert not torch.equal(before, ready.kept()[0])
