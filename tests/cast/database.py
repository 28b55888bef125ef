"""Walk torch's own database of ops under O1, in a process of its own: ``python -m tests.cast.database bf16``.

Each op gets low operands in a region, and the same values in FP32 outside: out of place with its gradients, in place,
and into what ``out=`` gives.
"""

import itertools
import sys

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map, tree_map_only

import mezzo

from .walked import LOW, off, print_as_json, results, running

SEED = torch.default_generator.manual_seed


def walked(word, samples):
    low, fell = LOW[word], {}
    for op in op_db:
        name = ".".join(filter(None, (op.name, op.variant_test_name)))
        if torch.float32 not in op.dtypes:
            continue
        running(name)
        SEED(0)
        # Not op.sample_inputs, which asks the stack who calls: half a minute.
        for sample in itertools.islice(op.sample_inputs_func(op, "cpu", torch.float32, False), samples):
            call = (sample.input, *sample.args), sample.kwargs
            for form, function in forms(op):
                try:
                    want = ran(function, call, form, low)
                except Exception:  # which FP32 refuses
                    continue
                try:
                    with torch.autograd.set_multithreading_enabled(False):
                        got = ran(function, call, form, low, word)
                except Exception as error:
                    fell.setdefault((name, form), f"{type(error).__name__}: {str(error).splitlines()[0]}")
                    continue
                words = [*filter(None, (off(*pair, low) for pair in zip(got, want, strict=True)))]
                if words:
                    fell.setdefault((name, form), max(words, key=len))
    return [(*key, words) for key, words in fell.items()]


def forms(op):
    yield "forward", op.op
    if op.supports_autograd:
        yield "backward", op.op
    if op.inplace_variant is not None:
        yield "in place", op.inplace_variant
    if op.supports_out:
        yield "out=", op.op


def ran(function, call, form, low, word=None):
    """Run one form of an op: in FP32 outside of any region, or, with a policy's dtype, from low operands in one."""

    def operand(x):
        if x.dtype != torch.float32:
            return x.clone()
        kept = x.detach().to(low).to(torch.float32 if word is None else low)
        return kept.requires_grad_() if form == "backward" else kept

    args, kwargs = tree_map_only(torch.Tensor, operand, call)
    if form == "out=":
        made = function(*tree_map_only(torch.Tensor, lambda x: x.clone(), call[0]), **call[1])
        is_low = word is not None
        written = lambda x: torch.zeros_like(x, dtype=low if is_low and x.dtype == torch.float32 else x.dtype)  # noqa: E731
        kwargs = {**kwargs, "out": tree_map(written, tuple(made) if isinstance(made, tuple) else made)}
    SEED(0)
    if word is None:
        out = function(*args, **kwargs)
    else:
        with mezzo.autocast(f"O1,{word}", "cpu"):
            out = function(*args, **kwargs)
    outputs = results(out)
    if form != "backward":
        return outputs
    given = [x for x in results((args, kwargs)) if x.requires_grad]
    outputs = [x for x in outputs if x.requires_grad]
    if not given or not outputs:
        return []
    SEED(1)
    cotangents = [torch.rand(x.shape).to(low).to(x.dtype) for x in outputs]
    return [x for x in torch.autograd.grad(outputs, given, cotangents, allow_unused=True) if x is not None]


if __name__ == "__main__":
    print_as_json(walked(sys.argv[1], int(sys.argv[2])))
