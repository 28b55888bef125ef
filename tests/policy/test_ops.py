"""The op table against the installed torch and other systems' lists, and the spellings it resolves."""

import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from mezzo import Policy, PolicyError, Rule
from mezzo.cast.differences import find_differences
from mezzo.policy.ops import NORMS, OPS, TREATMENTS, VIEWS, callables, functions, is_in_place, lists, matching, resolve
from mezzo.policy.ops.lists import MODULES, PADDLE_ALIASES, SPELLINGS, SYNONYMS

from . import torch_lists

torch_itself = runpy.run_path(str(Path(__file__).with_name("cuda_on_cpu.py")))

# torch's registrations ----------------------------------------------------------------------------------


def listed(device):
    """What torch's header, or its source, says of each overload."""
    if device == "CPU":
        return torch_lists.registered()
    as_torch_says = {"set dtype": "fp32", "append dtype": "fp32"}
    return {name: as_torch_says.get(rule, rule) for name, rule in torch_itself["header_lists"]().items()}


@pytest.mark.parametrize("device, count", [("CUDA", 118), ("CPU", 124)])
def test_what_torch_answers_is_what_its_source_says(device, count):
    """By overload. When this fails for the CPU, torch changed its lists: note it in ``tests/policy/torch_lists.py``."""
    registered = torch_itself["registrations"](f"Autocast{device}")
    assert len(registered) >= count
    only_in_cuda_builds = set() if torch.version.cuda else {"_cudnn_rnn"}
    assert set(listed(device)) - only_in_cuda_builds == registered
    assert lists.registered(device) == {name.split(".")[0] for name in registered}


@pytest.mark.parametrize("device", ["CUDA", "CPU"])
def test_every_op_on_torch_s_lists_has_a_row_that_agrees(device):
    overrides = {"linalg_pinv", "linalg_lu_solve", "linalg_lu_factor", "lstm"}  # said so in their notes, or in parts
    for name, treatment in listed(device).items():
        row = OPS[resolve(f"aten::{name}")]
        if row.name not in overrides:
            assert (name, getattr(row, device.lower())) == (name, treatment)
        if device == "CUDA":
            assert (name, row.portable) == (name, treatment)


def test_a_portable_region_on_cuda_differs_only_where_kernels_are_missing():
    differing = {op.name for op in OPS.values() if op.portable != op.cuda}
    unlisted = {op.name for op in OPS.values() if op.reason == "no low kernel" or "no low kernel" in op.source}
    private = {"_addmm_activation", "_native_multi_head_attention", "grouped_mm"}  # that torch's lists forget
    new_in_2_12 = {"rms_norm"} if torch.__version__ < (2, 12) else set()
    assert differing <= unlisted | private | new_in_2_12 | {"linalg_matrix_exp", "index_copy"}


# Other systems' lists -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "system, title, name",
    [
        (system, title, name)
        for system, table in (("apex", lists.APEX), ("Fleet", lists.FLEET), ("Paddle", lists.PADDLE))
        for title, names in table.items()
        for name in sorted(names)
    ],
)
def test_every_op_of_other_systems_lists_has_a_row_that_says_so(system, title, name):
    row = OPS[resolve(name if system == "apex" else f"paddle:{name}")]
    assert f"{system} {title}" in row.source


def test_fleets_defaults_are_those_of_the_facts():
    white = {resolve(f"paddle:{name}") for name in "conv2d matmul mul".split()}
    black = {"exp", "square", "log", "mean", "sum", "cosine_similarity", "softmax", "cross_entropy"}
    black |= {"binary_cross_entropy_with_logits"}
    assert {op.name for op in OPS.values() if "Fleet white list" in op.source} == white == {"conv2d", "matmul"}
    assert {op.name for op in OPS.values() if "Fleet black list" in op.source} == black


# Rows ---------------------------------------------------------------------------------------------------


