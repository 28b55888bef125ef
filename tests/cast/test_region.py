"""The autocast region: torch.autocast, plus only the policy's differences; pins; and what it says to watchers."""

import functools
import itertools
import threading

import pytest
import torch
from torch import nn
from torch._functorch import config
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import Policy, PolicyError, UnsupportedError, compat
from mezzo.cast.device import decide
from mezzo.cast.notes import WATCHERS, notes, watched

from ..acceptance.interrupt import Interrupt
from ..support.refusals import refused
from .models import assert_same, data

aten = torch.ops.aten
BF16 = Policy.O1("bfloat16", emulate=False)
EMULATED = "O1,dtype=bfloat16,emulate=true"
LOW, WIDE = torch.bfloat16, torch.float32
x, w = data(6, 8), data(8, 8, seed=2)


def modes():
    return len(_get_current_function_mode_stack())


def backward_pass(region, leaf, loss):
    region.run_backward(loss)


def gradients(region, leaf, loss):
    region.run_grad(loss, [leaf])


# What is cast -------------------------------------------------------------------------------------------


def test_both_low_formats_meet_in_fp32():
    """As on CUDA; torch's autocast on a CPU refuses the two together."""
    with mezzo.autocast(EMULATED):
        joined = torch.cat([torch.ones(2).half(), torch.full((2,), 3.0).bfloat16()])
    assert joined.dtype == WIDE
    assert joined.tolist() == [1, 1, 3, 3]


def test_rules_decide_first():
    policy = BF16.low("softmax").fp32("linear").fp32_math("layer_norm").promote("mm").native("bmm")
    low, square = x.bfloat16(), w.bfloat16()
    with mezzo.autocast(policy, "cpu"):
        normed = functional.layer_norm(low, (8,))
        made = [x.softmax(-1), functional.linear(low, square), normed, torch.mm(low, w), torch.mm(low, square),
                torch.bmm(x[None], w[None]), torch.bmm(low[None], square[None])]  # fmt: skip
    assert [out.dtype for out in made] == [LOW, WIDE, LOW, WIDE, LOW, WIDE, LOW]
    assert torch.equal(normed, functional.layer_norm(low.float(), (8,)).bfloat16())
    # Of ops that torch knows by their parts alone.
    with mezzo.autocast(BF16.native("norm", "tensordot", "linalg_multi_dot", "inner").fp32("pad"), "cpu"):
        made = [
            torch.norm(low),
            torch.norm(x),
            torch.tensordot(x, w, 1),
            torch.linalg.multi_dot([x, w, w]),
            torch.inner(x, w),
            functional.pad(low, (1, 1)),
            functional.pad(low, (1, 1), mode="reflect"),
        ]
    assert [out.dtype for out in made] == [LOW, *[WIDE] * 6]


@pytest.mark.parametrize("name, given", [("sort", -1), ("topk", 2), ("median", -1), ("cummax", -1), ("std_mean", -1)])
def test_fp32_inside_gives_every_part_of_a_result_in_the_inputs_dtype(name, given):
    low = x.bfloat16()
    with mezzo.autocast(BF16.fp32_math(name), "cpu"):
        mine = getattr(torch, name)(low, given)
    theirs = getattr(torch, name)(low.float(), given)
    assert type(mine) is type(theirs)
    assert_same(mine, [part.bfloat16() if part.is_floating_point() else part for part in theirs])


def test_a_rule_reaches_inside_python_functions():
    query = x[None].bfloat16()
    for policy, expected in [(BF16, WIDE), (BF16.low("softmax"), LOW)]:
        with mezzo.autocast(policy, "cpu"):
            assert functional.gumbel_softmax(query, hard=False).dtype == expected
    with mezzo.autocast(BF16.low("norm", "linalg_vector_norm"), "cpu"):
        assert functional.normalize(query).dtype == LOW


