"""What the op table decides where no rule does, and on which devices it is something else."""

from __future__ import annotations

from typing import Final, Literal

import torch

from mezzo.errors import PolicyError
from mezzo.policy.ops.table import Op, Treatment
from mezzo.policy.rules import Decision

__all__ = ["from_table"]

Lists = Literal["portable", "device"]
Norms = Literal["fp32", "fp32_math"]

#: The kinds of device that the table tells apart, and how they are called where none is asked about.
_KINDS: Final = {"cpu": "a CPU", "cuda": "an accelerator"}
_DECIDERS: Final[dict[Lists, str]] = {"portable": "op table", "device": "lists=device"}
_AS_IN: Final[dict[Treatment, str]] = {
    "native": "left to torch, as in torch.amp",
    "fp32_math": "FP32 inside, the input's dtype out",
}


def from_table(entry: Op, device_type: str | None, *, lists: Lists, norms: Norms) -> Decision:
    """Decide about an op by its row.

    On an accelerator torch does by itself what the portable lists ask for, but for the ops that its CUDA lists leave
    out, most of which have no low kernel there. A region that cast them would need a function mode, and so Python for
    each op of every model; they stay torch's instead, and a rule changes that where they matter. On a CPU, where the
    mode runs anyway, they get what the table says, and ops that CUDA runs in low precision FP32 inside.

    Args:
        entry: The op's row.
        device_type: The device; when omitted the reason names the devices where the answer is another.
        lists: The policy's lists.
        norms: The policy's treatment of softmax and normalisations, which needs the mode on an accelerator too.

    Raises:
        PolicyError: torch knows no such device type.
    """
    on = {kind: _on(entry, kind, lists, norms) for kind in _KINDS}
    if device_type is not None:
        treatment = on["cpu" if _checked(device_type) == "cpu" else "cuda"]
        differs = lists == "portable" and treatment != entry.portable
        reason = f"{entry.reason}; on {device_type} {_AS_IN[treatment]}" if differs else entry.reason
        source = "torch" if differs and treatment == "native" else _DECIDERS[lists]
        return Decision(treatment=treatment, rule=None, reason=reason, source=source)
    treatment = entry.portable if lists == "portable" else on[_default_kind()]
    words = _AS_IN if lists == "portable" else {}
    others = [f"on {_KINDS[kind]} {words.get(there, there)}" for kind, there in on.items() if there != treatment]
    reason = "; ".join((entry.reason, *others))
    return Decision(treatment=treatment, rule=None, reason=reason, source=_DECIDERS[lists])


def _on(entry: Op, kind: str, lists: Lists, norms: Norms) -> Treatment:
    if lists == "device":
        return entry.cpu if kind == "cpu" else entry.cuda
    if kind == "cpu":
        return "fp32_math" if (entry.portable, entry.cpu) == ("native", "fp32") else entry.portable
    return entry.cuda if norms == "fp32" else entry.portable


def _checked(device_type: str) -> str:
    try:
        return device_type if device_type in _KINDS else torch.device(device_type).type
    except RuntimeError as error:
        why = "torch has no such device type"
        raise PolicyError(f"unknown device type {device_type!r}", why=why, write='"cpu" or "cuda"') from error


def _default_kind() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else "cuda"
