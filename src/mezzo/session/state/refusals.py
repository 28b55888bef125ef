"""What stands against a saved state that a session is to continue: every difference, found before anything is changed.

What each value of a state may be stands in a table at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mezzo.errors import PolicyError, StateError, printable, shown
from mezzo.optim.checks import in_words
from mezzo.policy import Policy
from mezzo.scale.state import VALUES, is_count, is_whole
from mezzo.session.core import Core
from mezzo.tensors import described, dtype_name, overflows

__all__ = ["STATE_VERSION", "check"]

#: Of the form of a session's state dict.
STATE_VERSION: Final = 2
#: Lines of a message that lists differences; another model has a great many.
_LINES: Final = 40


def check(core: Core, state: Any, more: Iterable[str] = ()) -> None:
    """Refuse a state that cannot be continued here, with every difference.

    Args:
        core: The session.
        state: The state.
        more: What else differs in what is loaded with it.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if isinstance(version, int) and version != STATE_VERSION:
        raise StateError(f"the state has version {shown(version)}", why=f"this mezzo reads version {STATE_VERSION}")
    if wrong := [*_problems(state, _STATE, "")] or [*_contradictions(state)]:
        raise StateError(
            "this is not the state of a MixedPrecision session", where=_listed(wrong), write="amp.state_dict()"
        )
    if differences := [*_weights(core, state), *_unfinished(core, state), *more]:
        policies = [f"policy {line}" for line in Policy.parse(state["policy"]).differences(core.policy)]
        raise StateError(
            "the state belongs to another session",
            where=_listed([*policies, *differences]),
            why="saved → this session; continuing would not be the same run",
            write="MixedPrecision(model, optimizer, policy) with the saved policy and model",
        )


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return "\n".join([*map(printable, lines[:_LINES]), *more])


