"""The op table against torch itself and other systems' lists, its spellings, and its decisions on each device."""

import inspect
import itertools
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import mezzo
from mezzo import Policy, PolicyError, Rule
from mezzo.cast import differences
from mezzo.policy.ops import (
    MOVES,
    NORMS,
    OPS,
    TREATMENTS,
    VIEWS,
    callables,
    functions,
    in_place_forms,
    is_in_place,
    matching,
    out_of_place,
    resolve,
)
from mezzo.policy.ops import table as lists
from mezzo.policy.ops.table import MODULES, PADDLE_ALIASES, SPELLINGS, SYNONYMS

from ..support.refusals import refused
from . import torch_lists

torch_itself = runpy.run_path(str(Path(__file__).with_name("cuda_on_cpu.py")))
BF16 = Policy.O1("bfloat16", emulate=False)
LEFT_TO_TORCH = "left to torch, as in torch.amp"


# torch's registrations ----------------------------------------------------------------------------------


def listed(device):
    """What torch's header, or its source, says of each overload."""
    if device == "CPU":
        return torch_lists.registered()
    as_torch_says = {"set dtype": "fp32", "append dtype": "fp32"}
    return {name: as_torch_says.get(rule, rule) for name, rule in torch_itself["header_lists"]().items()}


@pytest.mark.parametrize("device, count", [("CUDA", 118), ("CPU", 124)])
def test_every_op_on_torch_s_lists_has_a_row_that_agrees(device, count):
    """By overload. When this fails for the CPU, torch changed its lists: note it in ``tests/policy/torch_lists.py``."""
    registered, treatments = torch_itself["registrations"](f"Autocast{device}"), listed(device)
    assert len(registered) >= count
    assert set(treatments) - (set() if torch.version.cuda else {"_cudnn_rnn"}) == registered
    assert lists.registered(device) == {name.split(".")[0] for name in registered}
    overrides = {"linalg_pinv", "linalg_lu_solve", "linalg_lu_factor", "lstm"}  # said so in their notes, or in parts
    sums = {"scatter_add"}  # promoted by torch, and rounded once here, where CUDA adds in the operands' dtype
    for name, treatment in treatments.items():
        row = OPS[resolve(f"aten::{name}")]
        if row.name not in overrides:
            assert (name, getattr(row, device.lower())) == (name, treatment)
        if device == "CUDA" and row.name not in sums:
            assert (name, row.portable) == (name, treatment)


def test_a_portable_region_on_cuda_differs_only_where_kernels_are_missing():
    beyond = {"var", "std", "var_mean", "std_mean"}  # squares of what 16 bits hold
    differing = {op.name for op in OPS.values() if op.portable != op.cuda} - beyond
    unlisted = {op.name for op in OPS.values() if op.reason == "no low kernel" or "no low kernel" in op.source}
    private = {"_addmm_activation", "_native_multi_head_attention", "grouped_mm"}  # that torch's lists forget
    new_in_2_12 = {"rms_norm"} if torch.__version__ < (2, 12) else set()
    mixing = {op.name for op in OPS.values() if op.reason == "type-mixing"}  # torch raises there
    # FP32 inside gives the dtypes that CUDA's kernels give.
    inside = {op.name for op in OPS.values() if (op.portable, op.cuda) == ("fp32_math", "native")}
    numbers = {"linalg_matrix_exp", "histc", "affine_grid", "affine_grid_generator"}  # which 16 bits cannot hold
    numbers |= {"var", "std", "var_mean", "std_mean"}  # squares of what they hold
    assert differing <= unlisted | private | new_in_2_12 | mixing | inside | numbers
    for spelling in ("grouped_mm", "_grouped_mm", "aten::_grouped_mm"):  # products of experts
        assert BF16.explain(spelling).treatment == "low"


