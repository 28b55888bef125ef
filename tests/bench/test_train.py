"""Whole training steps: every way trains alike, what is counted is right, nothing that does not train is timed."""

import dataclasses
import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import mezzo
from mezzo.errors import NumericsError
from training import bench_train, ways
from training import train as bench
from training.events import counted, observe
from training.nets import NETS, loss_of
from training.result import TrainRow
from training.ways import WAYS, Task

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
EVERYWHERE = ["fp32", "torch.amp", "mezzo O1", "mezzo O2"]


def task(net="64-tiny", dtype=torch.bfloat16, device=CPU):
    model, batch = NETS[net].make("least", device)
    return Task(name=net, model=model, batch=batch, dtype=dtype, compiled=False)


def started(way, *args, **kwargs):
    return WAYS[way].start(task(*args, **kwargs))


def oracle(net, steps):
    """Losses of AdamW with clipping in float64, written out."""
    model, (inputs, targets) = NETS[net].make("least", CPU)
    model.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    params = list(model.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    losses = []
    for step in range(1, steps + 1):
        loss = loss_of(model(inputs), targets)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, params)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        with torch.no_grad():
            for param, gradient, (first, second) in zip(params, gradients, moments, strict=True):
                gradient = gradient * min(1.0, 1.0 / (norm + 1e-6))
                first.mul_(0.9).add_(0.1 * gradient)
                second.mul_(0.999).add_(0.001 * gradient.square())
                update = first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
                param.mul_(1 - 1e-4 * 0.01).sub_(1e-4 * update)
    return losses


@pytest.mark.parametrize(
    "net, way", [("gpt2-small", "mezzo O1"), ("resnet-50", "mezzo O2"), *(("64-tiny", way) for way in EVERYWHERE)]
)
def test_every_way_trains_as_a_float64_loop_does(net, way):
    training = started(way, net)
    losses, expected = [float(training.step()) for _ in range(4)], oracle(net, 4)
    assert losses[-1] < losses[0]
    if net == "resnet-50":
        # Adam's first step has the gradient's sign and a batch norm over 16 values passes it on: only the loss before
        # it can be foretold. In BF16 53 layers round by 2**-9 each.
        assert losses[0] == pytest.approx(expected[0], rel=1e-4 if way == "fp32" else 53 * 2**-9)
    else:
        assert losses == pytest.approx(expected, rel=1e-4 if way == "fp32" else 2**-7)  # two units of BF16's eight bits


@pytest.mark.parametrize("way", ["torch.amp", "mezzo O1", "mezzo O2"])
def test_every_way_trains_in_float16(way):
    training = started(way, dtype=torch.float16)
    assert [float(training.step()) for _ in range(4)] == pytest.approx(oracle("64-tiny", 4), rel=2**-9)
    assert training.emulated or "mezzo" not in way or torch.cpu._is_amx_fp16_supported()


@pytest.mark.parametrize("way", EVERYWHERE)
def test_each_step_casts_as_it_says_clips_and_leaves_no_gradient(way, monkeypatch):
    """Gradients clipped to far below AdamW's eps move nothing."""
    monkeypatch.setattr(ways, "_MAX_NORM", 1e-14)
    made, seen = task(), []
    training = WAYS[way].start(made)
    made.model.linears[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert [float(training.step()) for _ in range(2)] == pytest.approx([oracle("64-tiny", 1)[0]] * 2, rel=2**-9)
    assert seen == [torch.float32 if way == "fp32" else torch.bfloat16] * 2
    assert all(param.grad is None for param in made.model.parameters())


def test_bytes_held_are_weights_moments_counts_and_batch():
    fp32, split = started("fp32"), started("mezzo O2")
    for training in (fp32, split):
        training.step()
    batch = 4 * 8 * 4 + 4 * 8
    assert fp32.held_bytes() == 352 * 12 + 16 * 4 + batch
    # Half a weight and its other half: the same, with counts and hyper-parameters as device tensors.
    assert 352 * 12 + batch <= split.held_bytes() < 352 * 12 + batch + 200


def test_networks_are_those_of_the_papers():
    with torch.device("meta"):
        made = {name: net.build(**net.sizes["full"]) for name, net in NETS.items()}
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in made.items()}
    assert counts["gpt2-small"] == 124_439_808 + (50304 - 50257) * 768  # transformers' GPT2Model, padded vocabulary
    assert counts["resnet-50"] == 25_557_032  # torchvision's resnet50
    assert sum(isinstance(module, nn.Linear) for module in made["64-tiny"].modules()) == 64


# Counting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", EVERYWHERE)
def test_one_more_item_is_one_more_sync(way):
    training = started(way)
    training.step()
    without = observe(training.step, CPU)
    more = observe(lambda: training.step().item(), CPU)
    assert more.syncs == without.syncs + 1
    assert more.calls == without.calls + 1
    assert without.syncs == 0 or "O2" in way  # torch's fused AdamW reads its step counts on a CPU only


