"""What arguments and parameter groups may say, and hyper-parameters where kernels read them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy
import torch
from torch import Tensor

from mezzo.errors import PolicyError, closest, message, nearest, raise_together, shown, some_of, unknown_word
from mezzo.sharded import flags_of_all, is_distributed, local
from mezzo.step.matrix import RATIOS
from mezzo.tensors import CASTABLE, described, dtype_name, dtype_of

Group: TypeAlias = dict[str, Any]

# What no optimizer can work with, found before anything is changed.

_STATE_DTYPES: Final = ("float32", "bfloat16", "int8")
#: Hyper-parameters: the least they may be, and what to write.
_LEAST: Final = {
    "lr": (0.0, "1e-3"),
    "eps": (0.0, "1e-8"),
    "weight_decay": (0.0, "0.01"),
    "momentum": (0.0, "0.9"),
    "dampening": (-math.inf, "0.0"),
}
#: Options that are on or off.
_FLAGS: Final = ("amsgrad", "maximize", "nesterov")
_ONE_PASS: Final = "a step here is always one pass that never waits for the host, so that a CUDA graph can capture it"
#: Arguments of torch's optimizers that have no meaning here: why, and what to write instead.
_TORCH_ONLY: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        **dict.fromkeys(("foreach", "fused", "capturable"), (_ONE_PASS, "leave it out")),
        "differentiable": ("autograd does not record an update here", "leave it out; torch.optim's where it is True"),
        "decoupled_weight_decay": ("that is another class here", "leave it out; mezzo.optim.AdamW where it is True"),
    }
)


def check_arguments(optimizer: object, others: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that an optimizer's signature does not name.

    Args:
        optimizer: The optimizer under construction.
        others: What is left over.

    Raises:
        PolicyError: One message lists everything.
    """
    cls, problems = type(optimizer), []
    for name, value in others.items():
        if name not in _TORCH_ONLY:
            accepted = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
            problems.append(PolicyError(f"{cls.__name__} has no argument {name!r}", why=nearest(name, accepted)))
        elif value:  # torch's optimizers have none of them by default
            why, write = _TORCH_ONLY[name]
            problems.append(PolicyError(f"{cls.__name__} takes no {name}={value!r}", why=why, write=write))
    raise_together(problems)


def check_group(group: Mapping[str, Any], where: str = "") -> None:
    """Raise all that is wrong with the values of a parameter group.

    Args:
        group: With the defaults filled in. Its parameters are looked at where they are a list.
        where: Which group it is, for the message.

    Raises:
        PolicyError: One message lists everything.
    """
    raise_together(_problems(group, where))


def require_ordered(params: Any) -> Any:
    """Return parameters as they are given, unless their order would change between runs.

    Raises:
        TypeError: A set, as torch's optimizers refuse it.
    """
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            message(
                f"optimizer parameters need to be organized in ordered collections, not in a {type(params).__name__}",
                why="its order changes from run to run, and a saved state belongs to parameters by their order",
                write="a list of them",
            )
        )
    return params


def with_dtype_name(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group, or the defaults of an optimizer, with the full name of the dtype of its state."""
    if "state_dtype" not in group:
        return dict(group)
    dtype = dtype_of(group["state_dtype"])
    return {**group, "state_dtype": dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype}


def frozen(value: Any) -> Any:
    """Return a value of a group as a step reads it on the host: no list, and no tensor, that a program may write to."""
    if isinstance(value, Tensor | numpy.generic):
        return value.item()
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def rate_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in which a group has its learning rate: float64, or that of a tensor."""
    rate = group["lr"]
    return rate.dtype if isinstance(rate, Tensor) and rate.is_floating_point() else torch.float64


def _problems(group: Mapping[str, Any], where: str) -> Iterator[PolicyError]:
    for name, (least, example) in _LEAST.items():
        if not is_number(group.get(name, 0.0), least, math.inf):
            why = "it is a finite number" + (f" from {least:g}" if math.isfinite(least) else "")
            yield PolicyError(f"{name} is {group[name]!r}", where=where, why=why, write=f"{name}={example}")
    for name in _FLAGS:
        if not isinstance(flag := group.get(name), (bool, int, numpy.bool_, type(None))):
            yield PolicyError(f"{name} is {in_words(flag)}", where=where, why="it is on or off", write=f"{name}=True")
    betas = group.get("betas", (0.0, 0.0))
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(is_number(b, 0.0, 1.0) for b in betas)):
        why = "each is from 0 to below 1"
        yield PolicyError(f"betas are {betas!r}", where=where, why=why, write="betas=(0.9, 0.999)")
    yield from _wrong_settings(group, where)
    # Without a dampening it is Muon's, which without momentum looks nowhere.
    if group.get("nesterov") and "dampening" in group and (not group.get("momentum") or group.get("dampening")):
        yield PolicyError(
            "nesterov needs momentum and no dampening",
            where=f"momentum={group.get('momentum')}, dampening={group.get('dampening')}",
            write="momentum=0.9, dampening=0, nesterov=True",
        )
    if group["state_dtype"] not in _STATE_DTYPES:
        wrong = str(group["state_dtype"])
        write = f'state_dtype="{closest(wrong, _STATE_DTYPES) or "bfloat16"}"'
        yield PolicyError(f"unknown state_dtype {wrong!r}", why=nearest(wrong, _STATE_DTYPES), write=write)
    yield from wrong_weights(group.get("params"))


