"""``mezzo show formats`` and ``mezzo show ops``: the tables, one of their rows, and what a policy makes of it."""

import json
import re

import pytest
import torch

from mezzo import Policy
from mezzo.cli import main
from mezzo.formats import BLOCK_FORMATS, FORMATS, NVFP4
from mezzo.policy.ops import OPS


def printed(capsys, *arguments, table="formats"):
    """What a shell sees: the exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        main(["show", table, *arguments])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_the_table_of_formats(capsys):
    code, out, err = printed(capsys)
    assert (code, err) == (0, "")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.split()}
    assert rows["format"] == "s/e/m bias max smallest normal smallest subnormal eps beyond"
    assert rows["float16"] == "1/5/10 15 65504 2^-14 ≈ 6.104e-05 2^-24 ≈ 5.96e-08 2^-10 ≈ 0.0009766 inf"
    assert rows["tf32"].startswith("1/8/10 127 3.4011621e+38 ")
    expected = "1/4/3 7 448 2^-6 ≈ 0.01562 2^-9 ≈ 0.001953 2^-3 ≈ 0.125 NaN"
    assert rows["float8_e4m3fn"] == expected
    assert set(FORMATS) | set(BLOCK_FORMATS) <= set(rows)
    assert rows["float4_e2m1fn"] == "1/2/1 1 6 2^0 ≈ 1 2^-1 ≈ 0.5 2^-1 ≈ 0.5 max"
    assert rows["float8_e8m0fnu"] == "0/8/0 127 1.7014118e+38 2^-127 ≈ 5.877e-39 none 2^0 ≈ 1 NaN"
    assert rows["nvfp4_2d"] == "float4_e2m1fn 16×16 float8_e4m3fn, and one for the tensor 4.03125"
    assert rows["rowwise_e4m3"] == "float8_e4m3fn a row float32, floored 8"
    assert "\x1b" not in out  # plain where no terminal is


def test_no_number_is_cut_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    for columns in (60, 80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        plain = re.sub(r"\x1b\[[\d;]*m", "", printed(capsys)[1])
        assert max(map(len, plain.splitlines())) <= columns
        assert "…" not in plain
        assert columns < 80 or {"float8_e4m3fn", "3.4028235e+38", "1.401e-45", "0.0009766"} <= set(plain.split())


def test_the_landmarks_of_one(capsys):
    code, out, err = printed(capsys, "fp16")
    assert (code, err) == (0, "")
    assert {printed(capsys, name)[1] for name in ("float16", "half", "torch.float16", "FP16")} == {out}
    lines = out.splitlines()
    assert lines[0].strip() == "float16: 1 sign bit, 5 exponent bits (bias 15), 10 mantissa bits"
    shown = [" ".join(line.split()) for line in lines]
    for bits, digits, value in (
        ("0 00000 0000000001", "0001", "5.9604645e-08"), ("0 00001 0000000000", "0400", "6.1035156e-05"),
        ("0 11110 1111111111", "7bff", "65504"), ("0 11111 1000000000", "7e00", "nan"),
        ("1 00000 0000000000", "8000", "-0"), ("1 11111 0000000000", "fc00", "-inf"),
    ):  # fmt: skip
        assert sum(line.startswith(f"{bits} {digits} {value} ") for line in shown) == 1, bits
    assert any(line.endswith(" nearest to 1/3") for line in shown)
    entry = json.loads(printed(capsys, "e4m3", "--json")[1], parse_constant=pytest.fail)
    marks = {mark["what"]: mark for mark in entry["landmarks"]}
    assert marks["largest"] == {"bits": "0 1111 110", "hex": "7e", "value": 448.0, "what": "largest"}
    assert (entry["name"], marks["NaN"]["value"]) == ("float8_e4m3fn", "nan")


def test_json_of_all(capsys):
    code, out, err = printed(capsys, "--json")
    assert (code, err) == (0, "")
    entries = json.loads(out)
    assert [entry["name"] for entry in entries] == [*FORMATS, *BLOCK_FORMATS]
    for entry in entries[: len(FORMATS)]:
        number_format = FORMATS[entry["name"]]
        if number_format.dtype is not None:
            finfo = torch.finfo(number_format.dtype)
            assert (entry["max"], entry["smallest_normal"]) == (finfo.max, finfo.tiny)
            assert entry["eps"] == finfo.eps or entry["name"] == "float8_e8m0fnu"  # torch says ½ of E8M0
        for field in (
            "max",
            "smallest_normal",
            "smallest_subnormal",
            "eps",
            "bias",
            "has_inf",
            "has_nan",
            "signed",
            "num_bits",
        ):
            assert entry[field] == getattr(number_format, field)
        assert entry["dtype"] == (None if number_format.dtype is None else entry["name"])
    for entry in entries[len(FORMATS) :]:
        own = BLOCK_FORMATS[entry["name"]]
        assert (entry["element"], entry["scale"]) == (own.element.name, own.scale.name)
        assert (entry["tensor_scale"], entry["floored"]) == (own.tensor_scale, own.floored)
        assert entry["block"] == (list(own.block) if isinstance(own.block, tuple) else own.block)


def test_a_block_format_and_small_formats_by_name(capsys):
    code, out, err = printed(capsys, "NVFP4")
    assert (code, err) == (0, "")
    assert len([line for line in out.splitlines() if "float4_e2m1fn" in line]) == 1
    assert json.loads(printed(capsys, "nvfp4", "--json")[1])["bits_per_element"] == NVFP4.bits_per_element == 4.5
    shown = [" ".join(line.split()) for line in printed(capsys, "e2m1")[1].splitlines()]
    assert shown[0] == "float4_e2m1fn: 1 sign bit, 2 exponent bits (bias 1), 1 mantissa bits"
    assert {"0 00 1 1 0.5 smallest subnormal, largest subnormal, nearest to 1/3, largest below one",
            "0 11 1 7 6 largest", "1 10 0 c -2 −2"} <= set(shown)  # fmt: skip
    shown = [" ".join(line.split()) for line in printed(capsys, "e8m0")[1].splitlines()]
    assert shown[0] == "float8_e8m0fnu: no sign bit, 8 exponent bits (bias 127), 0 mantissa bits"
    assert {"00000000 00 5.8774718e-39 smallest", "01111111 7f 1 one", "11111111 ff nan NaN"} <= set(shown)
    assert not any("−" in line for line in shown[1:] if line[:1] != "─")


# Ops ------------------------------------------------------------------------------------------------------


def of_ops(capsys, *words):
    return printed(capsys, *words, table="ops")


def rows_of(out):
    """Op → the other cells of its line."""
    return {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()}


def test_the_whole_table_of_ops(capsys):
    code, out, err = of_ops(capsys, "--full")
    assert (code, err) == (0, "")
    rows = rows_of(out)
    assert set(OPS) <= set(rows)
    assert out.startswith("O1,dtype=bfloat16\n")
    assert rows["op"] == "treatment torch CUDA torch CPU reason whose lists name it".split()
    assert rows["softmax"][:5] == ["fp32", "fp32", "native", "exponential", "range"]
    assert rows["linear"][:4] == ["low", "low", "low", "gemm"]
    assert rows["relu"] == "native native native bandwidth-bound no list names it".split()
    assert "\x1b" not in out  # plain where no terminal is


def test_one_op_by_any_spelling(capsys):
    for spelling in ("softmax", "F.softmax", "aten::softmax.int", "nn.Softmax", "Tensor.softmax"):
        code, out, err = of_ops(capsys, spelling, "--full")
        assert (code, err) == (0, "")
        assert set(rows_of(out)) & set(OPS) == {"softmax"}, spelling
        assert "Fleet black list" in out


def test_a_policy_decides(capsys, tmp_path):
    policy = "O1,dtype=bfloat16,fp32=conv1d,low=softmax"
    code, out, _ = of_ops(capsys, "conv?d", "--policy", policy)
    rows = rows_of(out)
    assert code == 0
    assert out.startswith(f"{policy}\n")
    assert rows["conv1d"][:3] == ["fp32", "low", "low"]
    assert rows["conv2d"][:3] == ["low", "low", "low"]
    assert "the rule fp32=conv1d matches first" in out
    Policy.O1("bfloat16").fp32("gelu").save(tmp_path / "my.policy")
    assert rows_of(of_ops(capsys, "gelu", "--policy", str(tmp_path / "my.policy"))[1])["gelu"][0] == "fp32"
    _, out, _ = of_ops(capsys, "layer_norm", "--policy", "O1,norms=fp32_math,fp32_module=[ab]*")
    assert "fp32_module=[ab]*" in out
    assert rows_of(out)["layer_norm"][0] == "fp32_math"
    assert "O3 casts no op" in of_ops(capsys, "linear", "--policy", "O3")[1]


def test_ops_as_json(capsys):
    code, out, err = of_ops(capsys, "conv?d", "--policy", "O1,fp32=conv1d", "--json")
    assert (code, err) == (0, "")
    first, second, _ = json.loads(out)
    assert first == {
        "op": "conv1d", "device": None, "treatment": "fp32", "rule": "fp32=conv1d", "torch_cuda": "low",
        "torch_cpu": "low", "reason": "the rule fp32=conv1d matches first", "source": "policy",
        "lists": OPS["conv1d"].source,
    }  # fmt: skip
    assert (second["rule"], second["treatment"], second["reason"]) == (None, "low", "gemm")
    assert len(json.loads(of_ops(capsys, "--json")[1])) == len(OPS)


def test_the_device_where_it_matters(capsys):
    """Ops without a low kernel are FP32 on a CPU, and torch's own affair on an accelerator: both are said."""
    _, out, _ = of_ops(capsys, "fft_rfft")
    assert rows_of(out)["fft_rfft"][:3] == ["fp32", "native", "fp32"]
    assert "no low kernel; on an accelerator left to torch, as in torch.amp" in out
    _, out, _ = of_ops(capsys, "fft_rfft", "--device", "cuda")
    assert "O1,dtype=bfloat16 on cuda" in out
    assert rows_of(out)["fft_rfft"][:3] == ["native", "native", "fp32"]
    assert "no low kernel; on cuda left to torch, as in torch.amp" in out
    _, out, _ = of_ops(capsys, "fft_rfft", "--device", "cpu")
    assert rows_of(out)["fft_rfft"][:6] == ["fp32", "native", "fp32", "no", "low", "kernel"]
    assert "left to torch" not in out
    rows = {
        device: json.loads(of_ops(capsys, "avg_pool3d", "--device", device, "--json")[1])[0]
        for device in ("cpu", "cuda")
    }
    assert {device: (row["device"], row["treatment"]) for device, row in rows.items()} == {
        "cpu": ("cpu", "fp32_math"), "cuda": ("cuda", "native"),
    }  # fmt: skip


def test_paddles_mul_is_a_matrix_product_and_ops_of_no_list_are_native(capsys):
    assert json.loads(of_ops(capsys, "mul", "--json")[1])[0]["op"] == "mul"
    assert json.loads(of_ops(capsys, "paddle:mul", "--json")[1])[0]["op"] == "matmul"
    (row,) = json.loads(of_ops(capsys, "torch.randn", "--json")[1])
    assert (row["treatment"], row["torch_cuda"], row["torch_cpu"]) == ("native", "native", "native")
    assert row["reason"] == "no list names this op"
