"""One parameter's state, between what executors use and what torch's state dicts hold."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError
from mezzo.shards import placed, sharded_as
from mezzo.step.split import encode
from mezzo.step.storage import Storage
from mezzo.step.update import RULES, UpdateRule
from mezzo.tensors import LOW, local

__all__ = [
    "EXTRAS",
    "WEIGHT_DTYPES",
    "held_state",
    "merged_group",
    "plain_group",
    "plain_state",
    "restored_state",
    "share_counts",
    "widened_state",
]

#: The other halves that weights can have.
EXTRAS: Final = ("remainder", "master", "compensation")
#: Where a saved group says of which dtypes its weights are: their other halves belong to those.
WEIGHT_DTYPES: Final = "weight_dtypes"
#: Options that say how weights and states lie in memory, which a loaded state does not change.
STORING: Final = ("master", "rounding", "state_dtype")


def plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group as it is saved, its parameters apart: NumPy's numbers are Python's."""
    return {name: _plain(value) for name, value in group.items() if name != "params"}


def _plain(value: Any) -> Any:
    if isinstance(value, numpy.generic):
        return value.item()
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return state as it is saved: the count as a float64 tensor, which is exact to 2^53."""
    plain = dict(state)
    if isinstance(plain.get("step"), Tensor):
        plain["step"] = plain["step"].to(torch.float64)
    return plain


def widened_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return state with its low-precision tensors in FP32, which is exact; all else stays. LBFGS has lists of them."""
    return {name: _widened(value) for name, value in state.items()}


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW else value
    return list(map(_widened, value)) if type(value) is list else value


def restored_state(
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    param: Tensor,
    form: Storage,
    update_rule: UpdateRule,
    state_dtype: str,
    weight_dtype: str | None = None,
) -> dict[str, Any]:
    """Return the state of a parameter that continues a saved one.

    Args:
        saved: Of this optimizer, or of torch's of the same name.
        present: What the parameter has now; its other half stays where ``saved`` has none.
        param: The parameter.
        form: How its weight is stored.
        update_rule: What the state is for.
        state_dtype: Of the moments.
        weight_dtype: Of the weight that a saved other half belongs to, where that is known.

    Raises:
        StateError: Another shape, too few states, or the other half of another storage.
    """
    moments = RULES[update_rule.name].states
    # torch's SGD has kept None for a momentum that is yet to come.
    known = {name: value for name, value in saved.items() if name not in moments or isinstance(value, Tensor)}
    saved = _usable(known, param, form, weight_dtype)
    extras = [name for name in EXTRAS if name in saved]
    if param.dtype != torch.float32 and extras and extras != [form.extra]:
        raise StateError(
            f"the saved weights are stored with a {extras[0]}, and these with {form.extra or 'none'}",
            where=f"a parameter of shape {tuple(param.shape)} and {param.dtype}",
            why="the FP32 values follow from both halves, which load at different times",
            write="the master= and rounding= that the state was saved with",
        )
    _require_whole(saved, update_rule, param)

    def restored(name: str, value: Any) -> Any:
        if name == "step":
            return torch.as_tensor(value).to(param.device, torch.int64).reshape(()).clone()
        if name in moments or name == form.extra:
            _require_shape(name, value, param)
        if name in moments:
            dtype = getattr(torch, state_dtype)
            laid_out = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)
            return laid_out.copy_(placed(value, param))
        if name == form.extra:
            value = placed(value, param)
        return value.to(param.device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)

    kept = [name for name in saved if name not in EXTRAS or name == form.extra]  # and notes of the user's
    state = {name: restored(name, saved[name]) for name in kept}
    if form.extra is not None and form.extra not in state and form.extra in present:
        state[form.extra] = present[form.extra]
    if "step" not in state and any(name in state for name in moments):
        # torch's SGD counts nothing: a momentum is there from its first step on. Other libraries' Lion is alike.
        state["step"] = torch.ones((), dtype=torch.int64, device=param.device)
    return state