def test_what_is_never_cast():
    """float64, complex numbers and integers; what is written to; and a dtype that the caller asks for wins."""
    double, compl, out = x.double(), x.to(torch.complex64), torch.empty(6, 8)
    with mezzo.autocast(EMULATED, "cpu"):
        assert torch.exp(double).dtype == (double @ w.double()).dtype == torch.float64
        assert (compl @ compl.T).dtype == torch.complex64
        assert torch.arange(4).sum().dtype == torch.int64
        assert torch.exp(x, out=out) is out
        assert x.bfloat16().softmax(-1, dtype=LOW).dtype == LOW
        assert x.bfloat16().sum(dtype=torch.float64).dtype == torch.float64
        assert torch.ops.prims.exp(x.bfloat16()).dtype == LOW  # another library's
        assert aten.exp_(x.bfloat16()).dtype == LOW
        assert aten._softmax(x.bfloat16(), -1, False).dtype == LOW  # a kernel, which no list of torch's names
    assert torch.equal(out, torch.exp(x))


def test_banned_ops_and_those_without_a_kernel_say_what_to_write():
    probabilities, target = torch.rand(4), torch.rand(4)
    ban = "binary_cross_entropy is banned", "binary_cross_entropy_with_logits", 'policy.fp32("binary_cross_entropy")'
    with refused(UnsupportedError, *ban), mezzo.autocast(BF16, "cpu"):
        functional.binary_cross_entropy(probabilities, target)
    with mezzo.autocast(BF16.fp32("binary_cross_entropy"), "cpu"):
        assert functional.binary_cross_entropy(probabilities.bfloat16(), target).dtype == WIDE
    lacks = "linalg_inv has no kernel in bfloat16", 'policy.fp32_math("linalg_inv")'
    with refused(UnsupportedError, *lacks), mezzo.autocast(BF16.low("linalg_inv"), "cpu"):
        torch.linalg.inv(torch.eye(3))
    with mezzo.autocast(BF16.fp32_math("linalg_inv"), "cpu"):
        assert torch.linalg.inv(torch.eye(3).bfloat16()).dtype == LOW
    for reason in ("it overflows", "it is slow"):  # equal policies keep their own reasons
        policy = Policy.O1("bfloat16", rules=[mezzo.Rule("ban", op="exp", reason=reason)])
        with refused(UnsupportedError, f"why    {reason}\n"), mezzo.autocast(policy, "cpu"):
            torch.exp(x)


