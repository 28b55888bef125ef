"""``mezzo show``: the number formats and the op table, whole or one of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from mezzo.cli.app import app, console_for, show_json
from mezzo.errors import PolicyError, nearest, shown
from mezzo.explanation.explanation import table
from mezzo.files import jsonable
from mezzo.formats import BLOCK_FORMATS, FORMATS, BlockFormat, Format, block_format, by_name
from mezzo.policy import Policy
from mezzo.policy.ops import OPS, matching, resolve
from mezzo.tensors import dtype_name

show = typer.Typer(no_args_is_help=True, help="Print the number formats, or the op table.")
app.add_typer(show, name="show")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]

#: Ops that a reader asks for first; the rest of the table has hundreds of rows, and --full shows them.
_USUAL: Final = (
    "linear matmul conv2d scaled_dot_product_attention softmax layer_norm batch_norm cross_entropy exp log sum cat add "
    "gelu relu fft_rfft"
).split()


@show.command("formats")
def formats(
    name: Annotated[
        str | None,
        typer.Argument(help=f"One of {', '.join([*FORMATS, *BLOCK_FORMATS])}, or a short name such as fp16."),
    ] = None,
    as_json: AsJson = False,
    full: Annotated[bool, typer.Option("--full", help="Show the landmarks of every format.")] = False,
) -> None:
    """Show the number formats side by side, or the telling bit patterns of one.

    [bold]mezzo show formats[/bold]          every format and block of them

    [bold]mezzo show formats fp16[/bold]     its landmarks, from subnormals to infinity
    """
    chosen: list[Format | BlockFormat] = (
        [_named(name)] if name is not None else [*FORMATS.values(), *BLOCK_FORMATS.values()]
    )
    if as_json:
        documents = [_described(number_format, name is not None or full) for number_format in chosen]
        show_json(documents if name is None else documents[0])
        return
    console = console_for(120)
    if name is None:
        console.print(_overview(console.width))
    blocks = [number_format for number_format in chosen if isinstance(number_format, BlockFormat)]
    if blocks:
        console.print(_blocks(blocks))
    for number_format in chosen if name is not None or full else ():
        if isinstance(number_format, Format):
            sign = "1 sign bit" if number_format.signed else "no sign bit"
            exponent = f"{number_format.exponent_bits} exponent bits (bias {number_format.bias})"
            widths = f"{exponent}, {number_format.mantissa_bits} mantissa bits"
            console.print(f"{number_format.name}: {sign}, {widths}", style="bold", highlight=False)
            console.print(_landmarks(number_format))


def _named(name: str) -> Format | BlockFormat:
    with suppress(PolicyError):  # which says what to write in Python
        return by_name(name)
    with suppress(PolicyError):
        return block_format(name)
    why = nearest(name, [*FORMATS, *BLOCK_FORMATS])
    write = "mezzo show formats float16, or mezzo show formats for all"
    raise PolicyError(f"unknown number format {shown(name)}", why=why, write=write)


def landmarks(number_format: Format) -> list[tuple[int, str]]:
    """List the bit patterns by which a format is known, in their order, and what is special about each.

    Example:
        >>> from mezzo.formats import FP16
        >>> landmarks(FP16)[1]
        (1, 'smallest subnormal')
    """
    encode, hidden, sign = number_format.encode, 1 << number_format.mantissa_bits, 1 << number_format.num_bits - 1
    one, largest, infinity = encode(1.0), encode(number_format.max), encode(math.inf)
    small = [(0, "zero"), (1, "smallest subnormal"), (hidden - 1, "largest subnormal"), (hidden, "smallest normal")]
    marks = [
        *(small if number_format.mantissa_bits else [(0, "smallest")]),
        (encode(1 / 3), "nearest to 1/3"),
        (one - 1, "largest below one"),
        (one, "one"),
        (one + 1, "smallest above one"),
        (largest, "largest"),
        *([(infinity, "+inf")] if number_format.has_inf else []),
        *([(encode(math.nan), "NaN")] if number_format.has_nan else []),
        *([(sign, "−0"), (encode(-2.0), "−2")] if number_format.signed else []),
        *([(sign | infinity, "−inf")] if number_format.has_inf else []),
    ]
    # In a format of few patterns one of them is several things.
    return [
        (bits, ", ".join(what for pattern, what in marks if pattern == bits))
        for bits in sorted({bits for bits, _ in marks})
    ]


def _described(number_format: Format | BlockFormat, with_landmarks: bool) -> dict[str, Any]:
    if isinstance(number_format, BlockFormat):
        parts = {"element": number_format.element.name, "scale": number_format.scale.name, "block": number_format.block}
        flags = {"tensor_scale": number_format.tensor_scale, "floored": number_format.floored}
        return {"name": number_format.name, **parts, **flags, "bits_per_element": number_format.bits_per_element}
    fields = dataclasses.asdict(number_format)
    fields |= {"dtype": number_format.dtype and dtype_name(number_format.dtype), "num_bits": number_format.num_bits}
    marks = [_cells(number_format, *mark) for mark in landmarks(number_format)] if with_landmarks else None
    return fields | ({} if marks is None else {"landmarks": marks})


def _overview(width: int) -> Table:
    # Without padding every number has room in 80 columns; in fewer it is folded, and never cut.
    numbers = ("s/e/m", "bias", "max", "smallest normal", "smallest subnormal", "eps")
    rows = (
        (
            number_format.name,
            f"{int(number_format.signed)}/{number_format.exponent_bits}/{number_format.mantissa_bits}",
            str(number_format.bias),
            f"{number_format.max:.8g}",
            _power(number_format.smallest_normal),
            _power(number_format.smallest_subnormal) if number_format.mantissa_bits else "none",
            _power(number_format.eps),
            "inf" if number_format.has_inf else "NaN" if number_format.has_nan else "max",
        )
        for number_format in FORMATS.values()
    )
    stiff = ("format", "max") if width >= 80 else ()
    padding = (0, 0 if width < 140 else 1)
    return table(("format", *numbers, "beyond"), rows, right=numbers, stiff=stiff, padding=padding)


def _blocks(chosen: Sequence[BlockFormat]) -> Table:
    rows = (
        (
            block.name,
            block.element.name,
            "the tensor" if block.block is None else "a row" if block.block == -1 else _block(block.block),
            f"{block.scale.name}{', floored' * block.floored}{', and one for the tensor' * block.tensor_scale}",
            f"{block.bits_per_element:g}",
        )
        for block in chosen
    )
    return table(("block format", "elements", "share a scale", "scale", "bits"), rows, right=("bits",))


def _block(block: int | tuple[int, int]) -> str:
    return f"{block[0]}×{block[1]}" if isinstance(block, tuple) else str(block)


def _landmarks(number_format: Format) -> Table:
    cells = [_cells(number_format, *mark) for mark in landmarks(number_format)]
    rows = ((cell["bits"], cell["hex"], f"{float(cell['value']):.8g}", cell["what"]) for cell in cells)
    return table(("bits", "hex", "value", "what"), rows, right=("value",), stiff=("bits", "hex"))


def _cells(number_format: Format, bits: int, what: str) -> dict[str, Any]:
    """Describe a pattern: its three fields, sign, exponent and mantissa; in hexadecimal; its value, and what it is."""
    digits = f"{bits:0{number_format.num_bits}b}"
    mantissa = len(digits) - number_format.mantissa_bits
    sign = int(number_format.signed)
    return {
        "bits": " ".join(filter(None, (digits[:sign], digits[sign:mantissa], digits[mantissa:]))),
        "hex": f"{bits:0{-(-number_format.num_bits // 4)}x}",
        "value": jsonable(number_format.decode(bits)),
        "what": what,
    }


def _power(value: float) -> str:
    """Write a power of two as one, with its decimal value."""
    return f"2^{math.frexp(value)[1] - 1} ≈ {value:.4g}"


@show.command("ops")
def ops(
    pattern: Annotated[
        str | None, typer.Argument(help="A glob on the ops' names, or any spelling of one: F.softmax, nn.Softmax.")
    ] = None,
    policy: Annotated[str, typer.Option(help="A policy's text, or the path of a policy file.")] = "O1,bf16",
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="What the policy does there; notes on both when omitted.")
    ] = None,
    as_json: AsJson = False,
    full: Annotated[bool, typer.Option("--full", help="Show every op, and whose lists name it.")] = False,
) -> None:
    """Show which precision a policy gives to each op, what torch alone would do, and why.

    [bold]mezzo show ops[/bold]  the usual ops; --full for every one

    [bold]mezzo show ops softmax[/bold]  one, by any spelling: nn.Softmax, F.softmax

    [bold]mezzo show ops 'conv*' --policy O1,bf16,fp32=conv1d[/bold]

    [bold]mezzo show ops 'fft_*' --device cuda[/bold]  what is left to torch on an accelerator

    [bold]mezzo show ops paddle:mul[/bold]  Paddle's name, where torch's means another

    [bold]mezzo show ops 'fft_*' --json[/bold]  for a program to read

    fp32: inputs cast to FP32. low: to the policy's dtype. promote: to the widest among them. native: left as they are.
    fp32_math: FP32 inside, the input's dtype out. ban: refused.
    """
    value = Policy.of(policy)
    names = _chosen(pattern)
    if pattern is None and not full and not as_json:
        names = [name for name in _USUAL if name in OPS]
    if as_json:
        show_json([op_row(name, value, device) for name in names])
        return
    decided = f"{value} on {device}" if device else str(value)
    rows = [op_row(name, value, device) for name in names]
    console = console_for(200 if full else 120)
    console.print(decided, style="bold", markup=False, highlight=False)
    heads = ("op", "treatment", "torch CUDA", "torch CPU", "reason", *(["whose lists name it"] if full else []))
    read = itemgetter("op", "treatment", "torch_cuda", "torch_cpu", "reason", *(["lists"] if full else []))
    console.print(table(heads, map(read, rows), stiff=("op", "torch CUDA", "torch CPU")))
    if len(names) < len(OPS) and pattern is None:
        typer.echo(f"\n{len(names)} of {len(OPS)} ops; --full shows all")


def op_row(name: str, policy: Policy, device_type: str | None = None) -> dict[str, Any]:
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
        >>> row = op_row("softmax", Policy.O1(rules=[]))
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
    if not any(character in pattern for character in "*?["):
        return [resolve(pattern)]
    names = sorted(matching(pattern))
    if not names:
        raise PolicyError(
            f"no op matches {shown(pattern)}",
            why="a glob is matched with base names, such as softmax, conv2d, linalg_inv, fft_rfft",
            write="mezzo show ops '*norm*'",
        )
    return names
