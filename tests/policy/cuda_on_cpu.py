"""CUDA's autocast on CPU tensors, at the dispatcher: an oracle that knows nothing of mezzo's op table.

The lists are read from the header that torch ships, and registered for the AutocastCPU key with torch's own casting
rules; what the CPU lists beyond them falls through. torch's own operator samples are then run four ways, and the
dtypes that come out are returned. It takes a process of its own, for it replaces kernels of the whole process.
"""

import re
import warnings
from pathlib import Path

import torch

_MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": "low",
    "AT_FORALL_FP32": "fp32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "set dtype",
    "AT_FORALL_PROMOTE": "promote",
}
#: Registered beside the macros, with signatures of their own.
_BY_HAND = {
    "norm.Scalar": "append dtype", "norm.ScalarOpt_dim": "append dtype", "norm.names_ScalarOpt_dim": "append dtype",
    "binary_cross_entropy": "ban",
    "cudnn_convolution": "low", "cudnn_convolution_transpose": "low", "_cudnn_rnn": "low",
    "linalg_matrix_sqrth": "fp32",  # from torch 2.14 on
}  # fmt: skip


def registrations(key):
    """Overload names with a kernel of their own for a dispatch key, in the installed torch."""
    names = torch._C._dispatch_get_all_op_names()
    registered = (n for n in names if n.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(n, key))
    return {name.removeprefix("aten::") for name in registered}


def header_lists():
    """Overload name → what torch's header says about it under CUDA autocast."""
    text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text(encoding="utf-8")
    known = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()}
    lists = {name: rule for name, rule in _BY_HAND.items() if name in known}
    for macro, rule in _MACROS.items():
        (body,) = re.findall(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)
        for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body):
            lists[f"{name}.{overload}" if overload else name] = rule
    return lists


def install():
    """Register CUDA's lists for AutocastCPU; they last as long as the returned library."""
    library = torch.library.Library("aten", "IMPL")
    cuda, lists = registrations("AutocastCUDA"), header_lists()
    for name in cuda | registrations("AutocastCPU"):
        kernel = _kernel(name, lists[name]) if name in cuda else torch.library.fallthrough_kernel
        library.impl(name, kernel, "AutocastCPU")
    return library


def _kernel(name, rule):
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base)
    op = getattr(packet, overload or "default")
    names = [argument.name for argument in op._schema.arguments]

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            low = torch.get_autocast_dtype("cpu")
            if rule == "ban":
                raise RuntimeError("banned")
            if rule in ("set dtype", "append dtype"):
                given = dict(zip(names, args, strict=False)) | kwargs
                if not _eligible(args[0]):
                    return op(*args, **kwargs)
                if rule == "set dtype":
                    return op(**given | {"dtype": given.get("dtype") or torch.float32})
                if "dim" not in names:
                    return packet.ScalarOpt_dtype(args[0], given.get("p", 2), dtype=torch.float32)
                rest = (given["dim"], given.get("keepdim", False))
                with_dtype = getattr(packet, f"{overload}_dtype")
                return with_dtype(args[0], given["p"], *rest, dtype=torch.float32)
            target = {"low": low, "fp32": torch.float32}.get(rule)
            if target is None:
                wide = any(x.dtype == torch.float32 for x in _leaves((args, list(kwargs.values()))) if _eligible(x))
                target = torch.float32 if wide else low
            return op(*_cast(args, target), **{key: _cast(value, target) for key, value in kwargs.items()})

    return run


