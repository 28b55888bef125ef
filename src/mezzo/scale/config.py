"""The loss scale as a value: which rule moves it, the range of each field, its text form, other systems' rules.

The text is ``none``, ``constant(1024)`` or ``dynamic(init=1024,interval=100)``: words in one pair of parentheses, and
only what differs from the defaults, so that it can stand inside a policy's.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import torch

from mezzo.errors import PolicyError, closest, nearest, raise_together, shown, unknown_word
from mezzo.scale.state import ScaleState

#: The largest finite float16, below which a constant scale keeps every gradient.
FP16_MAX = 65504
MODES: Final = ("none", "constant", "dynamic")
REFILLS: Final = ("backoff", "clean", "growth", "clean+backoff")

#: Below float32's smallest normal number 1/scale would not be finite; torch's scale sinks to 0 there.
LOWEST: Final = torch.finfo(torch.float32).smallest_normal
HIGHEST: Final = torch.finfo(torch.float32).max

_LONGEST_TEXT: Final = 1000  # characters: all fields take 300
_SHAPE: Final = re.compile(r"(?P<mode>\w+)\s*(?:\((?P<words>[^()]*)\))?", re.ASCII)
_POWER: Final = re.compile(r"2\*\*(?P<exponent>-?\d{1,4})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """What the loss is multiplied by, and how that factor follows overflows.

    Write ``LossScale.dynamic(…)``, ``.constant(s)``, ``.none()``, ``.like("torch")`` or
    ``.parse("dynamic(init=1024)")``. :func:`mezzo.scale.next_scale` is the meaning of the fields.

    Args:
        mode: ``"dynamic"``, ``"constant"`` (a fixed factor; non-finite steps are still told), or ``"none"``
            (factor 1, nothing is counted).
        init: The first scale. 2^16 is where torch and apex start; a few skipped steps correct it.
        growth: Factor after ``interval`` clean steps, above 1. 2 keeps the scale a power of two, so that
            scaling and unscaling round nothing.
        backoff: Factor after an overflow, between 0 and 1.
        interval: Clean steps before the scale grows.
        hysteresis: Overflows it takes to back off; 1 backs off at each.
        refill: Which event restores that budget: ``"backoff"``, ``"clean"`` (any finite step),
            ``"growth"`` or ``"clean+backoff"``.
        floor: The scale never backs off below; from 2^-126 on. Summed losses need less than 1.
        ceiling: The scale never grows above; with None it grows while it is a finite float32.
        patience: Overflows in a row at the floor, ``hysteresis`` used up, after which a session raises
            :class:`mezzo.ScaleCollapsed`; None never. A constant scale is always at its floor.
        growth_offset: Extra clean steps before the first growth after an overflow or the start.

    Raises:
        PolicyError: A value that no rule can work with; one message lists all of them.

    Example:
        >>> LossScale.dynamic(init=1024, interval=100)
        LossScale.parse('dynamic(init=1024,interval=100)')
    """

    mode: Literal["none", "constant", "dynamic"] = "dynamic"
    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    refill: str = "backoff"
    floor: float = 2.0**-24
    ceiling: float | None = 2.0**24
    patience: int | None = None
    growth_offset: int = 0

    def __post_init__(self) -> None:
        raise_together(_problems(self._values(), _DEFAULTS))

    @classmethod
    def none(cls) -> LossScale:
        """Return the null object: the scale is 1 and nothing moves it, as BF16 and FP32 want it."""
        return cls(mode="none", init=1.0)

    @classmethod
    def constant(cls, scale: float, *, patience: int | None = None) -> LossScale:
        """Return a fixed scale.

        Args:
            scale: The factor; 8 … 32768 worked in Micikevicius et al. 2018. May be below 1.
            patience: As in :class:`LossScale`; None never gives up.

        Returns:
            The value. Steps that are not finite are skipped with it as with a dynamic scale.
        """
        return cls(mode="constant", init=scale, patience=patience)

    @classmethod
    def dynamic(
        cls,
        init: float = init,
        growth: float = growth,
        backoff: float = backoff,
        interval: int = interval,
        hysteresis: int = hysteresis,
        refill: str = refill,
        floor: float = floor,
        ceiling: float | None = ceiling,
        patience: int | None = patience,
        growth_offset: int = growth_offset,
    ) -> LossScale:
        """Return a scale that backs off after overflows and grows after clean steps.

        The arguments are the fields of :class:`LossScale`, with the same defaults and the same errors.

        Example:
            >>> LossScale.dynamic(2**10, interval=100).init
            1024
        """
        return cls(
            init=init, growth=growth, backoff=backoff, interval=interval, hysteresis=hysteresis, refill=refill,
            floor=floor, ceiling=ceiling, patience=patience, growth_offset=growth_offset,
        )  # fmt: skip

    @classmethod
    def like(cls, system: str, **overrides: Any) -> LossScale:
        """Return the rule of another system, with that system's defaults.

        The one difference: where a system lets its scale sink to 0, mezzo stops at 2^-126. ``"deepspeed"`` is the
        scaler of its ZeRO optimizers, which raises at its floor; its ``FP16_Optimizer`` stays there: ``patience=None``.

        Args:
            system: ``"torch"``, ``"apex"``, ``"paddle"``, ``"fleet"``, ``"deepspeed"`` or ``"megatron"``.
            **overrides: Any field of :meth:`dynamic`.

        Returns:
            The value.

        Raises:
            PolicyError: An unknown system or field, or an impossible value.

        Example:
            >>> str(LossScale.like("fleet"))
            'dynamic(init=32768,interval=1000,hysteresis=2,refill=clean+backoff,floor=1,ceiling=none)'
        """
        if not isinstance(system, str) or system not in PRESETS:
            why = nearest(shown(system), PRESETS)
            raise PolicyError(f"unknown system {shown(system)}", why=why, write='LossScale.like("torch")')
        raise_together(_unknown_fields(overrides, where=f"LossScale.like({system!r}, …)"))
        return dataclasses.replace(PRESETS[system], **overrides)

    @classmethod
    def from_statistics(cls, max_abs_grad: float, margin: float = 1.0) -> LossScale:
        """Return the largest constant scale with which no gradient overflows FP16.

        It is the largest power of two with ``scale · margin · max_abs_grad < 65504``.

        Args:
            max_abs_grad: The largest magnitude of any gradient seen, unscaled. A tensor of one element will
                do, at the price of a host sync.
            margin: How many times larger a later gradient may be.

        Returns:
            A constant scale.

        Raises:
            PolicyError: An argument is not positive and finite, or the scale is no normal float32.

        Example:
            >>> print(LossScale.from_statistics(0.8))
            constant(65536)

        References:
            Micikevicius et al. 2018, Mixed Precision Training, section 3.2.
        """
        limit = Fraction(FP16_MAX)
        for name, value in (("max_abs_grad", max_abs_grad), ("margin", margin)):
            try:
                number = float(value)
            except OverflowError:  # an integer beyond them
                number = math.inf
            if not 0.0 < number < math.inf:
                raise PolicyError(
                    f"{name} is {shown(value)}",
                    why="a scale follows only from a positive finite number",
                    write="LossScale.dynamic(), which needs no statistics",
                )
            limit /= Fraction(number)
        # floor(log2 limit) is this or one less; the inequality is strict.
        exponent = limit.numerator.bit_length() - limit.denominator.bit_length()
        while Fraction(2) ** exponent >= limit:
            exponent -= 1
        if not -126 <= exponent <= 127:
            raise PolicyError(
                f"a largest gradient of {float(max_abs_grad):.4g} asks for the scale 2**{exponent}",
                why="a scale is a normal float32 number, 2**-126 to 2**127",
                write="LossScale.dynamic()",
            )
        return cls.constant(2.0**exponent)

    @classmethod
    def parse(cls, text: str | float | LossScale | None) -> LossScale:
        """Return the value that a text stands for; ``LossScale.parse(str(x)) == x``.

        Args:
            text: ``"none"``, ``"dynamic"``, ``"dynamic(init=1024,interval=100)"``, ``"constant(1024)"``,
                ``"1024"``, where numbers may be powers such as ``2**24``. A number is a constant scale, None
                is none, and a ``LossScale`` is itself.

        Returns:
            The value.

        Raises:
            PolicyError: Text that is none of these, or an impossible value.

        Example:
            >>> LossScale.parse("dynamic(ceiling=2**20)") == LossScale.dynamic(ceiling=2**20)
            True
            >>> print(LossScale.parse(128))
            constant(128)
        """
        if isinstance(text, LossScale):
            return text
        if text is None:
            return cls.none()
        if not isinstance(text, str):
            return cls.constant(text)
        return cls(**_read(text))

    def __str__(self) -> str:
        return _write(self._values(), _DEFAULTS)

    def __repr__(self) -> str:
        return f"LossScale.parse({str(self)!r})"

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _DEFAULTS}

    def start(self, device: torch.device | str = "cpu") -> ScaleState:
        """Return the state before the first step.

        Args:
            device: Where gradients are checked; every tensor of the state lives there.

        Returns:
            A state with the initial scale, a full budget and nothing counted.

        Cost:
            No host sync; 28 bytes.

        Example:
            >>> LossScale.constant(1024).start().scale
            tensor(1024.)
        """
        counts = -self.growth_offset if self.mode == "dynamic" else 0, self.hysteresis, 0
        return ScaleState.made(self.init, counts, device)


_DEFAULTS: Mapping[str, Any] = MappingProxyType({field.name: field.default for field in dataclasses.fields(LossScale)})


# Fields -----------------------------------------------------------------------------------------------


class _Range(NamedTuple):
    """What one field can be."""

    accepts: Callable[[Any], bool]
    why: str
    write: str
    is_count: bool = False
    is_optional: bool = False
    words: tuple[str, ...] = ()


def _counting(what: str, write: str, *, least: int = 1, is_optional: bool = False) -> _Range:
    why = f"it counts {what}, from {least} to 2**31 - 1"
    return _Range(lambda value: least <= value < 2**31, why, write, is_count=True, is_optional=is_optional)


def _normal(value: float) -> bool:
    return LOWEST <= value <= HIGHEST


#: Every field of a dynamic scale, in the order of the class.
_FIELDS: Final[Mapping[str, _Range]] = MappingProxyType(
    {
        "init": _Range(_normal, "a scale is a normal float32 number, from 2**-126 to 3.4e38", "2**16"),
        "growth": _Range(lambda x: 1 < x <= HIGHEST, "a factor above 1 raises the scale", "growth=2"),
        "backoff": _Range(lambda x: 0 < x < 1, "only a factor between 0 and 1 lowers the scale", "backoff=0.5"),
        "interval": _counting("steps", "interval=2000"),
        "hysteresis": _counting("overflows", "hysteresis=1"),
        # No REFILLS.__contains__, which torch 2.11 does not trace.
        "refill": _Range(lambda word: word in REFILLS, "it is a word", "refill=clean", words=REFILLS),
        "floor": _Range(_normal, "a scale is a normal float32 number, from 2**-126", "floor=1"),
        "ceiling": _Range(_normal, "a scale is a finite float32 number", "ceiling=None", is_optional=True),
        "patience": _counting("overflows", "patience=None", is_optional=True),
        "growth_offset": _counting("extra steps", "growth_offset=0", least=0),
    }
)
#: What a scale that never moves can have.
_SETTABLE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"none": (), "constant": ("init", "patience")})


# Checks -----------------------------------------------------------------------------------------------


def _problems(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[PolicyError]:
    """Yield everything that is wrong with the fields of a loss scale, for one message.

    Args:
        values: The value of every field.
        defaults: What each is where nothing is given.
    """
    mode = values["mode"]
    if not isinstance(mode, str) or mode not in MODES:
        yield unknown_word("mode", mode, MODES)
        return
    faults: dict[str, PolicyError] = {}
    for name in _FIELDS:  # a comprehension here would be more than torch.compile can trace
        if (fault := _fault(name, values[name], "LossScale")) is not None:
            faults[name] = fault
    yield from faults.values()
    # What is wrong by itself has been told, and is not compared with anything.
    yield from _out_of_order(values, faults) if mode == "dynamic" else _unused(mode, values, defaults, faults)


def _unknown_fields(names: Collection[str], where: str) -> Iterator[PolicyError]:
    """Yield a problem for each name that is no field of a dynamic scale."""
    for name in names:
        if name not in _FIELDS:
            suggestion = closest(name, _FIELDS) or "interval"
            write = "init=2**16" if suggestion == "init" else _FIELDS[suggestion].write
            yield PolicyError(f"unknown field {name!r}", where=where, why=nearest(name, _FIELDS), write=write)


def _fault(name: str, value: Any, where: str) -> PolicyError | None:
    field = _FIELDS[name]
    if value is None and field.is_optional:
        return None
    if field.words:
        if isinstance(value, str) and field.accepts(value):
            return None
        why = nearest(shown(value), field.words)
        return PolicyError(f"unknown {name} {shown(value)}", where=where, why=why, write=field.write)
    if isinstance(value, bool) or not isinstance(value, int if field.is_count else int | float):
        why = "a whole number was expected" if field.is_count else "a number was expected"
        why += ", or none" if isinstance(value, str) and field.is_optional else ""
    elif isinstance(value, float) and not math.isfinite(value):
        why = "a finite number was expected"
    elif not field.accepts(value):
        why = field.why
    elif value != float(value):  # such an integer would come back from the text form as its neighbour
        why = "float64 does not hold it exactly"
    else:
        return None
    return PolicyError(f"{name} is {shown(value)}", where=where, why=why, write=field.write)


def _out_of_order(values: Mapping[str, Any], wrong: Collection[str]) -> Iterator[PolicyError]:
    for lower, upper in (("floor", "ceiling"), ("floor", "init"), ("init", "ceiling")):
        least, most = values[lower], values[upper]
        if lower not in wrong and upper not in wrong and most is not None and least > most:
            yield PolicyError(
                f"{lower} {_value_text(least)} is above {upper} {_value_text(most)}",
                where="LossScale",
                why="the scale stays between floor and ceiling",
                write=f"{upper}={_value_text(least)}" if upper == "ceiling" else f"floor={_value_text(most)}",
            )


def _unused(
    mode: str, values: Mapping[str, Any], defaults: Mapping[str, Any], wrong: Collection[str]
) -> Iterator[PolicyError]:
    """Refuse fields that a scale which never moves would ignore."""
    expected = {**defaults, "mode": mode, **({"init": 1.0} if mode == "none" else {})}
    settable = (*_SETTABLE[mode], *wrong)
    if unused := [name for name in values if name not in settable and values[name] != expected[name]]:
        yield PolicyError(
            f"a scale of mode {mode!r} has no {', '.join(unused)}",
            where="LossScale",
            why="it never moves",
            write="LossScale.none()" if mode == "none" else f"LossScale.constant({shown(values['init'])})",
        )


# Text -------------------------------------------------------------------------------------------------


def _write(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Write the fields of a loss scale that differ from the defaults.

    Example:
        >>> _write({"mode": "dynamic", "init": 1024.0, "floor": 2.0**-126}, {"init": 65536.0, "floor": 1.0})
        'dynamic(init=1024,floor=2**-126)'
    """
    mode = values["mode"]
    if mode == "none":
        return "none"
    named = [name for name, usual in defaults.items() if values[name] != usual and name != "mode"]
    words = [f"{name}={_value_text(values[name])}" for name in named if mode == "dynamic" or name != "init"]
    if mode == "constant":  # its scale needs no name
        words = [_value_text(values["init"]), *words]
    return f"{mode}({','.join(words)})" if words else str(mode)


