"""``mezzo.explain``: one traced forward and backward pass on a copy of the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from mezzo.cast.device import arithmetic
from mezzo.cast.emulate import family_of
from mezzo.cast.model.prepare import Prepared, as_named
from mezzo.cast.products import recipe_of
from mezzo.cast.region import autocast
from mezzo.errors import PolicyError, UnsupportedError
from mezzo.explanation.asking import Asked
from mezzo.explanation.explanation import Explanation
from mezzo.explanation.findings import findings
from mezzo.explanation.low_numbers import LowNumbers
from mezzo.explanation.rows import Emulated, Row
from mezzo.policy import Policy, Rule, Treatment
from mezzo.policy.ops import QUANTISED
from mezzo.tensors import LOW, mapped, tensors
from mezzo.trace.function_calls import Locator, frame_id
from mezzo.trace.measure import LostIntegers
from mezzo.trace.probes import RoundedIntegers, lost_integers
from mezzo.trace.recording import PassRecorder
from mezzo.trace.sandbox import as_training_runs, copied, devices_of, require_python, require_scalar
from mezzo.weights import halves

Loss = Callable[[Any], Tensor]

_NO_LOSS: Final = ("loss= must return one floating number", "loss=lambda output: criterion(output, target)")


def explain(
    model: nn.Module,
    *inputs: Any,
    policy: Policy | str | os.PathLike[str] | None = None,
    loss: Loss | None = None,
) -> Explanation:
    """Return which precision each op in each module gets, and why, from one traced forward and backward pass.

    The dtypes are measured at the kernels, not read off the policy; where the two disagree there is a finding. What
    the policy decides, it decides for the device that the tensors are on. The pass runs on a deep copy of the model
    in the state it is in (``train()`` or ``eval()``) and on copies of the inputs, and puts the random states back: the
    model, its buffers, gradients, hooks and the inputs stay as they are. Hooks and ``forward`` of the copy do run, so
    what they write to other objects is written. No loss scale is applied and no optimizer step taken.

    Args:
        model: The model, not prepared yet.
        *inputs: The model's positional arguments. A single tuple stands for all of them, a single mapping for keyword
            arguments.
        policy: A policy, its text, or the path of a policy file; it may stand behind the inputs without its name.
        loss: From the model's output to a scalar, run inside the region as in a training step. When omitted the
            backward pass starts from all floating outputs, as for their sum in FP32.

    Returns:
        The explanation: tables as text, data as JSON.

    Raises:
        PolicyError: A wrong policy, inputs of another kind, or a loss that is no floating scalar.
        UnsupportedError: The model cannot be copied, is scripted or on the meta device, or the device cannot honour
            the policy.
        StateError: The model is prepared already.

    **Cost**: a second copy of weights and buffers while it runs, what pointwise kernels of 16 bits read until it ends,
    and a training step at 100 to 200 µs of Python for each kernel: seconds for a model of thousands of ops. Kernels of
    which a finding may be told run once more in FP64. Programs that torch compiled run uncompiled.

    Example:
        >>> import torch
        >>> from mezzo.explanation import explain
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Softmax(-1))
        >>> explanation = explain(model, torch.ones(4, 8), "O1,dtype=bfloat16,emulate=true")
        >>> for row in explanation.rows:
        ...     print(row.module, row.op, *row.given, "→", *row.computes_in, "→", *row.returns, "by", row.reason)
        0 linear float32 → bfloat16 → bfloat16 by gemm
        1 softmax bfloat16 → float32 → float32 by exponential range
        >>> explanation.cast_bytes(what="parameter")  # 8·16 weights and 16 biases, 4 bytes read and 2 written
        864
    """
    if policy is None:
        if not inputs or not isinstance(inputs[-1], (Policy, str, os.PathLike)):
            raise PolicyError("there is no policy to explain", write='mezzo.explain(model, x, policy="O1,bf16")')
        *given_inputs, policy = inputs
        inputs = tuple(given_inputs)
    policy = Policy.of(policy)
    args, kwargs = arguments(inputs, "mezzo.explain")
    if not isinstance(model, nn.Module):
        raise PolicyError(f"a model must be an nn.Module, not {type(model).__name__}", write="mezzo.explain(model, …)")
    of_inputs = (tensor.device for tensor in tensors((args, kwargs)))
    devices = list(dict.fromkeys((*devices_of([model]), *of_inputs)))
    _check_runs(model, devices)
    # A region that is active where explain is called would act on top of the policy's.
    with as_training_runs(devices), autocast("O0"):
        args, kwargs = copied_inputs((args, kwargs))
        return _traced(
            copied(model, "mezzo.explain(build_model(), inputs, policy)"), args, kwargs, policy, loss, devices
        )


def _traced(
    model: nn.Module, args: Any, kwargs: Any, policy: Policy, loss: Loss | None, devices: list[torch.device]
) -> Explanation:
    policy = as_named(model, policy)
    rounded = _rounded_buffers(model, policy)
    handle = Prepared(model, policy, logs_unreached_rules=False)  # findings tell it
    low_numbers = LowNumbers(model, lambda: recorder.recorded)
    probes = (
        [RoundedIntegers(), *low_numbers.probes] if policy.casts or policy.param_dtype in LOW else [RoundedIntegers()]
    )
    recorder = PassRecorder(handle.policy, _ruled(model, handle.policy), where=Locator(until=frame_id()), probes=probes)
    region = handle.autocast()
    recorder.learn(model, (args, kwargs))
    with recorder.hooked([model]):
        with region, recorder.watching():
            output = model(*args, **kwargs)
            value = None if loss is None else require_scalar(loss(output), *_NO_LOSS)
        starts = _starts(output) if value is None else [value]
        differentiable = [tensor for tensor in starts if tensor.requires_grad]
        if differentiable:
            # A sum in FP32 gives every output a gradient of ones, in the output's dtype.
            ones = [torch.ones_like(tensor) for tensor in differentiable]
            with recorder.watching(backward=True):
                region.run_backward(differentiable, grad_tensors=ones)  # type: ignore[arg-type]
    facts = Asked(recorder.table(), policy.dtype, rounded)
    return Explanation(
        model=type(model).__name__,
        policy=str(policy),
        devices=tuple(dict.fromkeys(device.type for device in devices)),
        torch=torch.__version__,
        emulated=_emulated(policy, region.device_types, facts.rows),
        rows=facts.rows,
        casts=facts.casts(),
        misaligned=facts.misaligned(),
        findings=findings(model, policy, facts, low_numbers, has_backward=bool(differentiable)),
        products=facts.products,
        moved_bytes=facts.moved_bytes(),
        weights=str(stored) if (stored := halves(model)).count else "",
    )


# Before ---------------------------------------------------------------------------------------------


def arguments(inputs: tuple[Any, ...], verb: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model is called with: a single tuple stands for all arguments, a single mapping for keywords.

    Args:
        inputs: What a caller has given beside the model.
        verb: The caller, for the error.

    Raises:
        PolicyError: A single argument of another kind.
    """
    if len(inputs) != 1:
        return inputs, {}
    (only,) = inputs
    if isinstance(only, Tensor):
        return (only,), {}
    if type(only) is tuple:
        return only, {}
    if isinstance(only, Mapping) and all(isinstance(key, str) for key in only):
        return (), dict(only)
    raise PolicyError(
        f"the inputs are a {type(only).__name__}",
        why="a tensor is the model's one argument, a tuple its positional ones, a mapping its keyword arguments",
        write=f"{verb}(model, (inputs,), policy=policy)   # one argument, whatever it is",
    )


