"""The autocast region: torch.autocast, plus only the policy's differences."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import mezzo
from mezzo import Policy, PolicyError, UnsupportedError
from mezzo.cast.device import decide

BF16 = Policy.O1("bfloat16", emulate=False)
x = torch.randn(6, 8)
w = torch.randn(8, 8)


def modes():
    return len(_get_current_function_mode_stack())


def test_portable_lists_give_cuda_dtypes_on_a_cpu():
    with mezzo.autocast(BF16, "cpu"):
        low = functional.linear(x, w)
        assert low.dtype == torch.bfloat16
        assert low.softmax(-1).dtype == torch.float32
        assert functional.softmax(low, -1).dtype == torch.float32
        assert torch.exp(low).dtype == torch.float32
        assert (low**2).dtype == torch.float32
        assert low.sum().dtype == torch.float32
        assert functional.layer_norm(low, (8,)).dtype == torch.float32
        assert torch.norm(low).dtype == torch.float32
        assert torch.relu(low).dtype == functional.gelu(low).dtype == low.mean().dtype == torch.bfloat16
        assert (low @ low.T).dtype == torch.einsum("ij,kj->ik", low, low).dtype == torch.bfloat16
        assert torch.cat([low, x]).dtype == torch.addcmul(low, x, low).dtype == torch.float32


def test_both_low_formats_meet_in_fp32():
    """As on CUDA; torch's autocast on a CPU refuses the two together."""
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true"):
        joined = torch.cat([torch.ones(2).half(), torch.full((2,), 3.0).bfloat16()])
    assert joined.dtype == torch.float32
    assert joined.tolist() == [1, 1, 3, 3]