def _value_text(value: Any) -> str:
    """Write a field's value so that it reads back exactly; large and small powers of two as powers.

    Example:
        >>> _value_text(2.0**24), _value_text(1000.0), _value_text(0.3), _value_text(None)
        ('2**24', '1000', '0.3', 'none')
    """
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    fraction, exponent = math.frexp(value)
    if fraction == 0.5 and not 2.0**-10 <= value < 2.0**20:
        return f"2**{exponent - 1}"
    return str(int(value)) if float(value).is_integer() and value < 2.0**53 else repr(float(value))


#: A scale of each kind, in Python's words and in the text's.
_IN_BOTH: Final = (
    "LossScale.dynamic(init=1024), the text dynamic(init=1024);\nor LossScale.constant(1024), the text 1024;\n"
    "or LossScale.none(), the text none"
)


def _read(text: str) -> dict[str, Any]:
    """Read what :func:`_write` wrote, or a plain number, into fields.

    Raises:
        PolicyError: The text is not of that form; one message lists every word that cannot be read.

    Example:
        >>> _read("constant(2**10)")
        {'mode': 'constant', 'init': 1024.0}
    """
    if len(text) > _LONGEST_TEXT:
        raise PolicyError(
            f"loss scale {shown(text)} is too long",
            why=f"a loss scale's text has at most {_LONGEST_TEXT:,} characters",
            write=_IN_BOTH,
        )
    if (number := _number(text.strip())) is not None:
        return {"mode": "constant", "init": number}
    shape = _SHAPE.fullmatch(text.strip())
    if shape is None or shape["mode"] not in MODES:
        is_open = text.count("(") > text.count(")")
        raise PolicyError(
            f"unknown loss scale {text!r}",
            why="a bracket is not closed" if is_open else nearest(shape["mode"] if shape else text, MODES),
            write=_IN_BOTH,
        )
    mode, where = shape["mode"], f"loss scale {text!r}"
    words = shape["words"].split(",") if (shape["words"] or "").strip() else []
    fields: dict[str, Any] = {"mode": mode, **({"init": 1.0} if mode == "none" else {})}
    raise_together(_read_words(mode, [word.strip() for word in words], fields, where))
    return fields