# The operator, an overload of it, the same function of Python's, and the shapes of its operands.
OPERATORS = {
    "mm": (aten.mm, aten.mm.default, torch.mm, [(3, 9), (9, 4)]),
    "linear": (aten.linear, aten.linear.default, functional.linear, [(3, 9), (4, 9), (4,)]),
    "conv1d": (aten.conv1d, aten.conv1d.default, functional.conv1d, [(2, 4, 9), (3, 4, 3)]),
    "softmax": (
        lambda x: aten.softmax(x, -1), lambda x: aten.softmax.int(x, -1), lambda x: torch.softmax(x, -1), [(3, 9)]
    ),
    "expm1": (aten.special_expm1, aten.special_expm1.default, torch.special.expm1, [(3, 9)]),
    "layer_norm": (
        lambda x: aten.layer_norm(x, [9]), lambda x: aten.layer_norm.default(x, [9]),
        lambda x: functional.layer_norm(x, (9,)), [(3, 9)],
    ),
    "relu": (aten.relu, aten.relu.default, torch.relu, [(3, 9)]),
    "by keyword": (
        lambda a, b: aten.mm(self=a, mat2=b), lambda a, b: aten.mm.default(self=a, mat2=b), torch.mm, [(3, 9), (9, 4)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "policy",
    ["O1,dtype=float16,emulate=true", "O1,dtype=bfloat16,emulate=false",
     "O1,dtype=bfloat16,emulate=true,low=softmax+exp+expm1,fp32=mm+conv1d,fp32_math=layer_norm"],
)  # fmt: skip
def test_operators_of_aten_are_treated_as_what_they_are_called_in_python(policy):
    region = mezzo.autocast(policy, "cpu")

    def run(function, inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with region:
            out = function(*leaves)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    for packet, overload, function, shapes in OPERATORS.values():
        for dtype in (WIDE, region.policy.dtype):
            inputs = [data(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
            expected = run(function, inputs)
            assert_same(run(packet, inputs), expected)
            assert_same(run(overload, inputs), expected)


def test_without_autocast_operators_are_treated_and_overloads_are_not():
    """Compiled code calls overloads, after the policy has been carried out in it."""
    low = w.bfloat16()
    with mezzo.autocast("O3,dtype=bfloat16,emulate=false,fp32=mm", "cpu"):
        assert aten.mm(low, low).dtype == WIDE
        assert aten.mm.default(low, low).dtype == LOW


# Where it holds -----------------------------------------------------------------------------------------


def test_regions_nest_and_the_inner_one_replaces_the_outer():
    low = x.bfloat16()
    with mezzo.autocast(BF16, "cpu"):
        assert low.softmax(-1).dtype == WIDE
        with mezzo.autocast(BF16.low("softmax"), "cpu"):
            assert low.softmax(-1).dtype == LOW
            for level in ("O0", "O3,dtype=bfloat16,emulate=false"):  # which cast no op
                with mezzo.autocast(level, "cpu"):
                    assert low.softmax(-1).dtype == LOW
                    assert (x @ w).dtype == WIDE
            assert (x @ w).dtype == LOW
        assert low.softmax(-1).dtype == WIDE
    assert not torch.is_autocast_enabled("cpu")
    assert modes() == 0
    with mezzo.autocast(BF16.evolve(lists="device"), "cpu"):  # torch's own, which need none
        assert modes() == 0
    with torch.autocast("cpu", dtype=LOW), mezzo.autocast("O0", "cpu"):
        assert (x @ w).dtype == WIDE
        assert modes() == 0


def test_one_region_object_is_re_entrant_and_a_decorator():
    region = mezzo.autocast(BF16, "cpu")
    with region:
        with region:
            assert (x @ w).dtype == LOW
        assert (x @ w).dtype == LOW
    assert (x @ w).dtype == WIDE
    assert not torch.is_autocast_enabled("cpu")

    @mezzo.autocast(BF16, "cpu")
    def product(depth):
        return product(depth - 1) if depth else x @ w

    assert product(3).dtype == LOW
    with pytest.raises(ZeroDivisionError), region:  # an exception leaves nothing behind
        _ = 1 / 0
    assert modes() == 0
    assert not torch.is_autocast_enabled("cpu")


def test_what_is_no_function_is_not_decorated():
    """It is a TypeError, as torch's since 2.13; a module is called, and so decorated."""
    handle = mezzo.prepare(torch.nn.Linear(4, 4), BF16)
    for region in (mezzo.autocast(BF16, "cpu"), compat.torch.autocast("cpu", LOW), handle.autocast()):
        for wrong in (x, torch.nn.Parameter(w), None, 3, "f", [torch.sin]):
            with refused(PolicyError, f"a {type(wrong).__name__} is no function", "write  with autocast(…)"):
                region(wrong)
            with pytest.raises(TypeError):
                region(wrong)
        for right in (torch.nn.Linear(8, 4), functools.partial(torch.add, x), torch.matmul, lambda *_: x @ w):
            arguments = (x, w) if right is torch.matmul else (x,)
            assert region(right)(*arguments).dtype == torch.autocast("cpu", LOW)(right)(*arguments).dtype
    handle.remove()


def test_threads_have_regions_of_their_own():
    seen, barrier = [], threading.Barrier(2)

    @mezzo.autocast(BF16, "cpu")
    def work():
        barrier.wait()
        seen.append(x.bfloat16().softmax(-1).dtype)
        barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [WIDE, WIDE]
    assert modes() == 0


def test_autocast_switched_off_inside_a_region_switches_the_policy_off():
    """The idiom of code that protects its own precision, in rotary embeddings and norms."""
    for policy in (BF16, "O1,dtype=float16,emulate=true"):
        with mezzo.autocast(policy, "cpu"):
            with torch.autocast("cpu", enabled=False):
                assert functional.linear(x, w).dtype == WIDE
                assert x.bfloat16().softmax(-1).dtype == LOW
            assert functional.linear(x, w).dtype == Policy.of(policy).dtype


@pytest.mark.parametrize("outer, inner", [("float16", torch.bfloat16), ("bfloat16", torch.float16)])
def test_torchs_autocast_with_another_dtype_is_torchs_inside_a_region(outer, inner):
    def run():
        return [x @ w, x.softmax(0), (x @ w).sum()]

    @torch.compile(backend="eager", fullgraph=True)
    def compiled():
        with torch.autocast("cpu", dtype=inner):
            return x @ w

    with torch.autocast("cpu", dtype=inner):
        torchs = run()
    with mezzo.autocast(f"O1,dtype={outer},emulate=true", "cpu"):
        before = x @ w
        with torch.autocast("cpu", dtype=inner):
            results = run()
        assert before.dtype == (x @ w).dtype == getattr(torch, outer)
        assert compiled().dtype == inner
    assert_same(results, torchs)


def test_a_region_follows_what_is_known_of_the_device_by_now(emulated, monkeypatch):
    native = {dtype: decide._reports["cpu"].formats[dtype] for dtype in emulated.formats} if decide._reports else {}
    is_emulated = mezzo.autocast("O1,dtype=bfloat16", "cpu").region.emulated
    assert not native or is_emulated == (not all(family.fast for family in native[LOW].families.values()))
    monkeypatch.setitem(decide._reports, "cpu", emulated)  # as after a refreshed probe
    assert mezzo.autocast("O1,dtype=bfloat16", "cpu").region.emulated


@pytest.mark.parametrize("before", ["same_as_forward", "default", "off", [{"device_type": "cpu"}]])
def test_the_setting_for_compiled_backward_passes_is_put_back(before):
    inside = before if isinstance(before, list) else "off"
    with config.patch(backward_pass_autocast=before):
        with mezzo.autocast("O1,dtype=bfloat16", "cpu"):
            assert config.backward_pass_autocast == inside
            with mezzo.autocast("O1,dtype=bfloat16,low=softmax", "cpu"):
                assert config.backward_pass_autocast == inside
        with pytest.raises(ZeroDivisionError), mezzo.autocast("O1,dtype=bfloat16", "cpu"):
            _ = 1 / 0
        with mezzo.autocast("O1,dtype=bfloat16,emulate=false,lists=device", "cpu"):
            assert config.backward_pass_autocast == before  # torch's own behaviour throughout
        assert config.backward_pass_autocast == before


# Backward passes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [EMULATED, "O1,dtype=bfloat16,emulate=false,fp32=linear"])
@pytest.mark.parametrize("lists", ["portable", "device"])
def test_a_backward_pass_that_begins_inside_a_region_computes_as_one_after_it(text, lists):
    """Native autocast, left on, would cast operands that are kept in FP32: the bits would differ."""
    layer, x, policy = nn.Linear(64, 64), data(32, 64).requires_grad_(), f"{text},lists={lists}"
    wanted = [layer.weight, layer.bias, x]

    def loss():
        return layer(x).float().square().mean()

    with mezzo.autocast(policy):
        value = loss()
    after = torch.autograd.grad(value, wanted)
    with mezzo.autocast(policy):
        inside = [torch.autograd.grad(loss(), wanted)]
        assert torch.is_autocast_enabled("cpu"), "it is switched off for the pass alone"
        for begin in (torch.Tensor.backward, lambda value: torch.autograd.backward([value])):
            begin(loss())
            inside.append([tensor.grad for tensor in wanted])
            for tensor in wanted:
                tensor.grad = None
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
            layer(x).backward()
        assert torch.is_autocast_enabled("cpu")
    for results in inside:
        assert_same(results, after)


# Pins ---------------------------------------------------------------------------------------------------


@mezzo.low
def scores(a, *, scale=1.0):
    """Say something."""
    return (a * scale).softmax(-1), torch.exp(a), functional.layer_norm(a, (8,)), a @ a.T


@mezzo.fp32
def exact(a, b):
    return a @ b.T


@mezzo.fp32
class Head(nn.Linear):
    pass


def test_low_runs_every_op_low_where_ops_are_cast():
    with mezzo.autocast(EMULATED, "cpu"):
        assert {out.dtype for out in scores(x, scale=2.0)} == {LOW}
        assert torch.exp(x.bfloat16()).dtype == WIDE  # and the region goes on as before
    assert {out.dtype for out in scores(x)} == {WIDE}
    with mezzo.autocast("O0", "cpu"):
        assert scores(x)[3].dtype == WIDE
    assert scores(x.bfloat16())[0].dtype == LOW
    assert (scores.__name__, scores.__doc__) == ("scores", "Say something.")


def test_fp32_casts_inputs_and_nothing_inside():
    low = x.bfloat16()
    with mezzo.autocast(EMULATED, "cpu"):
        assert (low @ low.T).dtype == LOW
        out = exact(low, b=low)
    assert_same([out], [low.float() @ low.float().T])
    assert exact(low, low).dtype == WIDE  # where nothing is cast, too
    with torch.autocast("cpu", dtype=LOW):  # torch's own
        assert exact(x, x).dtype == WIDE


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_pinned_class_computes_in_fp32_at_every_level(level):
    model, seen = nn.Sequential(nn.Linear(8, 8), Head(8, 8), nn.Linear(8, 8)), []
    handle = mezzo.prepare(model, f"{level},dtype=bfloat16,emulate=true")
    model[1].register_forward_hook(lambda module, args, out: seen.append((module.weight.dtype, out.dtype)))
    with handle.autocast():
        out = model(x)
    assert seen == [(WIDE, WIDE)]
    out.float().sum().backward()
    assert model[1].weight.grad.dtype == WIDE
    ruled = nn.Sequential(Head(8, 8))
    mezzo.prepare(ruled, "O2,dtype=bfloat16,low_module=0")  # a rule of the policy comes before
    assert ruled[0].weight.hi.dtype == LOW


def test_checkpoint_contexts_outside_a_region_do_nothing():
    first, again = mezzo.checkpoint_contexts()
    with first, again:
        assert (x @ x.T).dtype == WIDE
        assert checkpoint(exact, x, x, use_reentrant=False, context_fn=mezzo.checkpoint_contexts).dtype == WIDE


# What is said to watchers -------------------------------------------------------------------------------


class Listener(TorchDispatchMode):
    """Write down what is noted around each kernel."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.heard.append((func._schema.name.removeprefix("aten::"), tuple(note.event for note in notes())))
        return func(*args, **(kwargs or {}))


def heard(model):
    with mezzo.autocast(f"{EMULATED},norms=fp32_math"), Listener() as forward:
        loss = model(torch.ones(2, 4)).sum()
    with Listener() as backward:
        loss.backward()
    return forward.heard, backward.heard


def test_each_kernel_is_a_cast_of_emulation_or_of_the_op():
    """While someone watches, and in each thread by itself; otherwise nothing is noted."""
    model, of_thread = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4)), []
    with watched():
        forward, backward = heard(model)
        with mezzo.autocast(EMULATED), Listener():
            thread = threading.Thread(target=lambda: of_thread.extend(heard(model)))
            thread.start()
            thread.join()
            assert notes() == []
        with pytest.raises(RuntimeError), mezzo.autocast(EMULATED):
            model(torch.ones(2, 5))
        assert notes() == [], "an error leaves no note"
    assert {kinds for name, kinds in forward if name == "_to_copy"} == {("op", "cast"), ("op", "emulation")}
    assert ("mm", ("op", "emulation")) in forward
    assert ("native_layer_norm", ("op",)) in forward
    assert {kinds for name, kinds in backward if name == "mm"} == {("emulation",)}
    assert ("native_layer_norm_backward", ()) in backward
    assert any(kinds == ("op", "emulation") for _, kinds in of_thread[0])
    assert WATCHERS == []
    assert all(not kinds for kernels in heard(model) for _, kinds in kernels)


@pytest.mark.parametrize("differentiates", [backward_pass, gradients])
@pytest.mark.parametrize("policy", [BF16.low("exp"), EMULATED, "O1,dtype=bfloat16,emulate=false,lists=device"], ids=str)
def test_a_signal_at_any_line_of_a_backward_pass_leaves_nothing_behind(policy, differentiates):
    region, state = mezzo.autocast(policy), torch.is_autocast_enabled("cpu")
    with region:
        inside, around = torch.is_autocast_enabled("cpu"), _get_current_function_mode_stack()
        shadows = [mode.num_inner_regions for mode in around]
        for line in itertools.count():
            leaf = torch.ones(2, requires_grad=True)
            loss, interrupt = (leaf * 2).sum(), Interrupt(line)
            with interrupt:
                differentiates(region, leaf, loss)
            assert _get_current_function_mode_stack() == around, line
            assert torch.is_autocast_enabled("cpu") == inside, line
            assert [mode.num_inner_regions for mode in around] == shadows, line
            if not interrupt.came:
                break
    assert line > 5
    assert modes() == 0
    assert torch.is_autocast_enabled("cpu") == state