def test_every_op_of_other_systems_lists_has_a_row_that_says_so():
    for system, table in (("apex", lists.APEX), ("Fleet", lists.FLEET), ("Paddle", lists.PADDLE)):
        for title, names in table.items():
            for name in names:
                row = OPS[resolve(name if system == "apex" else f"paddle:{name}")]
                assert f"{system} {title}" in row.source, name
    black = {"exp", "square", "log", "mean", "sum", "cosine_similarity", "softmax", "cross_entropy"}
    black |= {"binary_cross_entropy_with_logits"}  # as FACTS.md has them
    assert {op.name for op in OPS.values() if "Fleet white list" in op.source} == {"conv2d", "matmul"}
    assert {op.name for op in OPS.values() if "Fleet black list" in op.source} == black


# Rows ---------------------------------------------------------------------------------------------------


def test_rows_are_of_their_vocabulary_and_no_callable_belongs_to_two():
    owners = {}
    for name, op in OPS.items():
        assert (name, resolve(name)) == (op.name, name)
        assert {op.portable, op.cuda, op.cpu} <= set(TREATMENTS)
        assert op.source
        assert not is_in_place(name)
        for function in callables(name):
            owners.setdefault(function, set()).add(name)
    assert {function: names for function, names in owners.items() if len(names) > 1} == {}
    newer = {"linalg_matrix_sqrth", "linalg_polar", "linear_cross_entropy"}
    assert {name for name in OPS if "::" not in name and not callables(name)} <= newer


def test_composites_are_left_to_the_ops_they_are_made_of_and_let_a_rule_on_a_part_in():
    in_cpp = {"linalg_matrix_power", "cov", "corrcoef"}  # torch's own autocast reaches what they call
    for op in (op for op in OPS.values() if op.parts):
        assert (op.portable, op.cuda, op.cpu, op.reason) == ("native", "native", "native", "composite")
        assert all(part in OPS for part in op.parts)
        assert op.source.startswith(f"made of {op.parts[0]}")
        assert op.name in in_cpp or all(inspect.isfunction(function) for function in functions(op.name))
        if hasattr(functional, op.name):  # others (svd_lowrank) hand themselves over to nobody
            (function,) = callables(op.name)
            used = function.__code__.co_names
            hides = any(word.startswith("has_torch_function") for word in used)
            for part in op.parts:
                assert part in used
                opened = differences.find_differences(BF16.fp32_math(part), "cpu").opened
                assert (function in opened) is hides, (op.name, part)


def test_norms_are_the_ops_the_paper_computes_in_fp32():
    assert {op.name for op in OPS.values() if op.is_norm} == NORMS
    assert {"softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm"} <= NORMS
    assert not {"batch_norm", "instance_norm"} & NORMS
    policy = Policy.O1(norms="fp32_math")
    in_fp32 = {op for op in OPS if policy.explain(op).treatment == "fp32_math"}
    assert in_fp32 - NORMS == {op for op in OPS if OPS[op].portable == "fp32_math"}  # sums that run
    assert in_fp32 > NORMS


# Spellings ----------------------------------------------------------------------------------------------

SPELLED = """
    softmax: softmax torch.softmax F.softmax nn.Softmax torch.nn.functional.softmax nn.functional.softmax Softmax
        Tensor.softmax torch.Tensor.softmax aten::softmax.int torch.ops.aten.softmax.int softmax.int aten::_softmax
        torch.special.softmax paddle:softmax paddle.nn.functional.softmax
    linalg_inv: torch.linalg.inv inv aten::linalg_inv torch.inverse
    fft_rfft: torch.fft.rfft rfft
    linalg_norm: linalg.norm
    norm: torch.norm
    erfcx: aten::special_erfcx
    acos: torch.arccos
    cat: concat
    sigmoid: torch.special.expit
    abs: absolute
    matmul: __matmul__ Tensor.__rmatmul__ matmul_v2 paddle:mul
    pow: __pow__ __rpow__
    reciprocal: __rtruediv__
    div: __truediv__
    add: __radd__ elementwise_add
    layer_norm: nn.LayerNorm LayerNorm
    cross_entropy: torch.nn.CrossEntropyLoss softmax_with_cross_entropy cross_entropy2
    lstm_cell: nn.LSTMCell
    conv2d: nn.LazyConv2d
    linear: torch.nn.modules.linear.Linear
    binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss
    kl_div: nn.KLDivLoss
    cosine_similarity: cos_sim
    sum: reduce_sum
    mean: paddle:reduce_mean
    mul: mul
    mm: torch.ops.aten.mm.default
    mylib::fused: mylib::fused torch.ops.mylib.fused.default
    randn: torch.randn
    lstm: aten::_cudnn_rnn
"""