def _read_words(mode: str, words: list[str], fields: dict[str, Any], where: str) -> Iterator[PolicyError]:
    if mode == "constant":
        if not words or "=" in words[0]:
            yield PolicyError("a constant scale needs its factor", where=where, write=_IN_BOTH)
        else:
            words[0] = f"init={words[0]}"
    seen = set()
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            yield PolicyError(f"{word!r} is no field", where=where, write="name=value, as init=1024")
        elif name in seen:
            yield PolicyError(f"{name} is given twice", where=where, write=f"one {name}=…")
        elif unknown := list(_unknown_fields([name], where)):
            yield from unknown
        else:
            fields[name] = _value(name, value)
            if (fault := _fault(name, fields[name], where)) is not None:
                yield fault
        seen.add(name)


def _value(name: str, text: str) -> Any:
    """Read the value of a field; what cannot be one stays text."""
    field, number = _FIELDS[name], _number(text)
    if number is None:
        return None if field.is_optional and text.lower() == "none" else text
    if field.words or (field.is_count and not number.is_integer()):
        return text
    return int(number) if field.is_count else number


def _number(text: str) -> float | None:
    power = _POWER.fullmatch(text)
    try:
        return math.ldexp(1.0, int(power["exponent"])) if power else float(text)
    except (ValueError, OverflowError):
        return None


