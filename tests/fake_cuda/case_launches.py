"""What one step launches, uploads and allocates, eager and captured: bounds that no number of tensors may move."""

import dataclasses

import pytest
import torch
import triton

from mezzo import launched
from mezzo.session.capture import Captured
from mezzo.step.executors import choose, portable, triton_source
from mezzo.step.executors import triton as launch

from .case_sessions import FIRST, Trained
from .machine import Graph

#: By policy and optimizer: mezzo's own launches, and so many small ones beside them. One writes the counts of steps,
#: which are computed first: a step that is refused half-way has not counted. A scale moves by one more.
LAUNCHES = {
    ("O1 fp16", "AdamW", "plain"): (["squares", "roots", "adamw_plain"], 5),
    ("O2 fp16", "AdamW", "unscaled"): (["squares", "roots", "adamw_split", "adamw_plain"], 9),
    ("O3 bf16", "moments", "plain"): (["squares", "roots", "adamw_plain"], 4),  # no remainders: plain BF16 weights
    ("O2 bf16", "moments", "plain"): (["squares", "roots", "adamw_split", "adamw_plain"], 4),
    # With torch's optimizers all are counted, those over whole tensors too: of its own step three.
    ("O2 fp16", "fused AdamW", "plain"): (["widen_read", "store_split"], 8),
}


def one_step(machine, trained):
    """What ``amp.step()`` asks of the device, and ``amp.unscale_()`` before it: after what happens only once."""
    for _ in range(FIRST):
        trained.step()
    trained.backward_all()
    with machine.watched() as record:
        if trained.way == "unscaled":
            trained.amp.unscale_()
        trained.amp.step()
    trained.amp.zero_grad()
    return record


@pytest.mark.parametrize("policy, optimizer, way", LAUNCHES, ids=map(" / ".join, LAUNCHES))
def test_a_step_launches_no_more_for_many_tensors_than_for_few(machine, policy, optimizer, way):
    trained = [Trained(policy, optimizer, way, layers=layers) for layers in (1, 3)]
    few, many = (one_step(machine, loop) for loop in trained)
    mine, small = LAUNCHES[policy, optimizer, way]
    assert few.triton == many.triton == mine
    assert few.small == many.small
    assert len(few.small) == small
    assert few.reads == many.reads == []
    if optimizer != "fused AdamW" and way == "plain":  # gradients that moved are uploaded once for both passes
        assert len(many.uploads) <= (1 if "adamw_split" not in mine else 3)  # in halves and plain: a table for each
        assert not [
            line for line in many.pinned if "executors/triton.py" not in line and "session/stats.py" not in line
        ]
    if optimizer == "moments":
        moments = [state[name] for state in trained[0].optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert {moment.dtype for moment in moments} == {torch.bfloat16}


def test_triton_describes_the_arguments_of_a_kernel_once(machine, monkeypatch):
    from triton.runtime.jit import JITFunction

    trained, described = Trained("O1 fp16", "AdamW", layers=2), []
    for _ in range(FIRST):
        trained.step()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: described.append(kernel.__name__))
    with machine.watched() as record:
        trained.step()
    assert record.triton == ["squares", "roots", "adamw_plain"]
    assert described == []


@pytest.fixture
def unknown(monkeypatch):
    """Forget what is known of kernels, before and after."""

    def forget():
        for cache in (
            choose._working,
            choose._shared_on,
            portable.warn_once,
            triton_source.update_source,
            launched._scope,
        ):
            cache.cache_clear()

    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.usefixtures("unknown")
def test_kernels_are_compiled_before_anything_is_written_and_once(machine, monkeypatch):
    kernels = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_cache_hook",
        lambda *, fn, is_manual_warmup, **_: kernels.append((fn.name.rpartition(".")[2], is_manual_warmup)),
    )
    trained = Trained("O2 fp16", "AdamW")
    for _ in range(FIRST):
        trained.step()
    names = [name for name, is_early in kernels if is_early]
    assert {"adamw_split", "adamw_plain", "numbers_of_step"} <= set(names)
    late = {name for name, is_early in kernels if not is_early}
    assert late <= {"squares", "roots", "largest", "quantise"}  # those of pass 1 are launched before pass 2
    assert len(names) == len(set(names))