def test_any_spelling_resolves():
    base = ""
    for word in SPELLED.split():
        if word.endswith(":"):
            base = word[:-1]
        else:
            assert resolve(word) == base, word
    assert Policy.parse("O1,fp32=paddle:mul").explain("matmul").treatment == "fp32"
    assert (resolve("Tensor.exp_", in_place=True), resolve("softmax", in_place=True)) == ("exp_", "softmax")
    assert set(matching("conv?d")) == {"conv1d", "conv2d", "conv3d"}
    assert list(matching("zzz*")) == []


def test_synonyms_lead_to_rows_and_are_second_names_of_torch():
    for pairs in (SYNONYMS, SPELLINGS, PADDLE_ALIASES, MODULES):
        assert {op for op in pairs.values() if op not in OPS} == set()
    assert {name for name in SYNONYMS if not callables(name)} <= {"cross_entropy_loss"}
    assert {name for name in SYNONYMS if name in OPS} == set()
    unlike = {name for name, op in SYNONYMS.items() if op not in VIEWS and not {*callables(name)} <= {*functions(op)}}
    assert unlike == set()


def test_every_module_with_a_functional_form_resolves():
    containers = set(
        "AdaptiveLogSoftmaxWithLoss Container DataParallel Identity Module ModuleDict ModuleList ParameterDict "
        "ParameterList RNNBase RNNCellBase Sequential Transformer TransformerDecoder TransformerDecoderLayer "
        "TransformerEncoder TransformerEncoderLayer".split()
    )
    for name, entry in vars(torch.nn).items():
        if inspect.isclass(entry) and issubclass(entry, torch.nn.Module) and name not in containers:
            assert resolve(f"nn.{name}") in OPS, name
    with refused(PolicyError, "'nn.Sequential' is a module, not an op", "fp32_module="):
        resolve("nn.Sequential")


def test_unknown_names_suggest_the_nearest():
    for wrong, nearest in (
        ("layer_nrom", "layer_norm"), ("Sofmax", "softmax"), ("torch.linalg.invv", "linalg_inv"), ("MatMul", "matmul"),
        ("elementwise_ad", "elementwise_add"), ("conv_2d", "conv2d"), ("SOFTMAX", "softmax"), ("LayrNorm", "LayerNorm"),
    ):  # fmt: skip
        with pytest.raises(PolicyError, match=re.escape(f"unknown op {wrong!r}")) as caught:
            resolve(wrong)
        assert nearest.lower().replace("_", "") in str(caught.value).lower().replace("_", "")
        assert "did you mean" in str(caught.value)
    with pytest.raises(PolicyError, match="unknown op 'qqqqqq'") as caught:
        resolve("qqqqqq")
    assert "did you mean" not in str(caught.value)
    assert "neither the op table nor torch has it" in str(caught.value)


def test_views_are_never_cast_for_a_write_to_the_copy_would_be_lost():
    x = torch.randn(4, 4)
    for name, arguments in {"view": (16,), "transpose": (0, 1), "narrow": (0, 0, 1), "chunk": (2,)}.items():
        result = getattr(x, name)(*arguments)
        first = result if isinstance(result, torch.Tensor) else result[0]
        assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert name in VIEWS
    assert set(OPS) >= VIEWS
    assert all(functions(name) == () and callables(name) for name in VIEWS)


# In place, and into what the caller gives ---------------------------------------------------------------


IN_PLACE = sorted(
    {name for owner in (torch, torch.Tensor, functional, torch._C._nn) for name in dir(owner) if is_in_place(name)}
)


