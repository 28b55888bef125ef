"""An encoder's allow list: the bytes that each op on it saves, against a count by hand, measured and committed."""

import json
import runpy
import sys
from pathlib import Path

import pytest

import allow_list

ROOT = Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "allow_list.py"))
RESULT = json.loads(sorted((ROOT / "benchmarks" / "results").glob("allow-list-*.json"))[-1].read_text())


def saved_by_hand(sizes, tokens):
    """Bytes that softmax, and gelu, keep less where they run low: 4 of 6 a number, and 2 of 6."""
    heads, width, layers, batch = (sizes[name] for name in ("heads", "width", "layers", "batch"))
    attention, wide = batch * heads * tokens**2 * layers, batch * tokens * 4 * width * layers
    return 4 * attention, 2 * wide


def check(rows, sizes, tokens):
    fp32, products, softmax, both, as_it_is = rows
    fewer = saved_by_hand(sizes, tokens)
    assert products["saved_bytes"] - softmax["saved_bytes"] == fewer[0]
    assert softmax["saved_bytes"] - both["saved_bytes"] == fewer[1]
    assert products["saved_bytes"] - as_it_is["saved_bytes"] == fewer[1]  # gelu is low in O1 as it is
    assert [row["low"] for row in rows] == list(EXAMPLE["POLICIES"])
    assert [row["policy"] for row in rows] == list(EXAMPLE["POLICIES"].values())
    assert all(row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"] and row["seconds"] > 0 for row in rows)
    assert fp32["ratio"] == fp32["ratio_p90"] == 1
    for row in rows:
        assert row["loss"] == pytest.approx(fp32["loss"], rel=1e-2)  # BF16 has 8 bits: 0.4 %


def test_the_bytes_measured_are_those_counted_by_hand(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["allow_list.py", "--tokens=8", "--repetitions=1", f"--out={tmp_path}"])
    allow_list.main()
    (path,) = tmp_path.iterdir()
    assert capsys.readouterr().out == f"{path}\n"
    result = json.loads(path.read_text())
    assert (result["tokens"], result["repetitions"]) == (8, 1)
    check(result["rows"], result, 8)


def test_the_committed_bytes_are_those_counted_by_hand():
    check(RESULT["rows"], RESULT, RESULT["tokens"])
    losses = [row["loss"] for row in RESULT["rows"]]
    assert max(losses) < 1  # from ln 64 on: it has learnt
