"""The table of a comparison: every number where a reader looks for it, and no row folded for want of width."""

import pytest
from rich.console import Console

from mezzo.report import operand_rows, table
from mezzo.report.verdict import cells, operand_cells

HEADS = [
    "policy",
    "verdict",
    "test accuracy, %",
    "− FP32 (95 %)",
    "loss",
    "ms/step",
    "held",
    "saved",
    "skipped",
    "scale",
]
LOW = "O2,dtype=float16"


@pytest.fixture
def comparison(compared, run_of):
    low = {"held_bytes": 3072, "saved_bytes": 512, "scale": 32768.0, "skipped": 1, "low_share": 0.5, "peak_bytes": 4096}
    return compared(O0=[99.0, 99.2], **{LOW: [run_of(98.5, **low), run_of(98.9, **low)]})


def shown(comparison, width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table(comparison, width=width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_cells_are_the_rows_in_words(comparison):
    heads, lines = cells(comparison)
    assert heads == HEADS
    assert lines[0] == ["O0", "FP32", "99.1", "", "0.25", "2", "2.00 KiB", "1.00 KiB", "0", "1"]
    low = ["O2,fp16", "undecided", "98.7", "-0.4 (-1.67 … +0.871)", "0.25", "2", "1.50×", "0.50×", "2", "2^15"]
    assert lines[1] == low


def test_the_full_table_has_bytes_beside_ratios_and_three_columns_more(comparison):
    heads, lines = cells(comparison, full=True)
    assert heads == [*HEADS, "not finite", "ran low", "peak"]
    assert lines[1][6:8] == ["3.00 KiB (1.50×)", "512 B (0.50×)"]
    assert [row[10:] for row in lines] == [["0", "100 %", "–"], ["0", "50 %", "4.00 KiB"]]


def test_a_row_is_a_line_at_120_and_at_80_columns(comparison):
    wide = shown(comparison, 120)
    assert wide[0].split("  ")[0] == "policy"
    assert all(head in wide[0] for head in HEADS)
    assert len(wide) == 4
    narrow = shown(comparison, 80)
    assert narrow[3].split()[:3] == ["O2,fp16", "undecided", "98.7"]
    assert narrow[4].startswith("left out: ")
    assert narrow[4].endswith("scale; --full shows them")
    assert max(map(len, narrow)) <= 80
    assert all((head in narrow[0]) != (head in narrow[4]) for head in HEADS)


def test_a_long_policy_is_folded_at_commas(compared):
    name = "O3,dtype=float16,keep_batchnorm_fp32=true,loss_scale=8"
    lines = shown(compared(O0=1.0, name="acc [red]x[/red]", **{name: 1.0}), 120)
    assert "acc [red]x[/red]" in lines[0]  # a script cannot colour the table
    assert [line.split()[0] for line in lines[3:6]] == ["O3,fp16,", "keep_batchnorm_fp32=true,", "loss_scale=8"]


def lost(role, layer="blocks.0.up", **changes):
    plain = {"module": layer, "name": "weight", "role": role, "format": "nvfp4", "saturated": 0.02, "flushed": 0.1}
    return plain | {"below_noise": None, "noise": None, "steps": 4} | changes


def test_operands_are_means_over_runs_by_policy_layer_and_role(compared, run_of):
    seeds = [
        run_of(99.0, operands=(lost("weight"), lost("gradient", below_noise=0.25, noise=0.12))),
        run_of(
            99.0, operands=(lost("weight", saturated=0.04), lost("gradient", below_noise=0.75, noise=0.12, flushed=0.3))
        ),
        run_of(99.0),
    ]
    comparison = compared(O0=[99.0, 99.2, 99.1], **{"O1,dtype=bfloat16,nvfp4_module=blocks.*": seeds})
    weight, gradient = operand_rows(comparison)
    assert (weight.layer, weight.role, weight.saturated, weight.below_noise) == ("blocks.0.up", "weight", 0.03, None)
    assert (gradient.flushed, gradient.below_noise) == (0.2, 0.5)
    heads, lines = operand_cells(comparison)
    assert len(heads) == 8
    assert lines[1][1:] == ["blocks.0.up", "gradient", "nvfp4", "2 %", "20 %", "0.12", "50 %"]
    assert lines[0][0] == "O1,bf16,nvfp4_module=blocks.*"
    assert lines[0][-1] == "–"
    assert operand_rows(compared(O0=[99.0], O1=[99.0])) == []