def test_every_row_can_be_called():
    newer = {"linalg_matrix_sqrth", "linear_cross_entropy"}
    assert {name for name in OPS if not callables(name)} <= newer


def test_no_callable_belongs_to_two_rows():
    owners = {}
    for name in OPS:
        for function in callables(name):
            owners.setdefault(function, set()).add(name)
    assert {function: names for function, names in owners.items() if len(names) > 1} == {}


def test_names_are_base_names_and_fields_are_of_their_vocabulary():
    for name, op in OPS.items():
        assert (name, resolve(name)) == (op.name, name)
        assert {op.portable, op.cuda, op.cpu} <= set(TREATMENTS) - {"fp32_math"}
        assert op.source
        assert not is_in_place(name)


@pytest.mark.parametrize("name", [op.name for op in OPS.values() if op.parts])
def test_composites_are_left_to_the_ops_they_are_made_of(name):
    op = OPS[name]
    assert (op.portable, op.cuda, op.cpu, op.reason) == ("native", "native", "native", "composite")
    assert all(part in OPS for part in op.parts)
    assert op.source.startswith(f"made of {op.parts[0]}")
    in_cpp = {"linalg_matrix_power", "cov", "corrcoef"}  # torch's own autocast reaches what they call
    assert name in in_cpp or all(inspect.isfunction(function) for function in functions(name))


# The others (svd_lowrank) hand themselves over to nobody: a function mode sees what they call.
IN_FUNCTIONAL = [op.name for op in OPS.values() if op.parts and hasattr(functional, op.name)]


@pytest.mark.parametrize("name", IN_FUNCTIONAL)
def test_composites_let_a_rule_on_a_part_in(name):
    (function,) = callables(name)
    for part in OPS[name].parts:
        assert part in function.__code__.co_names
        hides = any(word.startswith("has_torch_function") for word in function.__code__.co_names)
        opened = find_differences(Policy.O1("bfloat16", emulate=False).fp32_math(part), "cpu").opened
        assert (function in opened) is hides


def test_norms_are_the_ops_the_paper_computes_in_fp32():
    assert {op.name for op in OPS.values() if op.is_norm} == NORMS
    assert {"softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm"} <= NORMS
    assert not {"batch_norm", "instance_norm"} & NORMS


def test_rows_that_change_nothing_leave_no_handler():
    found = find_differences(Policy.O1("bfloat16", emulate=False), "cpu")
    handled = {handler.op for handler in found.handlers.values()}
    silent = {op.name for op in OPS.values() if {op.portable, op.cuda, op.cpu} == {"native"}}
    assert len(silent) > 250
    assert handled & silent == set()


# What is left out ---------------------------------------------------------------------------------------