def as_float32(value: float) -> float:
    """Round a number to float32, as a device tensor holds it.

    Example:
        >>> as_float32(0.1)
        0.10000000149011612
    """
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


#: The rules of other systems, each with the file that its defaults were read from.
PRESETS: Mapping[str, LossScale] = MappingProxyType(
    {
        # pytorch torch/amp/grad_scaler.py, aten/src/ATen/native/cuda/AmpKernels.cu: grows while finite.
        "torch": LossScale.dynamic(floor=LOWEST, ceiling=None),
        # NVIDIA/apex apex/amp/scaler.py and frontend.py (min_loss_scale=None, max_loss_scale=2**24). With
        # hysteresis above 1 this is csrc/update_scale_hysteresis.cu, whose budget clean steps refill.
        "apex": LossScale.dynamic(floor=LOWEST, refill="clean"),
        # Paddle python/paddle/amp/grad_scaler.py, paddle/phi/kernels/impl/amp_kernel_impl.h: the count of
        # bad steps goes to 0 at a good one and after each decrease; the floor is fixed at 1.
        "paddle": LossScale.dynamic(refill="clean+backoff", floor=1.0, ceiling=None),
        # Paddle fleet DistributedStrategy.amp_configs: the same kernel, other defaults.
        "fleet": LossScale.dynamic(
            init=2.0**15, interval=1000, hysteresis=2, refill="clean+backoff", floor=1.0, ceiling=None
        ),
        # deepspeed/runtime/fp16/loss_scaler.py and docs of "fp16": initial_scale_power 16, window 1000. It
        # grows on the first clean step after the window, and raises at the first backoff from the floor.
        # consecutive_hysteresis=True is refill="clean".
        "deepspeed": LossScale.dynamic(
            interval=1000, hysteresis=2, refill="growth", floor=1.0, ceiling=None, patience=1, growth_offset=1
        ),
        # Megatron-LM megatron/core/optimizer/grad_scaler.py, megatron/training/arguments.py.
        "megatron": LossScale.dynamic(
            init=2.0**32, interval=1000, hysteresis=2, refill="growth", floor=1.0, ceiling=None
        ),
    }
)