def test_a_rule_on_an_in_place_form_is_written_as_one_on_its_op():
    for name, op in (("exp_", "exp"), ("F.relu_", "relu"), ("__iadd__", "add"), ("mul_", "mul")):
        with refused(PolicyError, f"{name!r} is the in-place form of an op", f"holds for it too\n  write  {op!r}"):
            resolve(name)
        with refused(PolicyError, f"{name!r} is the in-place form of an op", f"the text low={op}"):
            Rule("low", op=name)
        assert functions(name.removeprefix("F.")) == ()
    with refused(PolicyError, "the in-place op 'zero_' is never cast", "what it writes to keeps its dtype"):
        Rule("fp32", op="zero_")


def test_in_place_and_out_forms_are_explained_by_what_returns_a_new_tensor():
    """Asked of a policy, and of each device it may run on."""
    assert len(IN_PLACE) > 150
    policy = Policy.O1("float16").low("gelu").fp32("add").native("tan").ban("log").keep_fp32(modules=["head"])
    for name, module, device in itertools.product(IN_PLACE, (None, "head"), (None, "cpu", "cuda")):
        decision, op = policy.explain(name, module, device_type=device), out_of_place(name)
        keeps = "what an in-place op writes to keeps its dtype"
        assert decision.reason.startswith(keeps), name
        of_op = None if op is None or op in VIEWS else policy.explain(op, module, device_type=device)
        names_op = of_op is not None and of_op.rule is not None and of_op.rule.op is not None
        if of_op is None or of_op.treatment == "native":
            assert (decision.treatment, decision.rule, decision.reason) == ("native", None, keeps), name
        elif names_op or (module is None and device != "cuda" and of_op.treatment != "low" and op not in MOVES):
            assert (decision.treatment, decision.rule) == (of_op.treatment, of_op.rule), name
            assert f", and the result is rounded to that; {op} gets {of_op.treatment}: " in decision.reason
        elif module is None and device != "cuda":
            assert (decision.treatment, decision.rule) == ("promote", None), name
            assert ", and what it reads is cast to that" in decision.reason
        else:
            assert (decision.treatment, decision.source) == ("native", "torch"), name
            assert f"; {op}, which returns a new tensor, gets {of_op.treatment}: " in decision.reason
    assert policy.explain("exp_").reason.endswith("on an accelerator left to torch, as in torch.amp")
    assert policy.evolve(norms="fp32_math").explain("exp_", device_type="cuda").treatment == "fp32"
    for spelling, treatment in (("aten::exp.out", "fp32"), ("torch.ops.aten.mm.out", "promote")):
        decision = policy.explain(spelling)
        assert (decision.treatment, decision.source) == (treatment, "op table"), spelling
        assert decision.reason.startswith("what an out= op writes to keeps its dtype"), spelling
    assert policy.explain("exp_").treatment == "fp32"
    for level in ("O0", "O3"):
        ruled = Policy.parse(f"{level},fp32=mm+exp") if level == "O3" else Policy.O0(rules=[Rule("fp32", op="exp")])
        assert ruled.explain("exp_").treatment == "fp32"
        assert f"fp32=exp is idle there: under {level} nothing tells it" in ruled.explain("aten::exp.out").reason


def test_each_in_place_form_has_one_op_and_a_function_of_the_same_arguments():
    owners, returned = {}, set()
    for op in OPS:
        for function, returning in in_place_forms(op).items():
            assert owners.setdefault(function, op) == op
            assert returning in callables(op)
            returned.add(function)
    known = {function for name in IN_PLACE if (op := out_of_place(name)) in OPS for function in callables(name)}
    assert returned >= {function for function in known if out_of_place(function.__name__) not in VIEWS}


