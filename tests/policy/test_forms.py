"""In-place and out= forms: never cast, and said so."""

import pytest
import torch
from torch.nn import functional

import mezzo
from mezzo import Policy
from mezzo.policy.ops import OPS, is_in_place, out_of_place

IN_PLACE = sorted(
    {name for place in (torch, torch.Tensor, functional, torch._C._nn) for name in dir(place) if is_in_place(name)}
)


def test_every_in_place_form_is_left_alone_and_says_why():
    policy = Policy.O1("float16").low("gelu").keep_fp32(modules=["head"])
    assert len(IN_PLACE) > 150
    changed = 0
    for name in IN_PLACE:
        for module in (None, "head"):
            decision = policy.explain(name, module)
            assert (decision.treatment, decision.rule, decision.source) == ("native", None, "torch"), name
            assert decision.reason.startswith("what an in-place op writes to keeps its dtype"), name
            other = out_of_place(name)
            gets = "native" if other is None else policy.explain(other, module).treatment
            assert (f"; {other}, which returns a new tensor, gets {gets}: " in decision.reason) is (gets != "native")
            changed += gets != "native"
    assert changed > 40
    assert policy.explain("exp_").reason == (
        "what an in-place op writes to keeps its dtype, as in torch.autocast; exp, which returns a new tensor, gets "
        "fp32: exponential range"
    )
    assert policy.explain("__ipow__").reason.endswith("pow, which returns a new tensor, gets fp32: exponential range")
    assert "gets fp32: the rule fp32=exp" in Policy.O2("float16").fp32("exp").explain("exp_").reason


def test_every_out_form_is_left_alone_and_says_why():
    found = 0
    for name in (name for name in OPS if hasattr(torch.ops.aten, name)):
        overloads = getattr(torch.ops.aten, name).overloads()
        for overload in (each for each in overloads if each == "out" or each.endswith("_out")):
            for spelling in (f"aten::{name}.{overload}", f"torch.ops.aten.{name}.{overload}"):
                decision = Policy.O1("float16").explain(spelling)
                assert (decision.treatment, decision.source) == ("native", "torch"), spelling
                assert decision.reason.startswith("what an out= op writes to keeps its dtype"), spelling
                found += 1
    assert found > 400


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_place_forms_of_fp32_ops_compute_in_fp32_and_round(dtype):
    """Why nothing need be cast: what overflows does so because the tensor cannot hold it."""
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 8 + 0.1
    ops = "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan square".split()
    calls = {**dict.fromkeys(ops, ()), "pow": (3,), "cumsum": (1,), "cumprod": (1,), "renorm": (2, 0, 1.0)}
    for op, args in calls.items():
        assert Policy.O1("float16").explain(op).treatment == "fp32"
        low = (x / 8 if op in ("acos", "asin", "erfinv") else x).to(dtype)
        wanted = getattr(low.float(), op)(*args).to(dtype).float()
        with mezzo.autocast(Policy.O1(dtype, emulate=True), "cpu"):
            got = getattr(low.clone(), f"{op}_")(*args)
        assert got.dtype == dtype
        # A kernel may use another instruction for one number than for eight: two units in the last place.
        torch.testing.assert_close(got.float(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