def test_growth_is_the_most_that_was_alive_at_once():
    x = torch.ones(1000)  # 4000 bytes

    def step():
        a = x.exp()
        b = a.sin()  # 8000
        del a
        c = b.cos()  # 4000 freed, 4000 new
        del b, c
        return x.double()  # 8000

    assert observe(step, CPU).growth_bytes == 8000


def test_a_trace_of_a_gpu():
    def event(category, name, start=0, duration=1):
        return {"cat": category, "name": name, "ts": start, "dur": duration, "tid": 1, "args": {}}

    trace = [
        event("cpu_op", "aten::linear", 0, 10), event("cpu_op", "aten::addmm", 2, 5), event("cpu_op", "aten::exp", 20),
        event("cpu_op", "AddmmBackward0", 30, 9), event("cpu_op", "aten::mm", 31),
        event("kernel", "sm90_xmma_gemm"), event("kernel", "exp_kernel"), event("kernel", "triton_poi_fused_0"),
        event("gpu_memcpy", "Memcpy HtoD"), event("gpu_memset", "Memset"), event("gpu_user_annotation", "AdamW.step"),
        event("cuda_runtime", "cudaLaunchKernel"), event("cuda_runtime", "cudaLaunchKernelExC"),
        event("cuda_runtime", "cudaGraphLaunch"), event("cuda_driver", "cuLaunchKernelEx"),
        event("cuda_runtime", "cudaMemcpyAsync"), {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    counts = counted(trace, cuda_syncs=2)
    assert (counts.calls, counts.kernels, counts.launches, counts.syncs, counts.growth_bytes) == (3, 3, 4, 2, None)


# The benchmark --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result():
    return bench_train("64-tiny", size="least", repetitions=2)


def test_every_way_has_a_row_against_torch_amp(result):
    assert [row.name for row in result.rows] == EVERYWHERE
    assert {row.against for row in result.rows} == {"torch.amp"}
    assert [row.ratio for row in result.rows if row.way == "torch.amp"] == [1.0]
    assert [row.first_loss for row in result.rows] == pytest.approx([oracle("64-tiny", 1)[0]] * 4, rel=2**-7)
    assert "fp32 TF32 is left out: the cpu has no TF32" in result.notes
    assert any(note.startswith("mezzo O2 captured is left out") for note in result.notes)
    written = json.loads(json.dumps(result.to_json()))
    assert (written["num_parameters"], written["torch"]) == (4 * (8 * 8 + 8 + 8 + 8), torch.__version__)
    assert set(written["rows"][0]) == {field.name for field in dataclasses.fields(TrainRow)}
    for row in result.rows:
        assert row.ratio_p10 <= row.ratio <= row.ratio_p90
        assert row.items_per_s == pytest.approx(result.items_per_step / (row.step_ms / 1e3))
        assert row.last_loss < row.first_loss
        assert (row.kernels, row.launches, row.compiled, row.tf32) == (None, None, False, False)


def test_a_captured_step_is_made_of_the_step_after_four_calls_that_lead_to_its_graph(monkeypatch):
    captured = []
    monkeypatch.setattr(mezzo, "capture", lambda step, amp: captured.append(amp) or step, raising=False)
    made, plain = map(started, ("mezzo O2 captured", "mezzo O2"))
    losses = [float(plain.step()) for _ in range(6)]
    assert [float(made.step()) for _ in range(2)] == losses[4:]
    assert [type(amp) for amp in captured] == [mezzo.MixedPrecision]
    assert WAYS["mezzo O2 captured"].absent("cuda") == ""
    assert WAYS["mezzo O2 captured"].absent("cpu") == "on the cpu a captured step is the plain call"


def test_what_does_not_train_is_not_timed(monkeypatch):
    def start(made):
        training, number = WAYS["mezzo O1"].start(made), iter(range(1000))
        return dataclasses.replace(training, step=lambda: training.step() + next(number))

    monkeypatch.setattr(bench, "WAYS", dict(WAYS) | {"mezzo O1": dataclasses.replace(WAYS["mezzo O1"], start=start)})
    with pytest.raises(NumericsError, match=r"mezzo O1 does not train(.|\n)*loss from (.|\n)*fp32 trains on the same"):
        bench_train("64-tiny", size="least", repetitions=1, ways=["mezzo O1"])


# The command ----------------------------------------------------------------------------------------------


def test_the_command_prints_json_and_writes_one_dated_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [
        "train.py", "--size", "least", "--device", "cpu", "--repetitions", "1", "--out", str(tmp_path), "--json",
        "--net", "64-tiny", "--ways", "mezzo O1, mezzo O2", "--dtype", "float16",
    ])  # fmt: skip
    runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert [(result["net"], result["dtype"], result["unit"]) for result in printed] == [
        ("64-tiny", "float16", "samples")
    ]
    assert [row["way"] for row in printed[0]["rows"]] == EVERYWHERE
    (written,) = tmp_path.iterdir()
    assert written.name == f"train-cpu-{printed[0]['date']}.json"
    assert json.loads(written.read_text()) == printed
    assert f"written to {written}" in err
