"""The loss scale as a value: which rule moves it, and its text form."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

import torch

from mezzo.errors import PolicyError, nearest, raise_together, shown
from mezzo.scale.fields import LOWEST, problems, read, unknown_fields, write
from mezzo.scale.state import ScaleState

__all__ = ["PRESETS", "LossScale", "allowed_skips", "as_float32"]

#: The largest finite float16, below which a constant scale keeps every gradient.
FP16_MAX = 65504


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
        floor: The scale never backs off below. May be below 1, down to 2^-126.
        ceiling: The scale never grows above; with None it grows while it is a finite float32.
        patience: Consecutive overflows at the floor after which a session raises :class:`mezzo.ScaleCollapsed`;
            None never. A constant scale is always at its floor.
        growth_offset: Extra clean steps before the first growth after an overflow or the start.
        skip_rate_limit: If more than this share of the last ``interval`` steps were skipped, an overflow
            backs off whatever the budget. Without it, and with a budget refilled by clean steps, an
            overflow every third step is never acted on. None turns it off.

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
    floor: float = 1.0
    ceiling: float | None = 2.0**24
    patience: int | None = None
    growth_offset: int = 0
    skip_rate_limit: float | None = None

    def __post_init__(self) -> None:
        raise_together(problems(self._values(), _DEFAULTS))

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
        skip_rate_limit: float | None = skip_rate_limit,
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
            skip_rate_limit=skip_rate_limit,
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
            'dynamic(init=32768,interval=1000,hysteresis=2,refill=clean+backoff,ceiling=none)'
        """
        if not isinstance(system, str) or system not in PRESETS:
            why = nearest(shown(system), PRESETS)
            raise PolicyError(f"unknown system {shown(system)}", why=why, write='LossScale.like("torch")')
        raise_together(unknown_fields(overrides, where=f"LossScale.like({system!r}, …)"))
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
        return cls(**read(text))

    def __str__(self) -> str:
        return write(self._values(), _DEFAULTS)

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
            No host sync; 28 bytes, and ``interval`` bytes more with ``skip_rate_limit``.

        Example:
            >>> LossScale.constant(1024).start().scale
            tensor(1024.)
        """
        is_dynamic = self.mode == "dynamic"
        length = self.interval if is_dynamic and self.skip_rate_limit is not None else 0
        counts = -self.growth_offset if is_dynamic else 0, self.hysteresis, 0
        return ScaleState.made(self.init, counts, torch.zeros(length, dtype=torch.bool, device=device))


_DEFAULTS: Mapping[str, Any] = MappingProxyType({each.name: each.default for each in dataclasses.fields(LossScale)})


def as_float32(value: float) -> float:
    """Round a number to float32, as a device tensor holds it.

    Example:
        >>> as_float32(0.1)
        0.10000000149011612
    """
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def allowed_skips(limit: float, interval: int) -> int:
    """Return the largest count of skipped steps whose share of the interval is not above the limit.

    Example:
        >>> allowed_skips(0.29, 100)  # though 0.29 * 100 is 28.999999999999996
        29
    """
    count = int(limit * interval)
    return count + 1 if (count + 1) / interval <= limit else count


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
        "paddle": LossScale.dynamic(refill="clean+backoff", ceiling=None),
        # Paddle fleet DistributedStrategy.amp_configs: the same kernel, other defaults.
        "fleet": LossScale.dynamic(init=2.0**15, interval=1000, hysteresis=2, refill="clean+backoff", ceiling=None),
        # deepspeed/runtime/fp16/loss_scaler.py and docs of "fp16": initial_scale_power 16, window 1000. It
        # grows on the first clean step after the window, and raises at the first backoff from the floor.
        # consecutive_hysteresis=True is refill="clean".
        "deepspeed": LossScale.dynamic(
            interval=1000, hysteresis=2, refill="growth", ceiling=None, patience=1, growth_offset=1
        ),
        # Megatron-LM megatron/core/optimizer/grad_scaler.py, megatron/training/arguments.py.
        "megatron": LossScale.dynamic(init=2.0**32, interval=1000, hysteresis=2, refill="growth", ceiling=None),
    }
)