# Devices ------------------------------------------------------------------------------------------------

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
    caches = [function for function in vars(differences).values() if hasattr(function, "cache_clear")]
    monkeypatch.setattr(differences, "emulated_families", lambda *_: frozenset())
    for cache in caches:
        cache.cache_clear()
    yield differences.find_differences
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_explained_is_what_a_region_does(policy, device_type, any_device):
    handlers = any_device(policy, device_type).handlers
    if policy in (BF16, POLICIES["device"]) and device_type == "cuda":
        assert handlers == {}, "an accelerator needs no mode for the portable lists, nor for its own"
    for name, row in OPS.items():
        explained = policy.explain(name, device_type=device_type).treatment
        done = {handlers[function].treatment for function in functions(name) if function in handlers}
        if not done and functions(name):  # torch's own, or nobody's
            done = {getattr(row, device_type) if policy.casts else "native"}
        assert not done or done == {explained}, name
        written = policy.explain(f"aten::{name}.out", device_type=device_type)
        forms = [handlers[function] for function in in_place_forms(name) if function in handlers]
        assert (written.treatment != "native" or not forms) or any(handler.emulated for handler in forms), name
        assert {handler.written for handler in forms} <= {
            "fp32": {"treated"}, "low": {"treated"}, "fp32_math": {"treated"}, "promote": {"treated", "follows"},
        }.get(written.treatment, {"left"}), name  # fmt: skip


def explained(op, policy=BF16):
    return [policy.explain(op, device_type=device) for device in (None, "cpu", "cuda", "xpu")]


def test_ops_outside_torch_s_cuda_lists_are_torch_s_on_an_accelerator():
    left = {name for name in OPS if BF16.explain(name, device_type="cuda").source == "torch"}
    assert {"fft_rfft", "linalg_inv", "stft", "ctc_loss", "quantile"} <= left
    assert left == {name for name, row in OPS.items() if row.portable != "native" and row.cuda == "native"}
    for name in left:
        row, (without, cpu, cuda, other) = OPS[name], explained(name)
        assert (without.treatment, cpu.treatment, cuda.treatment) == (row.portable, row.portable, "native")
        assert without.reason == f"{row.reason}; on an accelerator {LEFT_TO_TORCH}"
        assert (cpu.reason, cpu.source, without.source) == (row.reason, "op table", "op table")
        assert cuda.reason == f"{row.reason}; on cuda {LEFT_TO_TORCH}"
        assert other.reason == f"{row.reason}; on xpu {LEFT_TO_TORCH}"
    # A rule reaches them on every device; with the mode on, for norms, an accelerator gets the whole table.
    ruled = {(decision.treatment, decision.reason) for decision in explained("fft_rfft", BF16.fp32("fft_rfft"))}
    assert ruled == {("fp32", "the rule fp32=fft_rfft matches first")}
    normed = {
        (decision.treatment, decision.reason) for decision in explained("fft_rfft", BF16.evolve(norms="fp32_math"))
    }
    assert normed == {("fp32", "no low kernel")}
    assert BF16.explain("fft_rfft", device_type="cuda:0").treatment == "native"


def test_ops_that_a_cpu_computes_in_fp32_inside():
    row, (without, cpu, cuda, _) = OPS["avg_pool3d"], explained("avg_pool3d")
    inside = "FP32 inside, the input's dtype out"
    assert (cpu.treatment, cpu.reason) == ("fp32_math", f"{row.reason}; on cpu {inside}")
    assert (cuda.treatment, cuda.reason) == ("native", row.reason)
    assert (without.treatment, without.reason) == ("native", f"{row.reason}; on a CPU {inside}")
    image = torch.randn(1, 1, 4, 4, 4).bfloat16()
    with mezzo.autocast(BF16, "cpu"):
        pooled = functional.avg_pool3d(image, 2)
    assert torch.equal(pooled, functional.avg_pool3d(image.float(), 2).bfloat16())


def test_most_ops_are_the_same_on_every_device_and_devices_have_names():
    same = [name for name in OPS if len({*explained(name)[:3]}) == 1]
    assert len(same) > 350
    assert {"linear", "softmax", "layer_norm", "mse_loss", "relu", "cat"} <= set(same)
    policy = POLICIES["device"]
    assert policy.explain("softmax", device_type="cpu").treatment == "native"
    assert policy.explain("softmax", device_type="cuda").reason == "exponential range"
    assert policy.explain("linear").reason == "gemm"
    if not torch.accelerator.is_available():
        assert policy.explain("softmax").reason == "exponential range; on an accelerator fp32"
    with refused(PolicyError, "unknown device type 'gpu'", "torch has no such device type", 'write  "cpu" or "cuda"'):
        BF16.explain("softmax", device_type="gpu")