def copied_inputs(inputs: Any) -> Any:
    """Return a copy of nested containers, each tensor copied once: no gradient or in-place edit reaches the user's."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        return copies.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))

    return mapped(inputs, copy)


def _check_runs(model: nn.Module, devices: list[torch.device]) -> None:
    require_python(model, "explained")
    if any(device.type == "meta" for device in devices):
        raise UnsupportedError(
            "a model on the meta device cannot be explained",
            why="dtypes are measured at kernels, and there are none",
            write='model.to_empty(device="cpu"), and inputs on that device',
        )


def _ruled(model: nn.Module, policy: Policy) -> dict[int, tuple[Rule, str]]:
    """Return the rule of each parameter and buffer, and the first path that has it, by id."""
    rules: dict[int, tuple[Rule, str]] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for path, tensor in named:
        rule = policy.product_rule(path) or policy.storage(path, path.rpartition(".")[0])[1]
        if rule is not None and id(tensor) not in rules:
            rules[id(tensor)] = (rule, path)
    return rules


def _rounded_buffers(model: nn.Module, policy: Policy) -> dict[str, LostIntegers]:
    """Return what is lost of the integers in buffers that O3 stores low."""
    lost_by_path = {}
    for path, buffer in model.named_buffers() if policy.param_dtype in LOW else ():
        dtype, _ = policy.storage(path, path.rpartition(".")[0])
        if buffer.dtype == torch.float32 and dtype in LOW and (lost := lost_integers(buffer, dtype)) is not None:
            lost_by_path[path] = lost
    return lost_by_path


# The backward pass ------------------------------------------------------------------------------------


def _starts(output: Any) -> list[Tensor]:
    floating = {id(x): x for x in tensors(output) if x.is_floating_point()}
    if not floating:
        raise PolicyError(
            "the model's output holds no floating tensor to start a backward pass from",
            where=type(output).__name__,
            write="mezzo.explain(model, inputs, policy, loss=lambda output: …)   # a scalar",
        )
    return list(floating.values())


# After ------------------------------------------------------------------------------------------------


def _emulated(policy: Policy, device_types: tuple[str, ...], rows: tuple[Row, ...]) -> tuple[Emulated, ...]:
    """Return why families were emulated, on the first device that emulates them."""
    were = {family_of(row.op) for row in rows if row.emulated}
    below: tuple[Treatment, ...] = tuple(
        treatment for treatment in QUANTISED if any(row.emulated and row.treatment == treatment for row in rows)
    )
    by_family: dict[str, Emulated] = {}
    for device_type in reversed(device_types):
        for family, choice in arithmetic(policy.dtype, device_type, policy.emulate).items():
            if family in were and choice.action == "emulate":
                by_family[family] = Emulated(family, choice.reason)
        for treatment in below:
            lacks = recipe_of(policy, treatment).support_on(device_type, policy.dtype).lacks
            name = f"{treatment} products"
            by_family[name] = Emulated(name, "emulate=True asks for it" if policy.emulate is True else lacks)
    return tuple(by_family.values())