def _eligible(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _leaves(value):
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _cast(value, dtype):
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if _eligible(value) else value


# What is run ------------------------------------------------------------------------------------------


def extra_cases():
    """What torch's samples leave out: operators, and Python functions with a body worth following."""
    F, t = torch.nn.functional, torch.randn
    x, y, image = t(4, 6), t(4, 6), t(2, 3, 8, 8)
    return {
        "x @ y.T": (lambda a, b: a @ b.T, x, y),
        "x ** 2": (lambda a: a**2, x),
        "2 ** x": (lambda a: 2**a, x),
        "1 / x": (lambda a: 1 / a, x),
        "1 - x": (lambda a: 1 - a, x),
        "x.norm()": (lambda a: a.norm(), x),
        "torch.norm(dim)": (lambda a: torch.norm(a, dim=1), x),
        "torch.var": (torch.var, x),
        "gumbel_softmax": (F.gumbel_softmax, x),
        "softmin": (lambda a: F.softmin(a, -1), x),
        "pairwise_distance": (F.pairwise_distance, x, y),
        "gaussian_nll_loss": (lambda a, b, v: F.gaussian_nll_loss(a, b, v), x, y, t(4, 6).abs() + 0.1),
        "triplet_margin_with_distance_loss": (F.triplet_margin_with_distance_loss, x, y, t(4, 6)),
        "instance_norm": (F.instance_norm, image),
        "interpolate(nearest)": (lambda a: F.interpolate(a, scale_factor=2), image),
        "interpolate(area)": (lambda a: F.interpolate(a, size=(4, 4), mode="area"), image),
        "pad(reflect)": (lambda a: F.pad(a, (1, 1, 1, 1), mode="reflect"), image),
        "embedding_bag": (lambda w: F.embedding_bag(torch.tensor([[1, 2], [0, 3]]), w), x),
        "multi_head_attention": (torch.nn.MultiheadAttention(6, 2), x, y, y),
        "exp_": (lambda a: a.clone().exp_(), x),
        "x **= 2": (lambda a: a.clone().__ipow__(2), x),
        "exp(out=)": (lambda a: torch.exp(a, out=torch.empty_like(a)), x),
        "sum(dtype)": (lambda a: a.sum(dtype=torch.float64), x),
        "softmax(dtype)": (lambda a: F.softmax(a, -1, dtype=torch.bfloat16), x),
    }


def cases(num_samples):
    """Yield ``(op, variant, sample, inputs, call)`` with all inputs wide, all low, and only the first low."""
    from torch.testing._internal.common_methods_invocations import op_db

    samples = []
    for op in op_db:
        if torch.float32 not in op.dtypes or op.name.startswith(("_", "torch.ops", "masked.", "jiterator")):
            continue
        torch.manual_seed(0)
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        some = 4 if name in ("ldexp", "matrix_exp") else num_samples  # what is special about these comes late
        # Not sample_inputs, which looks through the sources for the test that asks: a quarter of the time.
        inputs = op.sample_inputs_func(op, "cpu", torch.float32, False)
        for number, sample in zip(range(some), inputs, strict=False):
            given = (sample.input, *sample.args)
            samples.append((name, "function", number, op.op, given, sample.kwargs))
    samples += [(name, "extra", 0, function, given, {}) for name, (function, *given) in extra_cases().items()]
    for name, variant, number, function, given, kwargs in samples:
        low, low_kwargs = _narrow(tuple(given)), {key: _narrow(value) for key, value in kwargs.items()}
        yield name, variant, number, "wide", function, given, kwargs
        yield name, variant, number, "low", function, low, low_kwargs
        if any(
            operand.dtype == torch.float32 for operand in _leaves((*given[1:], *kwargs.values())) if _eligible(operand)
        ):
            yield name, variant, number, "mixed", function, (low[0], *given[1:]), kwargs


def _narrow(value):
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_narrow(item) for item in value)
    wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.detach().bfloat16() if wide else value


def outcome(function, args, kwargs):
    """The dtypes of what a call returns, or the kind of its error."""
    torch.default_generator.manual_seed(0)
    try:
        return _dtypes(function(*args, **kwargs))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


def _dtypes(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    return [_dtypes(item) for item in value] if isinstance(value, list | tuple) else type(value).__name__


def compared(num_samples):
    """Run so many samples of each op four ways: a row for each, with the dtypes of each way."""
    import mezzo

    warnings.simplefilter("ignore")
    everything = list(cases(num_samples))
    rows = [dict(zip(("op", "variant", "sample", "inputs"), case[:4], strict=True)) for case in everything]
    policy = mezzo.Policy.O1("bfloat16", emulate=False)
    ways = {
        "plain": lambda: torch.autocast("cpu", enabled=False),
        "cpu": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "mezzo": lambda: mezzo.autocast(policy, "cpu"),
    }
    for way, region in ways.items():
        with region():
            for row, case in zip(rows, everything, strict=True):
                row[way] = outcome(*case[4:])
    library = install()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for row, case in zip(rows, everything, strict=True):
            row["cuda"] = outcome(*case[4:])
    del library
    return rows