# Public callables that have no row, by group: the reason, and which they are.
LEFT_OUT = {
    "in-place variants keep the dtype of what they write to": is_in_place,
    "predicates and comparisons return no floats": r"is_?[a-z_]+|all(close)?|any|eq|equal|ge|gt|le|lt|ne|not_equal|"
    r"greater(_equal)?|less(_equal)?|logical_\w+|signbit|__(bool|contains|nonzero)__",
    "indices and counts are integers": r"arg\w+|nonzero(_static)?|count_nonzero|bincount|bucketize|searchsorted|"
    r"unravel_index|tril_indices|triu_indices|one_hot|hash_tensor",
    "integer arithmetic": r"bitwise_\w+|gcd|lcm|__r?(and|or|xor|lshift|rshift)__|__invert__",
    "factories: the caller gives the dtype": r"(as_)?tensor|asarray|arange|range|linspace|logspace|eye|full\w*|ones\w*|"
    r"zeros\w*|empty\w*|new\w*|scalar_tensor|from\w+|\w+_window|fft_r?fftfreq|r?fftfreq|fill|Optional",
    "random numbers: drawn in the dtype asked for": r"rand\w*|normal|bernoulli|binomial|multinomial|poisson|seed|"
    r"initial_seed|manual_seed|[gs]et_rng_state|thread_safe_generator",
    "conversions: the caller gives the dtype, the device or the layout": r"to(_\w+)?|type(_as)?|float|half|double|"
    r"bfloat16|bool|byte|char|short|int|long|c(double|float|half)|chalf|cpu|cuda|ipu|xpu|mtia|numpy|item|tolist|"
    r"__(array\w*|complex|float|int|long|index|dlpack\w*)__|as_subclass|pin_memory|dequantize",
    "facts about a tensor": r"dim(_order)?|ndimension|numel|nelement|size|stride|storage\w*|data_ptr|const_data_ptr|"
    r"element_size|untyped_storage|get_device|qscheme|q_\w+|int_repr|__len__|typename|is_\w+|index",
    "autograd and the tensor object": r"backward|register_\w+|retain_grad|record_stream|reinforce|module_load|"
    r"resize\w*|__(deepcopy|setstate|reversed|iter|torch_function|torch_dispatch|delitem|setitem|init)__",
    "sparse and quantized tensors have kernels of their own": r"\w*sparse\w*|\w*quantize\w*|\w*indices(_copy)?|"
    r"values(_copy)?|coalesce|dense_dim|(hs|ss|s|ds|hsp|sp)p?(add)?mm|fused_moving_avg_obs_fake_quant|choose_qparams\w*",
    "kernels of one backend": r"(cudnn|miopen|mkldnn|fbgemm)_\w+|batch_norm_\w+|native_(batch|group)?_?(norm|dropout)",
    "copies of views, made by torch.compile": r"\w+_copy|affine_grid_generator",
    "removed: they raise": r"eig|lstsq|matrix_rank|solve|symeig",
    "settings, files and tracing": r"[gs]et_\w+|are_\w+|can_cast|promote_types|result_type|broadcast_shapes|cond|"
    r"while_loop|vmap|compile\w*|autocast_\w+|clear_autocast_cache|classproperty|fork|wait|read_vitals|set_vital|vitals_enabled|import_ir\w+|parse_\w+|"
    r"merge_type\w+|unify_type_list|init_num_threads|load|save|prepare_\w+|profiler_\w+|sym_\w+|use_determ\w+|"
    r"assert_int_or_pair|boolean_dispatch|handle_torch_function|has_torch_function\w*",
    "operands in reverse: torch.matmul inside has the row": r"__rmatmul__",
    "named dimensions, until torch 2.12": r"refine_names|rename|align_\w+|has_names",
}


def reason_left_out(name):
    for reason, which in LEFT_OUT.items():
        if which(name) if callable(which) else re.fullmatch(which, name):
            return reason
    return None


@pytest.mark.parametrize(
    "place",
    [torch, functional, torch.special, torch.fft, torch.linalg, torch.Tensor],
    ids=["torch", "F", "special", "fft", "linalg", "Tensor"],
)
def test_every_public_callable_is_classified_or_left_out_for_a_reason(place):
    classified = {id(function) for name in OPS for function in callables(name)}
    seen = 0
    for name in set(dir(place)) - set(dir(object)):
        entry = getattr(place, name, None)
        private = name.startswith("_") and not (name.startswith("__") and place is torch.Tensor)
        if private or not callable(entry) or inspect.isclass(entry):
            continue
        seen += 1
        if id(entry) not in classified:
            assert reason_left_out(name), f"{name} is new: give it a row, or a reason to have none"
    assert seen > 20


def test_what_is_left_out_is_left_alone():
    assert Policy.O1().explain("randn").treatment == "native"
    assert Policy.O1().explain("randn").reason == "no list names this op"