def _wrong_settings(group: Mapping[str, Any], where: str) -> Iterator[PolicyError]:
    """Yield what is wrong with Muon's values in a group."""
    steps, numbers = group.get("ns_steps", 0), group.get("ns_coefficients", (0.0, 0.0, 0.0))
    if isinstance(steps, bool) or not isinstance(steps, int | numpy.integer) or not 0 <= steps < 100:
        why = "the polynomial is applied so often: a whole number from 0 to 99"
        yield PolicyError(f"ns_steps is {in_words(steps)}", where=where, why=why, write="ns_steps=5")
    are_numbers = isinstance(numbers, tuple | list) and all(is_number(n, -math.inf, math.inf) for n in numbers)
    if not are_numbers or len(numbers) != 3:
        why, write = "they are three finite numbers", "ns_coefficients=(3.4445, -4.775, 2.0315)"
        yield PolicyError(f"ns_coefficients are {numbers!r}", where=where, why=why, write=write)
    word = group.get("adjust_lr_fn")
    if not isinstance(word, str | None) or word not in RATIOS:
        yield unknown_word("adjust_lr_fn", word, [name for name in RATIOS if name is not None])


def is_number(value: Any, least: float, end: float) -> bool:
    """Whether a value is from ``least`` to below ``end``. A tensor off the CPU is not asked, which would wait."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or not holds_numbers(value):
            return False
        if value.device.type != "cpu":
            return True
        value = host_number(value)
    if not isinstance(value, Real):  # NumPy's are
        return False
    try:
        number = float(value)
    except OverflowError:  # a whole number may be beyond it
        return False
    return math.isfinite(number) and least <= number < end


def host_number(number: Tensor) -> float:
    """Return what a tensor of one number in host memory holds, also while a graph is captured."""
    return float(number.detach().double().reshape(()).numpy())


def wrong_weights(params: Any) -> Iterator[PolicyError]:
    """Yield what stands against weights in dtypes that no storage takes.

    Those that are not trained may be anything, quantised for instance.

    Args:
        params: A list of parameters, or of names with parameters; of anything else nothing is said.
    """
    unsupported = []
    for entry in params if isinstance(params, (list, tuple)) else ():
        name, param = entry if isinstance(entry, tuple) else ("a parameter", entry)
        if (
            isinstance(param, Tensor)
            and param.dtype not in CASTABLE
            and (param.requires_grad or param.grad is not None)
        ):
            unsupported.append(f"{name} ({dtype_name(param.dtype)}, shape {tuple(param.shape)})")
    if unsupported:
        yield PolicyError(
            "weights in a format that no optimizer of mezzo's updates",
            where=some_of(unsupported),
            why="weights are float32, float16 or bfloat16",
            write="model.float() first; or requires_grad_(False) for what is not trained",
        )


def holds_numbers(value: Any) -> bool:
    """Whether a value is a tensor whose real numbers lie in its memory."""
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return is_dense and not value.is_quantized and not value.is_complex()


def in_words(value: Any) -> str:
    """Write a value that a saved state should not have: of a tensor what it is, of a container only that it is one."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f"{dtype_name(value.layout)} "
        word = "quantized " if value.is_quantized else layout
        return f"a {word}tensor, {described(value)}{' on meta' if value.is_meta else ''}"
    return shown(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


# Hyper-parameters where kernels read them, following ``param_groups`` where schedulers change them.


def changes_nothing(groups: Iterable[Mapping[str, Any]], gradients: Iterable[Tensor]) -> bool:
    """Whether learning rates and gradients are all zero, as where ``torch.distributed.checkpoint`` has state made.

    The gradients are looked at, which waits for the device, and for other ranks where they are shards, only where every
    rate is a zero in host memory.
    """
    rates = [group.get("lr") for group in groups]
    if any((isinstance(rate, Tensor) and rate.device.type != "cpu") or rate != 0 for rate in rates):
        return False
    remaining = list(gradients)
    changes = any((shard._values() if shard.is_sparse else shard).any() for shard in map(local, remaining))
    if not any(map(is_distributed, remaining)):
        return not changes
    return not flags_of_all(torch.tensor([changes], device=remaining[0].device), remaining).any()


class Hypers:
    """One group's hyper-parameters as 0-d float64 tensors of one device.

    Args:
        names: Which, as the update rule calls them: ``beta1`` and ``beta2`` are the two of ``betas``.
        device: Where they live.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.tensors = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
        self._uploaded: dict[str, float] = {}

    def upload(self, group: Mapping[str, Any], optimizer: object, number: int) -> None:
        """Bring over what changed, without waiting for the device.

        Tensors in host memory count as the numbers that they hold, so that a graph captured meanwhile copies nothing
        from there.

        Args:
            group: The parameter group.
            optimizer: Whose it is, for errors.
            number: Which it is.

        Raises:
            PolicyError: A value that no update can work with was written to the group; nothing was uploaded of it.
        """
        for name, tensor in self.tensors.items():
            value = group["betas"][int(name[-1]) - 1] if name.startswith("beta") else group[name]
            if isinstance(value, Tensor) and value.device.type != "cpu":
                tensor.copy_(value, non_blocking=True)
                self._uploaded.pop(name, None)
                continue
            given: Any = host_number(value) if isinstance(value, Tensor) else value
            if name not in self._uploaded or self._uploaded[name] != given:
                where = f"{type(optimizer).__name__}, group {number}"
                check_group({**group, "params": None, **({} if name.startswith("beta") else {name: given})}, where)
                self._uploaded.pop(name, None)  # until it is there: an interrupt may come in between
                tensor.fill_(float(given))  # of NumPy's, say
                self._uploaded[name] = float(given)
