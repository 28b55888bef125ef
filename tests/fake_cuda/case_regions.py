"""What a region does on a machine with a GPU: which devices it covers, what it probes, and torch's GEMM flags."""

import itertools

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import mezzo
from mezzo.cast import differences, region
from mezzo.cast.device import decide


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Device types that were probed; where a fork protects this process, it is the CPU's report that asks for it."""
    device_types = []
    plain = decide.probe
    monkeypatch.setattr(
        decide, "probe", lambda device_type="cpu", **kw: device_types.append(device_type) or plain(device_type, **kw)
    )
    differences._find.cache_clear()  # or an earlier test has asked
    return device_types


def model_on(device_type):
    with torch.device(device_type):
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))


def session(policy, device_type="cuda"):
    model = model_on(device_type)
    return model, mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def test_a_session_on_the_gpu_has_no_mode_and_asks_nothing_of_the_cpu(machine, asked):
    model, amp = session("O3,dtype=float16")
    modes = []
    model[3].register_forward_hook(lambda *_: modes.extend(_get_current_function_mode_stack()))
    with amp.autocast() as covered:
        loss = model(torch.randn(4, 8, device="cuda")).float().sum()
    model[0].weight.register_hook(lambda gradient: modes.extend(_get_current_function_mode_stack()))
    amp.backward(loss)
    assert covered.device_types == ("cuda",)
    assert not covered.has_differences
    assert modes == []
    assert "cpu" not in asked


def test_a_model_on_both_is_covered_on_both(machine):
    model = nn.Sequential(model_on("cpu"), model_on("cuda"))
    assert mezzo.prepare(model, "O1,dtype=bfloat16,emulate=true").autocast().device_types == ("cpu", "cuda")
    _, amp = session("O1,dtype=bfloat16,emulate=true", "cpu")
    assert amp.autocast().device_types == ("cpu",)


def test_a_model_without_tensors_and_a_bare_region_are_on_the_accelerator(machine, asked):
    assert mezzo.prepare(nn.GELU(), "O1,dtype=bfloat16").autocast().device_types == ("cuda",)
    assert mezzo.autocast("O1,dtype=bfloat16").device_types == ("cuda",)
    assert "cpu" not in asked
    assert mezzo.autocast("O1,dtype=bfloat16,emulate=true", "cpu").device_types == ("cpu",)


def test_what_torch_refuses_without_a_mode_names_the_rule_that_decides(machine):
    x, y, index = torch.zeros(4, 2), torch.ones(1, 2).bfloat16(), torch.zeros(1, dtype=torch.int64)
    for op, write, treatment in (
        ("index_add", lambda: x.index_add_(0, index, y), "fp32_math"),
        ("index_put", lambda: x.index_put_((index,), y), "promote"),
        ("scatter", lambda: x.scatter_(0, index[None], y), "promote"),
        ("masked_scatter", lambda: x.masked_scatter(x == 0, y), "promote"),
    ):
        # The device here checks no dtypes; the CPU, which this region does not cover, has the same words.
        with pytest.raises(RuntimeError) as caught, mezzo.autocast("O1,dtype=bfloat16", "cuda") as region:
            write()
        assert not region.has_differences
        (note,) = caught.value.__notes__
        assert note.startswith(f"On cuda {op} is left to torch, as in torch.amp; a rule decides: ")
        assert f"{treatment}={op}" in note


# torch's flags for accumulation in GEMMs -----------------------------------------------------------------------


@pytest.fixture
def flags():
    before = region.reductions()
    yield lambda: (region.reductions()[0], region.reductions()[1])
    region.set_reductions(before)


SPLIT_K = [(True, True), (False, True), (False, False)]


def test_a_region_forbids_reduced_accumulation_and_gives_back_what_the_user_set(flags):
    for fp16, bf16 in itertools.product(SPLIT_K, repeat=2):
        region.set_reductions([fp16, bf16])
        with mezzo.autocast("O1,dtype=float16", "cuda"):
            assert flags() == ((False, fp16[1]), (False, bf16[1]))
        assert flags() == (fp16, bf16)
        with mezzo.autocast("O1,dtype=float16,lists=device", "cuda"):
            assert flags() == (fp16, bf16)


SEEN = []


@torch.library.custom_op("mezzo_fake_cuda::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    """Write down torch's flags while compiled code runs."""
    SEEN.append(tuple(reduced for reduced, _ in region.reductions()))
    return x.clone()


@look.register_fake
def _(x):
    return torch.empty_like(x)


def elsewhere(x):
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true", "cpu"):
        return look(x) @ x


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize("way", ["called", "aot_eager"])
def test_a_region_that_covers_no_gpu_leaves_its_flags_alone_and_may_be_compiled(flags, way):
    region.set_reductions([(True, True), (True, True)])
    run = elsewhere if way == "called" else torch.compile(elsewhere, backend=way)
    SEEN.clear()
    run(torch.ones(4, 4))
    assert {*SEEN} == {(True, True)}
    assert flags() == ((True, True), (True, True))
