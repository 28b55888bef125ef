"""The explanation as a value: JSON, sums, text at any width, alike modules in one row."""

import dataclasses
import io
import itertools
import json

import pytest
import torch
from rich.console import Console
from torch import nn

from mezzo import PolicyError
from mezzo.explanation import Cast, Explanation, Finding, Misaligned, Product, Row, explain
from mezzo.explanation import explanation as table
from mezzo.explanation import rows as words
from mezzo.explanation.rows import folded

EXPLANATION = Explanation(
    model="Net", policy="O1,dtype=bfloat16", devices=("cpu",), torch="2.13.0", emulated=(),
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
    model="Net", policy="O0", devices=("cpu",), torch="2.13.0", emulated=(), rows=(), casts=(), misaligned=(),
    findings=(),
)  # fmt: skip


def test_json_has_the_answer_and_every_field():
    document = json.loads(json.dumps(EXPLANATION.to_dict(), allow_nan=False))
    answer = document.pop("answer")
    assert answer["headline"] == EXPLANATION.answer.headline
    assert [*document] == [field.name for field in dataclasses.fields(Explanation)]
    assert document["misaligned"][0]["shape"] == [["M", 8], ["N", 50257], ["K", 16]]
    assert document["casts"][1] == dataclasses.asdict(EXPLANATION.casts[1])
    real = explain(nn.Linear(4, 4), torch.randn(3, 4), "O1,dtype=float16,emulate=true")
    document = json.loads(json.dumps(real.to_dict(), allow_nan=False))
    assert sum(cast["num_bytes"] for cast in document["casts"] if cast["by"] != "emulation") == real.cast_bytes()
    assert "measured in one step on cpu, products emulated in FP32 (emulate=True asks for it), torch" in str(real)
    assert "float16, emulated" in real.text(full=True, width=None)


def test_sums_leave_emulation_out_unless_asked():
    assert (EXPLANATION.num_casts(), EXPLANATION.cast_bytes()) == (3, 6204)
    assert (EXPLANATION.num_casts(by="emulation"), EXPLANATION.cast_bytes(by="emulation")) == (2, 6144)
    assert EXPLANATION.num_casts(module="body.0", what="parameter") == 2
    assert EXPLANATION.num_casts(phase="backward", what="parameter") == 0
    with pytest.raises(PolicyError, match="a cast has no direction\n  write  one of after, before, by, count"):
        EXPLANATION.num_casts(direction="forward")


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
    rows = (dataclasses.replace(row, module=row.module.replace("body.0", long)) for row in EXPLANATION.rows)
    wide = dataclasses.replace(EXPLANATION, rows=tuple(rows))
    assert any(long in line and "op table" in line for line in wide.text(full=True, width=None).splitlines())


def test_paths_below_the_working_directory_are_short(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = (dataclasses.replace(row, line=f"{tmp_path}/pkg/model.py:7") for row in EXPLANATION.rows)
    full = dataclasses.replace(EXPLANATION, rows=tuple(rows)).text(full=True, width=None)
    assert f"{tmp_path}" not in full
    assert " pkg/model.py:7" in full


def test_names_of_modules_move_no_cursor():
    """What a stranger's model calls its modules is shown, spelled out; as data it stays what it is."""
    evil = "fc\x1b[31m\n  write  rm\u202e[red]x[/]\x9b2J"
    model = nn.Sequential()
    model.add_module(evil, nn.Linear(2, 2))
    explanation = explain(model, torch.ones(1, 2), policy="O1,dtype=bfloat16,emulate=true")
    spelled = r"fc\x1b[31m\n  write  rm\u202e[red]x[/]\x9b2J"
    assert evil in {row.module for row in explanation.rows}
    for full in (False, True):
        text = explanation.text(full=full, width=None)
        assert spelled in text
        assert all(line.isprintable() for line in text.split("\n"))
        console = Console(file=io.StringIO(), width=300, force_terminal=True)
        console.print(*table.renderables(explanation, full=full))
        assert spelled in console.file.getvalue()
        assert "\x1b[31m\n" not in console.file.getvalue()


def test_nothing_is_cut_at_any_width():
    for explanation, full, width in itertools.product((EXPLANATION, EMPTY), (False, True), (40, 80, 100, 120)):
        text = explanation.text(full=full, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        assert "\n\n\n" not in text
        if width >= 80 and explanation is EXPLANATION:  # a word may be folded, but no column is a letter wide
            assert {"50264", "(!)", "decided", "nothing"} <= set(text.split())
    assert EMPTY.text(full=True).split("\n\n")[1:] == [
        "ops, forward: none", "products, forward: none", "casts: none",
        "products whose dimensions tensor cores do not like: none", "findings: none",
    ]  # fmt: skip
    assert "none" not in str(EMPTY)


def test_numbers_in_words():
    for num_bytes, text in (
        (999, "999 B"), (1000, "0.98 KiB"), (10_239, "10.0 KiB"), (1_023_000, "999 KiB"), (5000 * 2**40, "5000 TiB"),
    ):  # fmt: skip
        assert words.byte_text(num_bytes) == text
    for scale, text in ((2.0**24, "2^24"), (0.5, "2^-1"), (1.0, "1"), (3.0, "3"), (0.0, "0"), ("inf", "inf")):
        assert words.scale_text(scale) == text


# Alike modules in one row -------------------------------------------------------------------------------


def texts(paths):
    return [fold.text for fold in folded(paths, str, lambda path: None)]


def test_folds():
    for paths, expected in (
        ([f"blocks.{i}.norm1" for i in range(12)], ["blocks.{0..11}.norm1 ×12"]),
        (["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1"], ["blocks.{0,1}.norm1 ×2", "blocks.0.norm2"]),
        ([f"a.{i}" for i in (0, 2, 3, 4, 9)], ["a.{0,2..4,9} ×5"]),
        ([f"a.{i}.b.{j}" for i in range(3) for j in range(4)], ["a.{0..2}.b.{0..3} ×12"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], ["a.0.b.{0,1} ×2", "a.1.b.0"]),
        ([str(i) for i in range(3)], ["{0..2} ×3"]),
        (["layer1.0.conv", "layer2.0.conv"], ["layer1.0.conv", "layer2.0.conv"]),  # a digit in a name is no index
        (["a.01", "a.1", "a.²", "a.٣"], ["a.01", "a.1", "a.²", "a.٣"]),
        (["", "head"], ["", "head"]),
        (["a.0", "a.0", "a.1", "a.1"], ["a.{0,1} ×2", "a.{0,1} ×2"]),  # two calls in each: two rows
        ([], []),
    ):
        assert texts(paths) == expected
    # Rows that differ in anything else stay apart.
    rows = [("a.0", "x"), ("a.1", "y"), ("a.2", "x")]
    assert [fold.text for fold in folded(rows, lambda row: row[0], lambda row: row[1])] == ["a.{0,2} ×2", "a.1"]
