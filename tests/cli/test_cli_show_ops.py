"""``mezzo show ops`` prints the op table, and what a policy makes of it."""

import json

import pytest

from mezzo import Policy
from mezzo.cli import main
from mezzo.policy.ops import OPS


def printed(capsys, *words):
    """What a shell sees: the exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        main(["show", "ops", *words])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def rows_of(out):
    """Op → the other cells of its line."""
    return {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()}


def test_the_whole_table(capsys):
    code, out, err = printed(capsys, "--full")
    assert (code, err) == (0, "")
    rows = rows_of(out)
    assert set(OPS) <= set(rows)
    assert out.startswith("O1,dtype=bfloat16\n")
    assert rows["op"] == "treatment torch CUDA torch CPU reason whose lists name it".split()
    assert rows["softmax"][:5] == ["fp32", "fp32", "native", "exponential", "range"]
    assert rows["linear"][:4] == ["low", "low", "low", "gemm"]
    assert rows["relu"] == "native native native bandwidth-bound no list names it".split()
    assert "\x1b" not in out  # plain where no terminal is


@pytest.mark.parametrize(
    "spelling", ["softmax", "F.softmax", "aten::softmax.int", "nn.Softmax", "Tensor.softmax", "torch.special.softmax"]
)
def test_one_op_by_any_spelling(capsys, spelling):
    code, out, err = printed(capsys, spelling, "--full")
    assert (code, err) == (0, "")
    assert set(rows_of(out)) & set(OPS) == {"softmax"}
    assert "Fleet black list" in out


def test_a_glob(capsys):
    code, out, err = printed(capsys, "conv?d")
    assert (code, err) == (0, "")
    assert {"conv1d", "conv2d", "conv3d"} == {name for name in rows_of(out) if name.startswith("conv")}


def test_a_policy_decides(capsys):
    policy = "O1,dtype=bfloat16,fp32=conv1d,low=softmax"
    code, out, _ = printed(capsys, "conv?d", "--policy", policy)
    rows = rows_of(out)
    assert code == 0
    assert out.startswith(f"{policy}\n")
    assert rows["conv1d"][:3] == ["fp32", "low", "low"]
    assert rows["conv2d"][:3] == ["low", "low", "low"]
    assert "the rule fp32=conv1d matches first" in out


def test_norms_without_autocast_and_brackets_in_a_policy(capsys):
    _, out, _ = printed(capsys, "layer_norm", "--policy", "O1,norms=fp32_math,fp32_module=[ab]*")
    assert "fp32_module=[ab]*" in out
    assert rows_of(out)["layer_norm"][0] == "fp32_math"
    _, out, _ = printed(capsys, "linear", "--policy", "O2")
    assert rows_of(out)["linear"][0] == "native"
    assert "O2 casts no op" in out


def test_a_policy_file(capsys, tmp_path):
    path = tmp_path / "my.policy"
    Policy.O1("bfloat16").fp32("gelu").save(path)
    code, out, _ = printed(capsys, "gelu", "--policy", str(path))
    assert code == 0
    assert rows_of(out)["gelu"][:3] == ["fp32", "native", "native"]


def test_json(capsys):
    code, out, err = printed(capsys, "conv?d", "--policy", "O1,fp32=conv1d", "--json")
    assert (code, err) == (0, "")
    first, second, _ = json.loads(out)
    assert first == {
        "op": "conv1d", "device": None, "treatment": "fp32", "rule": "fp32=conv1d", "torch_cuda": "low",
        "torch_cpu": "low", "reason": "the rule fp32=conv1d matches first", "source": "policy",
        "lists": OPS["conv1d"].source,
    }  # fmt: skip
    assert (second["rule"], second["treatment"], second["reason"]) == (None, "low", "gemm")
    assert len(json.loads(printed(capsys, "--json")[1])) == len(OPS)


def test_the_device_where_it_matters(capsys):
    """Ops without a low kernel are FP32 on a CPU, and torch's own affair on an accelerator: both are said."""
    _, out, _ = printed(capsys, "fft_rfft")
    assert rows_of(out)["fft_rfft"][:3] == ["fp32", "native", "fp32"]
    assert "no low kernel; on an accelerator left to torch, as in torch.amp" in out
    _, out, _ = printed(capsys, "fft_rfft", "--device", "cuda")
    assert "O1,dtype=bfloat16 on cuda" in out
    assert rows_of(out)["fft_rfft"][:3] == ["native", "native", "fp32"]
    assert "no low kernel; on cuda left to torch, as in torch.amp" in out
    _, out, _ = printed(capsys, "fft_rfft", "--device", "cpu")
    assert rows_of(out)["fft_rfft"][:6] == ["fp32", "native", "fp32", "no", "low", "kernel"]
    assert "left to torch" not in out
    rows = {
        kind: json.loads(printed(capsys, "avg_pool3d", "--device", kind, "--json")[1])[0] for kind in ("cpu", "cuda")
    }
    assert {kind: (row["device"], row["treatment"]) for kind, row in rows.items()} == {
        "cpu": ("cpu", "fp32_math"), "cuda": ("cuda", "native"),
    }  # fmt: skip


def test_an_unknown_device_is_a_usage_error(capsys):
    code, out, err = printed(capsys, "softmax", "--device", "gpu")
    assert (code, out) == (2, "")
    assert err.startswith("mezzo: unknown device type 'gpu'\n")
    assert 'why    torch has no such device type\n  write  "cpu" or "cuda"' in err


def test_paddles_mul_is_a_matrix_product(capsys):
    assert json.loads(printed(capsys, "mul", "--json")[1])[0]["op"] == "mul"
    assert json.loads(printed(capsys, "paddle:mul", "--json")[1])[0]["op"] == "matmul"


def test_an_op_that_torch_has_and_no_list_names(capsys):
    (row,) = json.loads(printed(capsys, "torch.randn", "--json")[1])
    assert (row["treatment"], row["torch_cuda"], row["torch_cpu"]) == ("native", "native", "native")
    assert row["reason"] == "no list names this op"


def test_unknown_names_are_usage_errors(capsys):
    code, out, err = printed(capsys, "sofmax")
    assert (code, out) == (2, "")
    assert "unknown op 'sofmax'" in err
    assert "did you mean 'softmax'?" in err
    code, out, err = printed(capsys, "softmax", "--policy", "O1,fp23=softmax")
    assert (code, out) == (2, "")
    assert "did you mean 'fp32'?" in err


def test_in_place_spellings_are_usage_errors(capsys):
    code, _, err = printed(capsys, "exp_")
    assert code == 2
    assert "the in-place op 'exp_' is never cast" in err
    assert "write  'exp'" in err


def test_a_glob_without_a_match_is_a_usage_error_like_an_unknown_name(capsys):
    assert printed(capsys, "zzz")[0] == 2
    code, out, err = printed(capsys, "zzz*")
    assert (code, out) == (2, "")
    assert err.startswith("mezzo: no op matches 'zzz*'\n")


def test_help_leads_with_examples(capsys):
    code, out, _ = printed(capsys, "--help")
    assert code == 0
    assert out.index("mezzo show ops softmax") < out.index("--json")
    assert "mezzo show ops paddle:mul" in out