@pytest.mark.usefixtures("unknown")
def test_what_a_release_of_triton_does_not_compile_goes_by_torch_s_operations(machine, monkeypatch, caplog):
    for module, name in ((triton_source, "TRITON"), (launch, "NUMBERS")):
        known = getattr(module, name)
        lines = {**known.operations, "aten.sqrt.default of torch.float32": "tl.root_of({0})"}
        lines["aten.pow.Tensor_Tensor of torch.float64"] = "libdevice.power_of({0}, {1})"
        monkeypatch.setattr(module, name, dataclasses.replace(known, operations=lines))
    trained = Trained("O2 fp16", "AdamW")
    for _ in range(FIRST):
        trained.step()
    with machine.watched() as record:
        trained.step()
    assert not {"adamw_split", "adamw_plain", "numbers_of_step"} & set(record.triton)
    messages = [
        entry.getMessage() for entry in caplog.records if "optimizer steps go on by torch's own" in entry.getMessage()
    ]
    assert len(messages) == 3  # of three kernels
    for text, (kernel, word) in zip(
        sorted(messages), (*[("adamw_", "root_of")] * 2, ("numbers_of_step", "power_of")), strict=True
    ):
        assert f"since Triton {triton.__version__} cannot compile {kernel}" in text
        assert word in text


@pytest.mark.usefixtures("unknown")
def test_shared_numbers_that_triton_does_not_compile_go_by_torch_s_operations(machine, monkeypatch, caplog):
    lines = {**launch.NUMBERS.operations, "aten.pow.Tensor_Tensor of torch.float64": "libdevice.power_of({0}, {1})"}
    monkeypatch.setattr(launch, "NUMBERS", dataclasses.replace(launch.NUMBERS, operations=lines))
    trained = Trained("O1 fp16", "AdamW")
    for _ in range(FIRST):
        trained.step()
    with machine.watched() as record:
        trained.step()
    assert record.triton == ["squares", "roots", "adamw_plain"]
    (message,) = [entry.getMessage() for entry in caplog.records if "cannot compile" in entry.getMessage()]
    assert f"since Triton {triton.__version__} cannot compile numbers_of_step" in message
    assert "power_of" in message


@pytest.mark.parametrize("policy, optimizer", [("O1 fp16", "AdamW"), ("O2 fp16", "Lion"), ("O2 fp16", "Muon")])
def test_a_captured_step_uploads_nothing_in_its_graph_and_allocates_nothing_in_its_replays(machine, policy, optimizer):
    trained, graph = Trained(policy, optimizer), Graph(machine)
    trained.step()

    def train_step(x):
        trained.batch = x
        return trained.step().grad_norm

    captured = Captured(train_step, trained.amp, graph)
    for _ in range(4):
        captured(trained.batch)
    assert graph.recorded.reads == graph.recorded.uploads == graph.recorded.downloads == graph.recorded.pinned == []
    with torch.device("cuda"):
        batch = torch.randn(8, 16)
    for _ in range(2):
        captured(batch)
    with machine.watched() as replayed:
        for _ in range(3):
            captured(batch)
    assert replayed.kernels.count("replay") == 3
    assert len(replayed.kernels) <= 3 * 5  # the batch's copy, hyper-parameters that moved
    assert replayed.reads == replayed.uploads == []
    assert len(replayed.pinned) == len([line for line in replayed.pinned if " at session/stats.py" in line]) == 3


@pytest.mark.parametrize("optimizer", ["AdamW", "fused AdamW"])
def test_to_store_the_weights_of_a_session_the_host_waits_for_nothing(machine, optimizer):
    with machine.watched() as record:
        Trained("O2 fp16", optimizer, layers=3)
    assert not [read for read in record.reads if " at weights/" in read or " at step/" in read]