# The fields of a loss scale by the words that torch, Paddle and Fleet have for them.

#: The rules in the state of torch's ``GradScaler``, and in that of Paddle's: by word the field that it is.
TORCHS_RULES: Final = MappingProxyType(
    {"growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "interval"}
)
PADDLES_RULES: Final = MappingProxyType({
    "incr_ratio": "growth", "decr_ratio": "backoff", "incr_every_n_steps": "interval",
    "decr_every_n_nan_or_inf": "hysteresis",
})  # fmt: skip
#: What their scalers are made with.
TORCHS_WORDS: Final = MappingProxyType({"init_scale": "init", **TORCHS_RULES})
PADDLES_WORDS: Final = MappingProxyType({"init_loss_scaling": "init", **PADDLES_RULES})

_WORDS: Final = {"torch": TORCHS_WORDS, "paddle": PADDLES_WORDS, "fleet": PADDLES_WORDS}


def from_words(
    system: Literal["torch", "paddle", "fleet"], given: Mapping[str, Any], where: str, base: LossScale | None = None
) -> tuple[LossScale, list[PolicyError]]:
    """Return the rule of a system with some of its values, or what is wrong with them in its own words.

    Args:
        system: Whose rule, and whose defaults.
        given: Values by that system's words; others are left out.
        where: What they were given to.
        base: A rule of that system's to begin with, instead of its defaults.

    Example:
        >>> scale, problems = from_words("fleet", {"decr_ratio": 0.8}, "amp_configs")
        >>> scale.backoff, problems
        (0.8, [])
        >>> print(from_words("paddle", {"decr_ratio": 2}, "GradScaler")[1][0])
        decr_ratio is 2
          where  GradScaler
          why    only a factor between 0 and 1 lowers the scale
          write  decr_ratio=0.5
    """
    words = _WORDS[system]
    values = {words[word]: value for word, value in given.items() if word in words}
    problems = []
    for word, field in words.items():
        try:
            LossScale.like(system, floor=LOWEST, **({field: values[field]} if field in values else {}))
        except PolicyError as problem:
            text = re.sub(rf"\b{field}(?==| is )", word, str(problem))
            problems.append(PolicyError(text.replace("LossScale", where)))
    if not problems and values.get("init", 1.0) < LossScale.like(system).floor:
        why = "Paddle's kernel lets no scale go below 1"
        problems = [PolicyError(f"init_loss_scaling is {values['init']}", where=where, why=why, write="1.0")]
    scale = LossScale.like(system) if base is None else base
    return scale if problems else replace(scale, **values), problems


def one_number(value: Any) -> Any:
    """Return the number that is saved as a tensor, an array or a list of one, as Paddle's are; anything else as it is.

    Example:
        >>> one_number([512.0]), one_number("x")
        (512.0, 'x')
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    return plain[0] if isinstance(plain, list) and len(plain) == 1 else plain
