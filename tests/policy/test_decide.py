"""What the op table decides on each device: what regions really do there, said with the reason."""

import pytest
import torch

import mezzo
from mezzo import Policy, PolicyError
from mezzo.cast import differences
from mezzo.cast.device import Choice
from mezzo.policy.ops import OPS, functions

BF16 = Policy.O1("bfloat16", emulate=False)
LEFT_TO_TORCH = "left to torch, as in torch.amp"
POLICIES = {
    "portable": BF16,
    "device": BF16.evolve(lists="device"),
    "norms": BF16.evolve(norms="fp32_math"),
    "rules": BF16.low("softmax").fp32("fft_*").native("exp").fp32_math("avg_pool3d"),
    "O2": Policy.O2("bfloat16", emulate=False),
}


@pytest.fixture
def any_device(monkeypatch):
    """Find differences on devices that are not here, as if they had the arithmetic; such ones are not kept."""
    caches = [each for each in vars(differences).values() if hasattr(each, "cache_clear")]
    monkeypatch.setattr(differences, "arithmetic", lambda *_: Choice(action="native", reason="as if it had"))
    for cache in caches:
        cache.cache_clear()
    yield differences.find_differences
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_explained_is_what_a_region_does(policy, device_type, any_device):
    handlers = any_device(policy, device_type).handlers
    wrong = {}
    for name, row in OPS.items():
        explained = policy.explain(name, device_type=device_type).treatment
        done = {handlers[function].treatment for function in functions(name) if function in handlers}
        if not done and functions(name):  # torch's own, or nobody's
            done = {getattr(row, device_type) if policy.autocast else "native"}
        if done and done != {explained}:
            wrong[name] = (explained, done)
    assert wrong == {}


def test_an_accelerator_needs_no_mode_for_the_portable_lists(any_device):
    assert any_device(BF16, "cuda").handlers == {}


def test_ops_outside_torch_s_cuda_lists_are_torch_s_on_an_accelerator():
    left = {name for name in OPS if BF16.explain(name, device_type="cuda").source == "torch"}
    assert {"fft_rfft", "linalg_inv", "stft", "ctc_loss", "quantile"} <= left
    assert left == {name for name, row in OPS.items() if row.portable != "native" and row.cuda == "native"}
    for name in left:
        row = OPS[name]
        without, cpu, cuda, other = (BF16.explain(name, device_type=kind) for kind in (None, "cpu", "cuda", "xpu"))
        assert (without.treatment, cpu.treatment, cuda.treatment) == (row.portable, row.portable, "native")
        assert without.reason == f"{row.reason}; on an accelerator {LEFT_TO_TORCH}"
        assert (cpu.reason, cpu.source, without.source) == (row.reason, "op table", "op table")
        assert cuda.reason == f"{row.reason}; on cuda {LEFT_TO_TORCH}"
        assert other.reason == f"{row.reason}; on xpu {LEFT_TO_TORCH}"


def test_a_rule_reaches_them_on_every_device():
    policy = BF16.fp32("fft_rfft")
    decisions = {policy.explain("fft_rfft", device_type=kind) for kind in (None, "cpu", "cuda")}
    assert [(each.treatment, each.reason) for each in decisions] == [("fp32", "the rule fp32=fft_rfft matches first")]


def test_norms_in_fp32_math_need_the_mode_anyway():
    """With it on, an accelerator gets the whole table."""
    policy = BF16.evolve(norms="fp32_math")
    for kind in (None, "cpu", "cuda"):
        decision = policy.explain("fft_rfft", device_type=kind)
        assert (decision.treatment, decision.reason) == ("fp32", "no low kernel")


def test_ops_that_a_cpu_computes_in_fp32_inside():
    row = OPS["avg_pool3d"]
    cpu, cuda, without = (BF16.explain("avg_pool3d", device_type=kind) for kind in ("cpu", "cuda", None))
    assert (cpu.treatment, cpu.reason) == ("fp32_math", f"{row.reason}; on cpu FP32 inside, the input's dtype out")
    assert (cuda.treatment, cuda.reason) == ("native", row.reason)
    assert (without.treatment, without.reason) == (
        "native",
        f"{row.reason}; on a CPU FP32 inside, the input's dtype out",
    )
    image = torch.randn(1, 1, 4, 4, 4).bfloat16()
    with mezzo.autocast(BF16, "cpu"):
        pooled = torch.nn.functional.avg_pool3d(image, 2)
    assert torch.equal(pooled, torch.nn.functional.avg_pool3d(image.float(), 2).bfloat16())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="says what a machine without an accelerator answers")
def test_device_lists_name_the_other_device():
    policy = POLICIES["device"]
    softmax = policy.explain("softmax")
    assert (softmax.treatment, softmax.reason) == ("native", "exponential range; on an accelerator fp32")
    assert policy.explain("softmax", device_type="cuda").reason == "exponential range"
    assert policy.explain("linear").reason == "gemm"


def test_most_ops_are_the_same_on_every_device():
    same = [name for name in OPS if len({BF16.explain(name, device_type=kind) for kind in (None, "cpu", "cuda")}) == 1]
    assert len(same) > 400
    assert {"linear", "softmax", "layer_norm", "mse_loss", "relu", "cat"} <= set(same)


def test_a_device_index_is_no_other_device():
    assert BF16.explain("fft_rfft", device_type="cuda:0").treatment == "native"


def test_an_unknown_device_is_refused():
    with pytest.raises(PolicyError, match="unknown device type 'gpu'") as caught:
        BF16.explain("softmax", device_type="gpu")
    assert "why    torch has no such device type" in str(caught.value)
    assert 'write  "cpu" or "cuda"' in str(caught.value)