def _weights(core: Core, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield each parameter that is another one, or whose weights would lose bits."""
    before, mine = state["parameters"], dict(core.weights.named_params())
    stored = core.weights.stored(in_fp32=True)
    updated = {id(param) for param in core.weights.updated()}
    for name in dict.fromkeys((*before, *mine)):
        was = before.get(name, "missing")
        now = described(mine[name]) if name in mine else "missing"
        dtype, _, shape = was.partition(" ")
        if name not in mine or shape != now.partition(" ")[2]:
            yield f"parameter {name}: {was} → {now}"
            continue
        has_master = name in state["masters"]
        exact, place = "float32" if has_master else dtype, "float32" if mine[name] in stored else now.partition(" ")[0]
        fits = exact == place or (place == "float32" and exact in ("float16", "bfloat16"))
        # What no optimizer updates has no other weights than those that the policy rounds.
        if not fits and (has_master or id(mine[name]) in updated):
            yield f"parameter {name}: {was}{' with a master' if has_master else ''} → {now} without a master"
        elif has_master and overflows(state["masters"][name], mine[name].dtype):
            yield f"parameter {name}: values beyond {torch.finfo(mine[name].dtype).max:g} → {now}"


def _unfinished(core: Core, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what must be the same for loss scales, and for gradients in the middle of a window."""
    policy, has_windows = Policy.parse(state["policy"]), any(state["windows"])
    scales = len(state["loss_scales"])
    is_used = policy.loss_scale.mode == core.policy.loss_scale.mode != "none" or has_windows or state["on_the_way"]
    if scales != len(core.scalers) and is_used:
        yield f"losses: {scales} → {len(core.scalers)}"
    if has_windows:
        if policy.differences(core.policy):
            yield "gradients of an unfinished accumulation window, which belong to the saved policy"
        if (was := state.get("rank", core.place)) != core.place:
            yield f"gradients of an unfinished accumulation window, which are those of {was} → {core.place}"
        if len(state["windows"]) != len(core.groups):
            yield f"optimizers with gradients: {len(state['windows'])} → {len(core.groups)}"
        wide, held = {id(p) for group in core.groups for p in group.wide.params()}, core.weights.named_masters()
        params: list[tuple[str, Any]] = [*core.weights.named_params()]
        for name, param in params:
            # In the middle of a window the first gradient may be as it was made, and a sum in FP32.
            dtypes = {param.dtype, param.grad_dtype or param.dtype, torch.float32 if id(param) in wide else param.dtype}
            gradient = state["gradients"].get(name)
            if gradient is not None and gradient.dtype not in dtypes:
                fits = " or ".join(sorted(map(dtype_name, dtypes)))
                yield f"gradient of {name}: {described(gradient)} → {fits}"
        masterless = [name for name in state["master_gradients"] if name not in held]
        yield from (f"gradient of {name} in a master → no master" for name in masterless)
    buffers = core.weights.named_buffers()
    for name, before in state["buffers"].items() if core.buffers is not None else ():
        now = described(buffers[name]) if name in buffers else "missing"
        if now != described(before):
            yield f"buffer {name}: {described(before)} → {now}"


# The form of a state --------------------------------------------------------------------------------------


def _contradictions(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield names and numbers that stand for nothing in the state itself."""
    params, windows = state["parameters"], [(f"windows[{i}]", w) for i, w in enumerate(state["windows"]) if w]
    tensors = [(kind, state[kind]) for kind in ("masters", "gradients", "master_gradients")]
    tensors += [(f"{at}.aside", window["aside"]) for at, window in windows]
    for where, found in tensors:
        for name, tensor in found.items():
            if name in params and params[name].partition(" ")[2] != str(list(tensor.shape)):
                yield f"{where}.{name} is {described(tensor)}, and the parameter {params[name]}"
    named = [*tensors, ("left", state["left"]), *((f"{at}.beside", window["beside"]) for at, window in windows)]
    yield from (f"{where}: {name} is no parameter" for where, names in named for name in names if name not in params)
    parts = [(f"{at}.{key}", each) for at, window in windows for key in ("settled", "losses") for each in window[key]]
    parts += [(f"{at}.carried", window["carried"]) for at, window in windows if window["carried"] is not None]
    parts += [("on_the_way", each) for each in state["on_the_way"]]
    losses, carried = len(state["loss_scales"]), len(state["carried_scales"])
    for key, count in (("loss_id", losses), ("scale", carried)):
        yield from (f"{where}.{key} is {part[key]}, of {count}" for where, part in parts if part.get(key, -1) >= count)
    for key, count in (("stats.scales", len(state["stats"]["scales"])), ("carried_scales", min(losses, carried))):
        if count != losses:
            yield f"{key} are {count}, and loss_scales {losses}"


# What values may be --------------------------------------------------------------------------------------


class _A(NamedTuple):
    """A single value of some kind."""

    kind: str
    fits: Callable[[Any], bool]


#: A kind of value, a mapping with these keys (one with a question mark may be missing), one from any name
#: (``{str: form}``), a list (``[form]``), or a form that may be ``None`` (``(form, None)``).
Form: TypeAlias = Any


def _problems(value: Any, form: Form, where: str) -> Iterator[str]:
    """Yield what is wrong with a value; the text says where it stands."""
    if isinstance(form, _A):
        if not form.fits(value):
            yield f"{where or 'it'} is {in_words(value)}, not {form.kind}"
    elif isinstance(form, tuple):
        yield from () if value is None else _problems(value, form[0], where)
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{where} is {in_words(value)}, not a list"
            return
        for number, each in enumerate(value):
            yield from _problems(each, form[0], f"{where}[{number}]")
    elif not isinstance(value, Mapping):
        yield f"{where or 'it'} is {in_words(value)}, not a mapping"
    else:
        for name in value if str in form else form:
            key = name if str in form else name.removesuffix("?")
            at = f"{where}.{key}" if where else str(key)
            if key in value:
                yield from _problems(value[key], form.get(str) or form[name], at)
            elif key == name:
                yield f"{at} is missing"


def _is_description(value: Any) -> bool:
    """Whether a text is one of :func:`mezzo.tensors.described`."""
    found = re.fullmatch(r"(\w+) \[(\d+(, \d+)*)?\]", value) if isinstance(value, str) else None
    return found is not None and isinstance(getattr(torch, found[1], None), torch.dtype)


def _is_policy(value: Any) -> bool:
    try:
        return bool(Policy.parse(value))
    except PolicyError:
        return False


_SCALE_STATE = {name: _A(kind, fits) for name, (fits, kind) in VALUES.items()}
_SCALE, _MARKS = _SCALE_STATE["scale"], _SCALE_STATE["window"]
_COUNT = _A("a whole number from 0", is_count)
_NUMBER = _A("a number", lambda value: isinstance(value, float) or is_whole(value))
_RANKS = _A("a whole number from 1", lambda value: is_count(value) and value > 0)
_FLAG = _A("True or False", lambda value: isinstance(value, bool))
_TEXT = _A("text", lambda value: isinstance(value, str))
_DESCRIPTION = _A("a dtype and a shape", _is_description)


def _tensor(kind: str, dtype: torch.dtype | None = None, *layouts: torch.layout) -> _A:
    """Return the kind of tensors that hold numbers, as those on the meta device do not."""

    def fits(value: Any) -> bool:
        has_values = isinstance(value, Tensor) and not value.is_meta and not value.is_quantized
        return has_values and value.layout in (torch.strided, *layouts) and dtype in (None, value.dtype)

    return _A(kind, fits)


_TENSOR, _FP32 = _tensor("a tensor"), _tensor("a float32 tensor", torch.float32)
_GRADIENT = _tensor("a gradient", None, torch.sparse_coo)
_FP32_GRADIENT = _tensor("a float32 gradient", torch.float32, torch.sparse_coo)

_WINDOW: Form = {
    "micro_batches": _COUNT,
    "carried": ({"loss_id": _COUNT, "scale": _COUNT, "is_one": _FLAG, "is_common": _FLAG, "ranks?": _RANKS}, None),
    "settled": [{"loss_id": _COUNT, "scale": _COUNT, "found_inf": _FLAG}],
    "aside": {str: _GRADIENT},
    "beside": [_TEXT],
    "losses": [{"loss_id": _COUNT, "value": _NUMBER}],
}

_STATE: Form = {
    "version": _A(f"{STATE_VERSION}", lambda value: is_whole(value) and value == STATE_VERSION),
    "policy": _A("a policy's text", _is_policy),
    "parameters": {str: _DESCRIPTION},
    "loss_scales": [_SCALE_STATE],
    "stats": {
        "steps": _COUNT,
        "skipped": _COUNT,
        "recent": _MARKS,
        "forward_failures": _COUNT,
        "scales": [{"lowest": _SCALE, "highest": _SCALE, "growths": _COUNT, "backoffs": _COUNT}],
    },
    "masters": {str: _FP32},
    "rank?": _TEXT,
    "windows": [(_WINDOW, None)],
    "carried_scales": [_SCALE],
    "on_the_way": [{"loss_id": _COUNT, "found_inf": _FLAG}],
    "gradients": {str: _GRADIENT},
    "master_gradients": {str: _FP32_GRADIENT},
    "left": [_TEXT],
    "buffers": {str: _TENSOR},
}
