"""torch's own autocast test lists, CUDA's and the CPU's, on CPU tensors under a portable policy."""

import collections

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

import mezzo
from mezzo import Policy

# torch's list, where each op is found, and the treatment that its name stands for.
CUDA_LISTS = [
    ("torch_fp16", torch, "low"), ("nn_fp16", torch._C._nn, "low"), ("linalg_fp16", torch._C._linalg, "low"),
    ("methods_fp16", torch.Tensor, "low"), ("torch_fp32", torch, "fp32"), ("nn_fp32", torch._C._nn, "fp32"),
    ("methods_fp32", torch.Tensor, "fp32"), ("torch_need_autocast_promote", torch, "promote"),
    ("torch_expect_builtin_promote", torch, "builtin"), ("methods_expect_builtin_promote", torch.Tensor, "builtin"),
]  # fmt: skip
CPU_LISTS = [("torch_16", torch, "low"), ("nn_16", torch._C._nn, "low"), ("torch_fp32", torch, "fp32"),
             ("nn_fp32", torch._C._nn, "fp32"), ("torch_need_autocast_promote", torch, "promote"),
             ("torch_expect_builtin_promote", torch, "builtin"),
             ("methods_expect_builtin_promote", torch.Tensor, "builtin")]  # fmt: skip
DTYPES = [torch.float16, torch.bfloat16]
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated"),
    pytest.mark.filterwarnings("ignore:Using torch.cross without specifying"),
]


def entries(lists, tables):
    for table, owner, treatment in tables:
        for entry in getattr(lists, table, []):
            name, args, *extra = entry
            if isinstance(args, str):
                continue  # einsum: torch's entry does not fit its own equation; tests/cast covers the op
            kwargs = next((item for item in extra if isinstance(item, dict)), {})
            out_type = next((item for item in extra if isinstance(item, torch.dtype)), None)
            yield table, owner, treatment, name, args, kwargs, out_type


def on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, (list, tuple)):
        return type(value)(on_cpu(item) for item in value)
    return value


def cast(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, dtype) for item in value)
    return value


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def function_of(owner, name):
    for where in (owner, torch, torch._C._nn, torch.nn.functional, torch.Tensor):
        if hasattr(where, name):
            return getattr(where, name)
    return None


def run(policy, function, args, kwargs):
    with mezzo.autocast(policy, "cpu"):
        return function(*args, **kwargs)


def report(lists, tables, policy):
    """Check every entry; return what differed, and what has no CPU kernel, with the reason."""
    outcome = collections.defaultdict(dict)
    for number, (table, owner, treatment, name, args, kwargs, out_type) in enumerate(entries(lists, tables)):
        function, args = function_of(owner, name), on_cpu(args)
        key = f"{table} {number}: {name}"
        if function is None:
            outcome["absent"][key] = "no such function"
            continue
        target = {"low": policy.dtype, "fp32": torch.float32, "promote": torch.float32}.get(treatment)
        control_args = args if target is None else cast(args, target)
        try:
            control = function(*control_args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            outcome["absent"][key] = str(error).splitlines()[0]
            continue
        try:
            got = run(policy, function, args, kwargs)
        except RuntimeError as error:
            outcome["different"][key] = str(error).splitlines()[0]
            continue
        for mine, wanted in zip(tensors(got), tensors(control), strict=True):
            expected = out_type if out_type is not None and treatment == "builtin" else wanted.dtype
            if mine.dtype != expected or not torch.equal(mine, wanted.to(expected)):
                outcome["different"][key] = f"{mine.dtype} instead of {expected}"
        outcome["checked"].setdefault(key, True)
    return outcome


def size(lists, tables):
    return len(list(entries(lists, tables)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_lists(dtype):
    lists = AutocastTestLists(torch.device("cpu"))
    outcome = report(lists, CUDA_LISTS, Policy.O1(dtype, emulate=False))
    assert dict(outcome["different"]) == {}
    absent = {key.split(": ")[1] for key in outcome["absent"]}
    assert absent == {"cudnn_convolution", "cudnn_convolution_transpose"}  # no CPU kernel
    assert len(outcome["checked"]) == size(lists, CUDA_LISTS) - 2 >= 115


def test_cpu_lists():
    lists = AutocastCPUTestLists(torch.device("cpu"))
    outcome = report(lists, CPU_LISTS, Policy.O1("bfloat16", emulate=False, lists="device"))
    assert dict(outcome["different"]) == dict(outcome["absent"]) == {}
    assert len(outcome["checked"]) == size(lists, CPU_LISTS) >= 50


def test_banned_list():
    for name, args, owner in AutocastTestLists(torch.device("cpu")).banned:
        with pytest.raises(mezzo.UnsupportedError, match=f"{name} is banned"):
            run(Policy.O1(emulate=False), getattr(owner, name), args, {})
