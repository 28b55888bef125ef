"""``mezzo ops``: the op table, and what a policy makes of it."""

from __future__ import annotations

from operator import itemgetter
from typing import Annotated, Any

import typer

from mezzo.cli.app import app
from mezzo.cli.output import console_for, show_json
from mezzo.errors import PolicyError, shown
from mezzo.explanation.table import table
from mezzo.policy import Policy
from mezzo.policy.ops import OPS, matching, resolve

__all__ = ["described", "ops"]

_GLOB_CHARACTERS = "*?["


@app.command("ops")
def ops(
    pattern: Annotated[
        str | None, typer.Argument(help="A glob on the ops' names, or any spelling of one: F.softmax, nn.Softmax.")
    ] = None,
    policy: Annotated[str, typer.Option(help="A policy's text, or the path of a policy file.")] = "O1,bf16",
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="What the policy does there; notes on both when omitted.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Show which precision a policy gives to each op, what torch alone would do, and why.

    [bold]mezzo ops[/bold]                        every op that mezzo classifies

    [bold]mezzo ops softmax[/bold]                one, by any spelling: nn.Softmax, F.softmax

    [bold]mezzo ops 'conv*' --policy O1,bf16,fp32=conv1d[/bold]

    [bold]mezzo ops 'fft_*' --device cuda[/bold]  what is left to torch on an accelerator

    [bold]mezzo ops paddle:mul[/bold]             Paddle's name, where torch's means another

    [bold]mezzo ops 'fft_*' --json[/bold]         for a program to read

    fp32: inputs cast to FP32. low: to the policy's dtype. promote: to the widest among them. native: left as they are.
    fp32_math: FP32 inside, the input's dtype out. ban: refused.
    """
    value = Policy.of(policy)
    names = _chosen(pattern)
    if as_json:
        show_json([described(name, value, device) for name in names])
        return
    decided = f"{value} on {device}" if device else str(value)
    heads = ("op", decided, "torch CUDA", "torch CPU", "reason", "whose lists name it")
    read = itemgetter("op", "treatment", "torch_cuda", "torch_cpu", "reason", "lists")
    rows = (read(described(name, value, device)) for name in names)
    console_for(200).print(table(heads, rows, stiff=("op", "torch CUDA", "torch CPU")))


def described(name: str, policy: Policy, device_type: str | None = None) -> dict[str, Any]:
    """Return one row as JSON can hold it.

    Args:
        name: The op's base name.
        policy: The policy that decides.
        device_type: Where; when omitted the reason names the devices where the treatment is another.

    Returns:
        The op, the device, its treatment there and the rule that gave it, torch's own treatments, the reason, who
        decided, and whose lists name the op.

    Raises:
        PolicyError: No op has this name, or torch has no such device type.

    Example:
        >>> row = described("softmax", Policy.O1(rules=[]))
        >>> row["treatment"], row["torch_cuda"], row["torch_cpu"], row["reason"]
        ('fp32', 'fp32', 'native', 'exponential range')
    """
    decision = policy.explain(name, device_type=device_type)
    entry = OPS.get(name)
    return {
        "op": name,
        "device": device_type,
        "treatment": decision.treatment,
        "rule": None if decision.rule is None else str(decision.rule),
        "torch_cuda": "native" if entry is None else entry.cuda,
        "torch_cpu": "native" if entry is None else entry.cpu,
        "reason": decision.reason,
        "source": decision.source,
        "lists": "no list names it" if entry is None else entry.source,
    }


def _chosen(pattern: str | None) -> list[str]:
    if pattern is None:
        return sorted(OPS)
    if not any(character in pattern for character in _GLOB_CHARACTERS):
        return [resolve(pattern)]
    names = sorted(matching(pattern))
    if not names:
        raise PolicyError(
            f"no op matches {shown(pattern)}",
            why="a glob is matched with base names, such as softmax, conv2d, linalg_inv, fft_rfft",
            write="mezzo ops '*norm*'",
        )
    return names
