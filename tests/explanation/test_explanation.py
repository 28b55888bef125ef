"""The explanation as a value: JSON and back, sums, text at any width."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn

from mezzo import PolicyError
from mezzo.explanation import (
    Cast,
    Explanation,
    Finding,
    Misaligned,
    Product,
    Row,
    explain,
    table,
    words,
)

EXPLANATION = Explanation(
    model="Net", policy="O1,dtype=bfloat16", devices=("cpu",), torch="2.13.0", emulated=False,
    rows=(
        Row(
            module="body.0", op="linear", given=("float32",), computes_in=("bfloat16",), returns=("bfloat16",), count=2,
            treatment="low", rule=None, reason="gemm", source="op table", line="/model.py:7",
        ),
        Row(
            module="", op="exp", given=("bfloat16",), computes_in=("float32",), returns=("float32",), count=1,
            treatment="low", rule="low=exp", reason="[mine]", source="policy", line=None, disagreement="decided: low",
        ),
    ),
    casts=(
        Cast(module="body.0", op="linear", phase="forward", what="parameter", before="float32", after="bfloat16",
             by="policy", count=2, num_bytes=6144),
        Cast(module="", op="exp", phase="backward", what="gradient", before="float32", after="bfloat16", by="model",
             count=1, num_bytes=60),
        Cast(module="body.0", op="linear", phase="forward", what="parameter", before="bfloat16", after="float32",
             by="emulation", count=2, num_bytes=6144),
    ),
    misaligned=(
        Misaligned(
            module="body.0", op="linear", shape=(("M", 8), ("N", 50257), ("K", 16)), dtype="bfloat16", multiple=8,
            count=2, line="/model.py:7",
        ),
    ),
    findings=(Finding(kind="idle rule", where="fp32=log[a-z]", text="it decided nothing"),),
    products=(
        Product(module="body.0", op="linear", dtype="bfloat16", count=1, flops=300, why="gemm", line=None),
        Product(module="", op="matmul", dtype="float32", count=1, flops=100, why="rule fp32=matmul", line=None),
    ),
    moved_bytes=10_000,
)  # fmt: skip
EMPTY = Explanation(
    model="Net", policy="O0", devices=("cpu",), torch="2.13.0", emulated=False, rows=(), casts=(), misaligned=(),
    findings=(),
)  # fmt: skip


# JSON -----------------------------------------------------------------------------------------------


def test_json_has_the_answer_and_every_field():
    found = json.loads(json.dumps(EXPLANATION.to_dict(), allow_nan=False))
    answer = found.pop("answer")
    assert answer["headline"] == EXPLANATION.answer.headline
    assert [*found] == [field.name for field in dataclasses.fields(Explanation)]
    assert found["misaligned"][0]["shape"] == [["M", 8], ["N", 50257], ["K", 16]]
    assert found["casts"][1] == dataclasses.asdict(EXPLANATION.casts[1])


@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bfloat16,emulate=true", "O2,dtype=float16,emulate=true"])
@pytest.mark.parametrize("name", ["conv", "gpt", "attention", "lstm"])
def test_a_real_one_goes_to_json(make, name, policy):
    explanation = explain(*make(name), policy)
    found = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
    assert [row["op"] for row in found["rows"]] == [row.op for row in explanation.rows]
    assert sum(cast["num_bytes"] for cast in found["casts"] if cast["by"] != "emulation") == explanation.cast_bytes()


# Sums -----------------------------------------------------------------------------------------------


def test_sums_leave_emulation_out_unless_asked():
    assert (EXPLANATION.num_casts(), EXPLANATION.cast_bytes()) == (3, 6204)
    assert (EXPLANATION.num_casts(by="emulation"), EXPLANATION.cast_bytes(by="emulation")) == (2, 6144)
    assert EXPLANATION.num_casts(module="body.0", what="parameter") == 2
    assert EXPLANATION.num_casts(phase="backward", what="parameter") == 0
    with pytest.raises(PolicyError, match="a cast has no direction\n  write  one of after, before, by, count"):
        EXPLANATION.num_casts(direction="forward")


# Text -----------------------------------------------------------------------------------------------


def test_the_answer_comes_first():
    lines = str(EXPLANATION).splitlines()
    assert lines[0] == "1 of 2 products of Net run in BF16 under O1,dtype=bfloat16: 75 % of their FLOPs"
    assert lines[1] == "  ·  1 in FP32, 25 % of the FLOPs: (model) matmul (rule fp32=matmul)"
    assert repr(EXPLANATION).startswith(f"<Explanation: {lines[0]}; 1 in FP32, 25 % of the FLOPs: ")
    assert "\n" not in repr(EXPLANATION)
    assert str(EMPTY).splitlines()[0] == "Net under O0: no matrix product or convolution was counted"
    assert lines[0] == EXPLANATION.answer.headline


def test_every_row_is_one_plain_line_however_long():
    text = EXPLANATION.text(full=True, width=None)
    assert "\x1b" not in text
    assert "…" not in text
    lines = text.splitlines()
    (linear,) = [line for line in lines if line.split()[:2] == ["body.0", "linear"] and "table" in line]
    assert linear.split() == ("body.0 linear 2 float32 bfloat16 bfloat16 low op table gemm /model.py:7".split())
    (marked,) = [line for line in lines if " exp " in line and "(!)" in line]
    assert "low (!)" in marked
    assert "rule low=exp" in marked
    assert "[mine]" in marked  # no markup
    assert (
        "casts: 3, 6.06 KiB read and written; and 2 by emulation, which a device with the arithmetic does not do"
        in text
    )
    (padded,) = [line for line in lines if "50264" in line and "·  " not in line]
    assert "M 8 · N 50257 · K 16" in padded
    assert "N 50257 → 50264" in padded
    assert "fp32=log[a-z]" in text
    long = "a.very.long.path." * 20
    rows = (dataclasses.replace(each, module=each.module.replace("body.0", long)) for each in EXPLANATION.rows)
    wide = dataclasses.replace(EXPLANATION, rows=tuple(rows))
    assert any(long in line and "op table" in line for line in wide.text(full=True, width=None).splitlines())


@pytest.mark.parametrize("explanation", [EXPLANATION, EMPTY], ids=["rows", "none"])
@pytest.mark.parametrize("full", [False, True])
def test_one_empty_line_lies_between_two_parts(explanation, full):
    text = explanation.text(full=full)
    assert "\n\n" in text.rstrip() or not (full or explanation is EXPLANATION)
    assert "\n\n\n" not in text


def test_empty_tables_are_named_only_among_all_rows():
    assert EMPTY.text(full=True).split("\n\n")[1:] == [
        "ops, forward: none", "products, forward: none", "casts: none",
        "products whose dimensions tensor cores do not like: none", "findings: none",
    ]  # fmt: skip
    assert "none" not in str(EMPTY)


@pytest.mark.parametrize("width", [40, 80, 100, 120])
@pytest.mark.parametrize("full", [False, True])
def test_nothing_is_cut_at_any_width(full, width):
    text = EXPLANATION.text(full=full, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    if width >= 80:  # where a word may be folded, but no column is so narrow that its letters stand in ten lines
        assert {"50264", "(!)", "decided", "nothing"} <= set(text.split())


def test_a_terminal_s_width_is_that_of_the_console():
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(EXPLANATION)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= 60
    assert "50264" in "".join(text.split())


def test_paths_below_the_working_directory_are_short(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = (dataclasses.replace(each, line=f"{tmp_path}/pkg/model.py:7") for each in EXPLANATION.rows)
    full = dataclasses.replace(EXPLANATION, rows=tuple(rows)).text(full=True, width=None)
    assert f"{tmp_path}" not in full
    assert " pkg/model.py:7" in full


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (10_230, "9.99 KiB"),
        (10_239, "10.0 KiB"),
        (102_348, "99.9 KiB"),
        (102_390, "100 KiB"),
        (1_023_000, "999 KiB"),
        (1_024_000, "0.98 MiB"),
        (5 * 2**40, "5.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_byte_text(num_bytes, text):
    assert words.byte_text(num_bytes) == text


@pytest.mark.parametrize(
    "scale, text",
    [
        (2.0**24, "2^24"),
        (2.0, "2^1"),
        (0.5, "2^-1"),
        (1.0, "1"),
        (3.0, "3"),
        (0.0, "0"),
        ("inf", "inf"),
        ("nan", "nan"),
    ],
)
def test_scale_text(scale, text):
    assert words.scale_text(scale) == text


def test_emulation_is_said():
    explanation = explain(nn.Linear(4, 4), torch.randn(3, 4), "O1,dtype=float16,emulate=true")
    assert "measured in one step on cpu, products emulated in FP32, torch" in str(explanation)
    assert "float16, emulated" in explanation.text(full=True, width=None)


def test_names_of_modules_move_no_cursor():
    """What a stranger's model calls its modules is shown, spelled out; as data it stays what it is."""
    evil = "fc\x1b[31m\n  write  rm\u202e[red]x[/]\x9b2J"
    model = nn.Sequential()
    model.add_module(evil, nn.Linear(2, 2))
    found = explain(model, torch.ones(1, 2), policy="O1,dtype=bfloat16,emulate=true")
    spelled = r"fc\x1b[31m\n  write  rm\u202e[red]x[/]\x9b2J"
    assert evil in {row.module for row in found.rows}
    for full in (False, True):
        text = found.text(full=full, width=None)
        assert spelled in text
        assert all(line.isprintable() for line in text.split("\n"))
        console = Console(file=io.StringIO(), width=300, force_terminal=True)
        console.print(*table.renderables(found, full=full))
        assert spelled in console.file.getvalue()
        assert "\x1b[31m\n" not in console.file.getvalue()