# Spellings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, base",
    [
        ("softmax", "softmax"), ("torch.softmax", "softmax"), ("F.softmax", "softmax"), ("nn.Softmax", "softmax"),
        ("torch.nn.functional.softmax", "softmax"), ("nn.functional.softmax", "softmax"), ("Softmax", "softmax"),
        ("Tensor.softmax", "softmax"), ("torch.Tensor.softmax", "softmax"), ("aten::softmax.int", "softmax"),
        ("torch.ops.aten.softmax.int", "softmax"), ("softmax.int", "softmax"), ("aten::_softmax", "softmax"),
        ("torch.special.softmax", "softmax"), ("torch.linalg.inv", "linalg_inv"), ("torch.fft.rfft", "fft_rfft"),
        ("inv", "linalg_inv"), ("rfft", "fft_rfft"), ("linalg.norm", "linalg_norm"), ("torch.norm", "norm"),
        ("aten::special_erfcx", "erfcx"), ("aten::linalg_inv", "linalg_inv"), ("torch.inverse", "linalg_inv"),
        ("torch.arccos", "acos"), ("concat", "cat"), ("torch.special.expit", "sigmoid"), ("absolute", "abs"),
        ("__matmul__", "matmul"), ("Tensor.__rmatmul__", "matmul"), ("__pow__", "pow"), ("__rpow__", "pow"),
        ("__rtruediv__", "reciprocal"), ("__truediv__", "div"), ("__radd__", "add"),
        ("nn.LayerNorm", "layer_norm"), ("LayerNorm", "layer_norm"), ("torch.nn.CrossEntropyLoss", "cross_entropy"),
        ("nn.LSTMCell", "lstm_cell"), ("nn.LazyConv2d", "conv2d"), ("torch.nn.modules.linear.Linear", "linear"),
        ("nn.BCEWithLogitsLoss", "binary_cross_entropy_with_logits"), ("nn.KLDivLoss", "kl_div"),
        ("softmax_with_cross_entropy", "cross_entropy"), ("cos_sim", "cosine_similarity"), ("matmul_v2", "matmul"),
        ("cross_entropy2", "cross_entropy"), ("reduce_sum", "sum"), ("elementwise_add", "add"), ("mul", "mul"),
        ("paddle:mul", "matmul"), ("paddle.nn.functional.softmax", "softmax"), ("paddle:reduce_mean", "mean"),
        ("torch.ops.aten.mm.default", "mm"), ("mylib::fused", "mylib::fused"), ("silu", "silu"), ("tanh", "tanh"),
        ("torch.ops.mylib.fused.default", "mylib::fused"), ("torch.randn", "randn"), ("aten::_cudnn_rnn", "lstm"),
    ],
)  # fmt: skip
def test_any_spelling_resolves(name, base):
    assert resolve(name) == base


def test_the_system_decides_where_two_use_one_word():
    assert (resolve("mul"), resolve("paddle:mul")) == ("mul", "matmul")
    assert resolve("paddle:softmax") == "softmax"
    assert Policy.parse("O1,fp32=paddle:mul").explain("matmul").treatment == "fp32"


@pytest.mark.parametrize("pairs", [SYNONYMS, SPELLINGS, PADDLE_ALIASES, MODULES])
def test_synonyms_lead_to_rows(pairs):
    assert {op for op in pairs.values() if op not in OPS} == set()


def test_synonyms_are_second_names_of_torch():
    assert {name for name in SYNONYMS if not callables(name)} <= {"cross_entropy_loss"}
    assert {name for name in SYNONYMS if name in OPS} == set()
    assert {
        name for name, op in SYNONYMS.items() if op not in VIEWS and not {*callables(name)} <= {*functions(op)}
    } == set()


def test_every_module_with_a_functional_form_resolves():
    containers = {
        "AdaptiveLogSoftmaxWithLoss", "Container", "DataParallel", "Identity", "Module", "ModuleDict", "ModuleList",
        "ParameterDict", "ParameterList", "RNNBase", "RNNCellBase", "Sequential", "Transformer", "TransformerDecoder",
        "TransformerDecoderLayer", "TransformerEncoder", "TransformerEncoderLayer",
    }  # fmt: skip
    for name, entry in vars(torch.nn).items():
        if inspect.isclass(entry) and issubclass(entry, torch.nn.Module) and name not in containers:
            assert resolve(f"nn.{name}") in OPS
    for name in containers & {"Transformer", "Sequential"}:
        with pytest.raises(PolicyError, match=f"'nn.{name}' is a module, not an op") as caught:
            resolve(f"nn.{name}")
        assert "fp32_module=" in str(caught.value)


