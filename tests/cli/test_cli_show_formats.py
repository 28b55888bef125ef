"""``mezzo show formats`` prints the table of formats and the landmarks of one."""

import json
import math
import re

import pytest
import torch

from mezzo.cli import main
from mezzo.cli.show import landmarks
from mezzo.formats import FORMATS

FACTS_A = """\
0 00000 0000000000 | 0000 | 0
0 00000 0000000001 | 0001 | 5.9604645e-08
0 00000 1111111111 | 03ff | 6.0975552e-05
0 00001 0000000000 | 0400 | 6.1035156e-05
0 01101 0101010101 | 3555 | 0.33325195
0 01110 1111111111 | 3bff | 0.99951172
0 01111 0000000000 | 3c00 | 1
0 01111 0000000001 | 3c01 | 1.0009766
0 11110 1111111111 | 7bff | 65504
0 11111 0000000000 | 7c00 | inf
0 11111 1000000000 | 7e00 | nan
1 00000 0000000000 | 8000 | -0
1 10000 0000000000 | c000 | -2
1 11111 0000000000 | fc00 | -inf"""


def printed(capsys, *arguments):
    """What a shell sees: the exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        main(["show", "formats", *arguments])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_the_table(capsys):
    code, out, err = printed(capsys)
    assert (code, err) == (0, "")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.split()}
    assert rows["format"] == "s/e/m bias max smallest normal smallest subnormal eps infinity"
    assert rows["float16"] == "1/5/10 15 65504 2^-14 ≈ 6.104e-05 2^-24 ≈ 5.96e-08 2^-10 ≈ 0.0009766 yes"
    assert rows["tf32"].startswith("1/8/10 127 3.4011621e+38 ")
    expected = "1/4/3 7 448 2^-6 ≈ 0.01562 2^-9 ≈ 0.001953 2^-3 ≈ 0.125 no, overflow is NaN"
    assert rows["float8_e4m3fn"] == expected
    assert set(FORMATS) <= set(rows)
    assert "\x1b" not in out  # plain where no terminal is


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_no_number_is_cut_in_a_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed(capsys)[1])
    assert max(map(len, plain.splitlines())) <= columns
    assert "…" not in plain
    whole = plain.split()
    assert columns < 80 or {"float8_e4m3fn", "3.4028235e+38", "1.401e-45", "0.0009766"} <= set(whole)


@pytest.mark.parametrize("name", ["fp16", "float16", "half", "torch.float16", "FP16"])
def test_the_landmarks_of_one(capsys, name):
    code, out, err = printed(capsys, name)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].strip() == "float16: 1 sign bit, 5 exponent bits (bias 15), 10 mantissa bits"
    shown = [" ".join(line.split()) for line in lines]
    for row in FACTS_A.splitlines():
        bits, digits, value = row.split(" | ")
        assert sum(line.startswith(f"{bits} {digits} {value} ") for line in shown) == 1, row
    assert any(line.endswith(" nearest to 1/3") for line in shown)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_landmarks_that_fit_a_line(capsys, name):
    _, out, _ = printed(capsys, name)
    number_format = FORMATS[name]
    rows = [line for line in out.splitlines() if line.strip()[:2] in ("0 ", "1 ")]
    assert len(rows) == len(landmarks(number_format))
    widths = [len(word) for word in rows[0].split()[:3]]
    assert widths == [1, number_format.exponent_bits, number_format.mantissa_bits]


def test_json_of_all(capsys):
    code, out, err = printed(capsys, "--json")
    assert (code, err) == (0, "")
    entries = json.loads(out)
    assert [entry["name"] for entry in entries] == list(FORMATS)
    for entry in entries:
        number_format = FORMATS[entry["name"]]
        if number_format.dtype is not None:
            finfo = torch.finfo(number_format.dtype)
            assert (entry["max"], entry["eps"], entry["smallest_normal"]) == (finfo.max, finfo.eps, finfo.tiny)
        for field in ("max", "smallest_normal", "smallest_subnormal", "eps", "bias", "has_inf", "num_bits"):
            assert entry[field] == getattr(number_format, field)
        assert entry["dtype"] == (None if number_format.dtype is None else entry["name"])


def test_json_of_one(capsys):
    _, out, _ = printed(capsys, "e4m3", "--json")
    entry = json.loads(out, parse_constant=pytest.fail)
    assert entry["name"] == "float8_e4m3fn"
    marks = {mark["what"]: mark for mark in entry["landmarks"]}
    assert marks["largest"] == {"bits": "0 1111 110", "hex": "7e", "value": 448.0, "what": "largest"}
    assert marks["NaN"]["value"] == "nan"
    assert math.copysign(1.0, marks["−0"]["value"]) == -1.0


def test_an_unknown_name_is_a_usage_error(capsys):
    code, out, err = printed(capsys, "flaot16")
    assert (code, out) == (2, "")
    assert "unknown number format 'flaot16'" in err
    assert "did you mean 'float16'?" in err
    assert "write  mezzo show formats float16" in err
    assert "by_name" not in err


def test_help_leads_with_examples(capsys):
    code, out, _ = printed(capsys, "--help")
    assert code == 0
    assert "mezzo show formats fp16" in out
    assert "--json" in out