def test_device_lists_are_torch_s_own_and_need_no_mode():
    policy = BF16.evolve(lists="device")
    with mezzo.autocast(policy, "cpu"):
        assert modes() == 0
        mine = [functional.linear(x, w).softmax(-1), torch.exp(x), torch.cat([x, functional.linear(x, w)])]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = [functional.linear(x, w).softmax(-1), torch.exp(x), torch.cat([x, functional.linear(x, w)])]
    for mine_out, their_out in zip(mine, theirs, strict=True):
        assert mine_out.dtype == their_out.dtype
        assert torch.equal(mine_out, their_out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("emulate", [True, False])
def test_differing_ops_equal_the_manual_cast_bit_for_bit(dtype, emulate):
    low_dtype = getattr(torch, dtype)
    low = x.to(low_dtype)
    with mezzo.autocast(Policy.O1(dtype, emulate=emulate), "cpu"):
        got = {
            "softmax": low.softmax(-1), "exp": torch.exp(low), "sum": low.sum(0), "log": torch.log(low.abs()),
            "layer_norm": functional.layer_norm(low, (8,)), "cumsum": low.cumsum(0),
            "mse_loss": functional.mse_loss(low, x), "prod": low.prod(1),
        }  # fmt: skip
    wide = low.float()
    want = {
        "softmax": wide.softmax(-1), "exp": torch.exp(wide), "sum": wide.sum(0), "log": torch.log(wide.abs()),
        "layer_norm": functional.layer_norm(wide, (8,)), "cumsum": wide.cumsum(0),
        "mse_loss": functional.mse_loss(wide, x), "prod": wide.prod(1),
    }  # fmt: skip
    for op in want:
        assert got[op].dtype == torch.float32, op
        assert torch.equal(got[op], want[op]), op


def test_rules_decide_first():
    policy = BF16.low("softmax").fp32("linear").fp32_math("layer_norm").promote("mm").native("bmm")
    low = x.bfloat16()
    with mezzo.autocast(policy, "cpu"):
        assert x.softmax(-1).dtype == torch.bfloat16
        assert functional.linear(low, w.bfloat16()).dtype == torch.float32
        normed = functional.layer_norm(low, (8,))
        assert normed.dtype == torch.bfloat16
        assert torch.equal(normed, functional.layer_norm(low.float(), (8,)).bfloat16())
        assert torch.mm(low, w).dtype == torch.float32
        assert torch.mm(low, w.bfloat16()).dtype == torch.bfloat16
        assert torch.bmm(x[None], w[None]).dtype == torch.float32
        assert torch.bmm(low[None], w.bfloat16()[None]).dtype == torch.bfloat16


def test_a_rule_decides_about_ops_that_torch_knows_by_their_parts_alone():
    low = x.bfloat16()
    with mezzo.autocast(BF16.native("norm", "tensordot", "linalg_multi_dot", "inner").fp32("pad"), "cpu"):
        assert torch.norm(low).dtype == torch.bfloat16
        assert torch.norm(x).dtype == torch.float32
        for product in (torch.tensordot(x, w, 1), torch.linalg.multi_dot([x, w, w]), torch.inner(x, w)):
            assert product.dtype == torch.float32
        assert functional.pad(low, (1, 1)).dtype == functional.pad(low, (1, 1), mode="reflect").dtype == torch.float32


@pytest.mark.parametrize("name, given", [("sort", -1), ("topk", 2), ("median", -1), ("cummax", -1), ("std_mean", -1)])
def test_fp32_inside_gives_every_part_of_a_result_in_the_inputs_dtype(name, given):
    low = x.bfloat16()
    with mezzo.autocast(BF16.fp32_math(name), "cpu"):
        mine = getattr(torch, name)(low, given)
    theirs = getattr(torch, name)(low.float(), given)
    assert type(mine) is type(theirs)
    for part, wanted in zip(mine, theirs, strict=True):
        wanted = wanted.bfloat16() if wanted.is_floating_point() else wanted
        assert part.dtype == wanted.dtype
        assert torch.equal(part, wanted)


def test_a_rule_reaches_inside_python_functions():
    class Seen(TorchFunctionMode):
        dtypes = ()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "softmax":
                self.dtypes += (out.dtype,)
            return out

    query = x[None].bfloat16()
    for policy, expected in [(BF16, torch.float32), (BF16.low("softmax"), torch.bfloat16)]:
        with Seen() as seen, mezzo.autocast(policy, "cpu"):
            out = functional.gumbel_softmax(query, hard=False)
        assert out.dtype == expected
        assert expected in seen.dtypes
    with mezzo.autocast(BF16.low("norm", "linalg_vector_norm"), "cpu"):
        assert functional.normalize(query).dtype == torch.bfloat16


def test_banned_ops_say_what_to_use():
    probabilities, target = torch.rand(4), torch.rand(4)
    with (
        mezzo.autocast(BF16, "cpu"),
        pytest.raises(UnsupportedError, match="binary_cross_entropy_with_logits") as caught,
    ):
        functional.binary_cross_entropy(probabilities, target)
    assert 'policy.fp32("binary_cross_entropy")' in str(caught.value)
    with mezzo.autocast(BF16.fp32("binary_cross_entropy"), "cpu"):
        loss = functional.binary_cross_entropy(probabilities.bfloat16(), target)
    assert loss.dtype == torch.float32


def test_float64_complex_and_integers_are_never_cast():
    double, compl, integer = x.double(), x.to(torch.complex64), torch.arange(4)
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true", "cpu"):
        assert torch.exp(double).dtype == torch.float64
        assert (double @ w.double()).dtype == torch.float64
        assert (compl @ compl.T).dtype == torch.complex64
        assert integer.sum().dtype == torch.int64


def test_out_variants_are_left_alone():
    out = torch.empty(6, 8)
    with mezzo.autocast(BF16, "cpu"):
        assert torch.exp(x, out=out) is out
    assert torch.equal(out, torch.exp(x))


def test_a_dtype_the_caller_asks_for_wins():
    with mezzo.autocast(BF16, "cpu"):
        assert x.bfloat16().softmax(-1, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert x.bfloat16().sum(dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("level", ["O0", "O2,dtype=bfloat16,emulate=false"])
def test_levels_without_autocast_cast_no_op(level):
    with torch.autocast("cpu", dtype=torch.bfloat16), mezzo.autocast(level, "cpu"):
        assert functional.linear(x, w).dtype == torch.float32
        assert modes() == 0


def test_regions_nest_and_the_inner_one_replaces_the_outer():
    low = x.bfloat16()
    with mezzo.autocast(BF16, "cpu"):
        assert low.softmax(-1).dtype == torch.float32
        with mezzo.autocast(BF16.low("softmax"), "cpu"):
            assert low.softmax(-1).dtype == torch.bfloat16
            with mezzo.autocast("O0", "cpu"):
                assert low.softmax(-1).dtype == torch.bfloat16
                assert (x @ w).dtype == torch.float32
            assert (x @ w).dtype == torch.bfloat16
        assert low.softmax(-1).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert modes() == 0


def test_one_region_object_is_re_entrant_and_a_decorator():
    region = mezzo.autocast(BF16, "cpu")
    with region:
        with region:
            assert (x @ w).dtype == torch.bfloat16
        assert (x @ w).dtype == torch.bfloat16
    assert (x @ w).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")

    @mezzo.autocast(BF16, "cpu")
    def product(depth):
        return product(depth - 1) if depth else x @ w

    assert product(3).dtype == torch.bfloat16
    assert modes() == 0


def test_an_exception_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), mezzo.autocast(BF16, "cpu"):
        _ = 1 / 0
    assert modes() == 0
    assert not torch.is_autocast_enabled("cpu")


def test_threads_have_regions_of_their_own():
    seen = []

    @mezzo.autocast(BF16, "cpu")
    def work():
        barrier.wait()
        seen.append(x.bfloat16().softmax(-1).dtype)
        barrier.wait()

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [torch.float32, torch.float32]
    assert modes() == 0


def test_emulated_products_run_no_low_precision_kernel():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Kernels(TorchDispatchMode):
        low = 0
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution):
                self.products += 1
                self.low += any(isinstance(a, torch.Tensor) and a.dtype == torch.float16 for a in args)
            return func(*args, **(kwargs or {}))

    weight = w.clone().requires_grad_()
    with Kernels() as kernels:
        with mezzo.autocast("O1,dtype=float16,emulate=true", "cpu"):
            out = functional.linear(x, weight)
        out.float().sum().backward()
    assert out.dtype == torch.float16
    assert kernels.products >= 2
    assert kernels.low == 0
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("wrong, says", [("O7", "unknown level 'O7'"), (3, "cannot be made from int")])
def test_wrong_policies_are_refused(wrong, says):
    with pytest.raises(PolicyError, match=says):
        mezzo.autocast(wrong)


def test_an_absent_device_is_refused():
    absent = "cuda" if not torch.cuda.is_available() else "xpu"
    with pytest.raises(UnsupportedError, match=absent):
        mezzo.autocast(BF16, absent)


def test_autocast_switched_off_inside_a_region_switches_the_policy_off():
    """The idiom of code that protects its own precision, in rotary embeddings and norms."""
    for policy in (BF16, "O1,dtype=float16,emulate=true"):
        with mezzo.autocast(policy, "cpu"):
            with torch.autocast("cpu", enabled=False):
                assert functional.linear(x, w).dtype == torch.float32
                assert x.bfloat16().softmax(-1).dtype == torch.bfloat16
            assert functional.linear(x, w).dtype == Policy.of(policy).dtype


def test_a_rule_that_torch_has_no_kernel_for_says_what_to_write():
    with (
        mezzo.autocast(BF16.low("linalg_inv"), "cpu"),
        pytest.raises(UnsupportedError, match="linalg_inv has no kernel in bfloat16") as caught,
    ):
        torch.linalg.inv(torch.eye(3))
    assert 'policy.fp32_math("linalg_inv")' in str(caught.value)
    with mezzo.autocast(BF16.fp32_math("linalg_inv"), "cpu"):
        assert torch.linalg.inv(torch.eye(3).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("text", ["O1,dtype=bfloat16,emulate=true", "O1,dtype=bfloat16,emulate=false,fp32=linear"])
@pytest.mark.parametrize("lists", ["portable", "device"])
def test_a_backward_pass_that_begins_inside_a_region_computes_as_one_after_it(text, lists):
    """Native autocast, left on, would cast operands that are kept in FP32: the bits would differ."""
    torch.manual_seed(0)
    layer, x, policy = nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True), f"{text},lists={lists}"
    wanted = [layer.weight, layer.bias, x]

    def loss():
        return layer(x).float().square().mean()

    with mezzo.autocast(policy):
        value = loss()
    after = torch.autograd.grad(value, wanted)
    with mezzo.autocast(policy):
        inside = [torch.autograd.grad(loss(), wanted)]
        assert torch.is_autocast_enabled("cpu"), "it is switched off for the pass alone"
        loss().backward()
        inside.append([tensor.grad for tensor in wanted])
        layer.zero_grad()
        x.grad = None
        torch.autograd.backward([loss()])
        inside.append([tensor.grad for tensor in wanted])
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
            layer(x).backward()
        assert torch.is_autocast_enabled("cpu")
    for found in inside:
        for a, b in zip(found, after, strict=True):
            assert torch.equal(a, b)


def test_torch_func_differentiates_emulated_products_without_autocast():
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64), torch.randn(32, 64)

    def loss(weight):
        return functional.linear(x, weight).float().square().mean()

    with mezzo.autocast("O1,dtype=bfloat16,emulate=true"):
        found = torch.func.grad(loss)(weight)
    low, rounded = weight.bfloat16().double(), x.bfloat16().double()
    out = (rounded @ low.T).bfloat16().double()
    exact = ((2 * out / out.numel()).bfloat16().double()).T @ rounded
    assert (found.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_a_region_follows_what_is_known_of_the_device_by_now(emulated, monkeypatch):
    assert not mezzo.autocast("O1,dtype=bfloat16", "cpu").region.emulated
    monkeypatch.setitem(decide._reports, "cpu", emulated)  # as after a refreshed probe
    assert mezzo.autocast("O1,dtype=bfloat16", "cpu").region.emulated


@pytest.mark.parametrize("outer, inner", [("float16", torch.bfloat16), ("bfloat16", torch.float16)])
def test_torchs_autocast_with_another_dtype_is_torchs_inside_a_region(outer, inner):
    x, weight = torch.randn(4, 4), torch.nn.Parameter(torch.randn(4, 4))
    calls = {"product": lambda: x @ weight, "softmax": lambda: x.softmax(0), "sum": lambda: (x @ weight).sum()}
    with torch.autocast("cpu", dtype=inner):
        torchs = {name: call() for name, call in calls.items()}

    @torch.compile(backend="eager", fullgraph=True)
    def compiled():
        with torch.autocast("cpu", dtype=inner):
            return x @ weight

    with mezzo.autocast(f"O1,dtype={outer},emulate=true", "cpu"):
        before = x @ weight
        with torch.autocast("cpu", dtype=inner):
            found = {name: call() for name, call in calls.items()}
        assert before.dtype == (x @ weight).dtype == getattr(torch, outer)
        assert compiled().dtype == inner
    for name, value in found.items():
        assert value.dtype == torchs[name].dtype, name
        torch.testing.assert_close(value, torchs[name], rtol=0, atol=0, msg=name)