@pytest.mark.parametrize(
    "wrong, near",
    [
        ("layer_nrom", "layer_norm"), ("Sofmax", "softmax"), ("torch.linalg.invv", "linalg_inv"), ("MatMul", "matmul"),
        ("elementwise_ad", "elementwise_add"), ("conv_2d", "conv2d"), ("SOFTMAX", "softmax"), ("LayrNorm", "LayerNorm"),
    ],
)  # fmt: skip
def test_unknown_names_suggest_the_nearest(wrong, near):
    with pytest.raises(PolicyError, match=re.escape(f"unknown op {wrong!r}")) as caught:
        resolve(wrong)
    assert near.lower().replace("_", "") in str(caught.value).lower().replace("_", "")
    assert "did you mean" in str(caught.value)


def test_a_name_like_no_other_gets_no_suggestion():
    with pytest.raises(PolicyError, match="unknown op 'qqqqqq'") as caught:
        resolve("qqqqqq")
    assert "did you mean" not in str(caught.value)
    assert "neither the op table nor torch has it" in str(caught.value)


# In place, views, globs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name, instead", [("exp_", "exp"), ("F.relu_", "relu"), ("__iadd__", "add"), ("mul_", "mul")])
def test_in_place_variants_are_refused_for_nothing_casts_them(name, instead):
    with pytest.raises(PolicyError, match=re.escape(f"the in-place op {name!r} is never cast")) as caught:
        resolve(name)
    assert f"write  {instead!r}" in str(caught.value)
    with pytest.raises(PolicyError, match="is never cast"):
        Rule("low", op=name)
    assert functions(name.removeprefix("F.")) == ()


def test_in_place_names_can_be_asked_for():
    assert resolve("Tensor.exp_", in_place=True) == "exp_"
    assert resolve("softmax", in_place=True) == "softmax"


def test_views_are_never_cast_for_a_write_to_the_copy_would_be_lost():
    x = torch.randn(4, 4)
    aliases = {"view": (16,), "reshape": (16,), "transpose": (0, 1), "narrow": (0, 0, 1), "chunk": (2,), "unbind": ()}
    for name, arguments in aliases.items():
        result = getattr(x, name)(*arguments)
        first = result if isinstance(result, torch.Tensor) else result[0]
        assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert name in VIEWS
    assert set(OPS) >= VIEWS
    assert all(functions(name) == () and callables(name) for name in VIEWS)


def test_functions_cover_the_places_users_look():
    found = functions("softmax")
    assert {torch.softmax, functional.softmax, torch.Tensor.softmax, torch.special.softmax} <= set(found)
    assert torch.Tensor.__matmul__ in functions("matmul")
    assert {torch.arccos, torch.Tensor.arccos, torch.acos} <= set(functions("acos"))
    assert {torch.inverse, torch.linalg.inv} <= set(functions("linalg_inv"))
    assert {torch.Tensor.__rpow__, torch.Tensor.__pow__} <= set(functions("pow"))
    assert torch.Tensor.__rtruediv__ in functions("reciprocal")
    assert torch.Tensor.__rmatmul__ not in functions("matmul")  # its operands come the other way round
    assert functions("no_such_function") == ()


def test_globs_expand_over_the_table():
    assert set(matching("conv?d")) == {"conv1d", "conv2d", "conv3d"}
    assert list(matching("zzz*")) == []


def test_products_of_experts_run_low_although_no_list_of_torch_s_names_them():
    for spelling in ("grouped_mm", "_grouped_mm", "aten::_grouped_mm"):
        assert Policy.O1("bfloat16").explain(spelling).treatment == "low"