def _require_whole(saved: Mapping[str, Any], update_rule: UpdateRule, param: Tensor) -> None:
    """Refuse a history of which a part is missing; one that has not begun yet may be as short as it likes."""
    missing = [name for name in update_rule.states if name not in saved]
    if "step" not in saved:
        begun = len(missing) < len(update_rule.states)
        missing += ["step"] if update_rule.name in ("adam", "adamw") else []
    else:
        begun = bool(missing) and float(saved["step"]) != 0
    if begun and missing:
        count = f"step {float(saved['step']):g} of a" if "step" in saved else "a"
        raise StateError(
            f"the saved state has no {missing[0]}",
            where=f"{count} parameter of shape {tuple(param.shape)}, "
            f"which has {', '.join(name for name in saved if name != 'step') or 'nothing else'}",
            why="moments that begin at zero in the middle of a run would take steps of another size",
            write="the state of an optimizer of the same name and options",
        )


def _usable(saved: Mapping[str, Any], param: Tensor, form: Storage, weight_dtype: str | None) -> dict[str, Any]:
    """Leave out what torch has cast, or what belongs to a weight of another dtype; split what was saved whole."""
    fits = weight_dtype in (None, str(param.dtype))
    dtypes = {"master": torch.float32, **({"remainder": torch.int16, "compensation": param.dtype} if fits else {})}
    usable = {n: value for n, value in saved.items() if n not in EXTRAS or value.dtype == dtypes.get(n)}
    if "master" in usable and form.extra == "remainder":
        _require_shape("master", usable["master"], param)
        master = placed(usable.pop("master"), param)
        _, remainder = encode(local(master), param.dtype)
        usable["remainder"] = sharded_as(remainder, param)
    return usable


def merged_group(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[str | None]]:
    """Return a parameter group with saved options but its own way of storing, and the dtype of each saved weight."""
    count, dtypes = len(saved["params"]), saved.get(WEIGHT_DTYPES, ())
    own = {name: mine[name] for name in (*STORING, "params") if name in mine}
    group = {**mine, **saved, **own}
    group.pop(WEIGHT_DTYPES, None)
    return group, dtypes if len(dtypes) == count else [None] * count


def share_counts(states: Iterable[dict[str, Any]]) -> None:
    """Let parameters with equal counts share one, so that they are updated together again.

    Raises:
        StateError: A count that no number of steps gives.
    """
    counted = [state for state in states if "step" in state]
    shared: dict[tuple[torch.device, int], Tensor] = {}
    for device in {state["step"].device for state in counted}:
        here = [state for state in counted if state["step"].device == device]
        counts = torch.stack([state["step"] for state in here]).tolist()  # one transfer for all
        if wrong := [count for count in counts if not 0 <= count < 2**53]:
            raise StateError(
                f"the saved step is {wrong[0]}", why="it counts updates, from 0 on", write="optimizer.state_dict()"
            )
        for state, count in zip(here, counts, strict=True):
            state["step"] = shared.setdefault((device, count), state["step"])


def _require_shape(name: str, value: Tensor, param: Tensor) -> None:
    if value.shape != param.shape:
        raise StateError(
            f"the saved {name} belongs to another parameter",
            where=f"{tuple(value.shape)} → {tuple(param.shape)}",
            write="the same model and optimizer",
        )


def held_state(optimizer: Optimizer, params: Mapping[Tensor, str]) -> list[str]:
    """Name the parameters for which an optimizer holds floating state of the parameter's shape, and at least its dtype.

    Args:
        optimizer: The optimizer.
        params: The names of the parameters in question.
    """
    return [
        name
        for param, name in params.items()
        if any(
            isinstance(value, Tensor) and value.is_floating_point() and value.shape == param.shape and value.dim() > 0
            for value in optimizer.state.get(param, {}).values()
            if param.dtype not in LOW or getattr(value, "dtype", None) == torch.float32
        )
    ]
