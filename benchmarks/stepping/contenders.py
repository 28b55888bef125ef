"""One optimizer step in each way that a user could take it, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

import mezzo
from mezzo import optim
from mezzo.optim.optimizer import as_one_pass
from mezzo.session import MixedPrecision
from mezzo.tensors import dtype_name
from mezzo.weights import Halves

__all__ = ["CAPTURED", "CONTENDERS", "Contender", "Ready"]

_SCALE: Final = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A step with its parameters.

    Attributes:
        before: Puts fresh gradients in place; not timed.
        step: From scaled gradients to new weights: check, unscale, clip, update, next scale.
        casts: The casts of all weights that the next forward pass makes, or None where it needs none.
        kept: The tensors kept between steps.
    """

    before: Callable[[], None]
    step: Callable[[], Any]
    casts: Callable[[], Any] | None
    kept: Callable[[], list[Tensor]]


#: From shapes, dtype and device to a step.
Build = Callable[[list[tuple[int, ...]], torch.dtype, torch.device], Ready]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to step.

    Attributes:
        build: Makes it ready.
        moved_bytes: Bytes a parameter that the step reads and writes, casts included, counted pass by pass (each tensor
            once for each pass over it).
    """

    build: Build
    moved_bytes: float


class _Weights:
    """Parameters, and gradients to set before each step."""

    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        made = (torch.randn(shape, generator=self._generator, device=device) for shape in shapes)
        self.params = [nn.Parameter(weight.mul_(0.02)) for weight in made]
        self._gradients: list[Tensor] = []

    def make_gradients(self, dtype: torch.dtype = torch.float32) -> None:
        """Make one gradient for each parameter, in the dtype that a backward pass leaves."""
        made = (torch.randn(p.shape, generator=self._generator, device=p.device) for p in self.params)
        self._gradients = [gradient.mul_(1e-3 * _SCALE).to(dtype) for gradient in made]

    def give(self, *, copies: bool) -> None:
        """Set the gradients; copies of them for a step that writes to gradients."""
        for param, gradient in zip(self.params, self._gradients, strict=True):
            param.grad, param.grad_dtype = None, gradient.dtype
            param.grad = gradient.clone() if copies else gradient

    def casts(self, dtype: torch.dtype) -> list[Tensor]:
        """Return what the next forward pass computes with."""
        return [param.detach().to(dtype) for param in self.params]

    def kept(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return weights, the high halves of those that have such, their low ones, gradients and state, each once."""
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        gradients = [param.grad for param in self.params if param.grad is not None]
        weights = [param.hi if isinstance(param, Halves) else param for param in self.params]
        low = [param.lo for param in self.params if isinstance(param, Halves)]
        return list({id(t): t for t in (*weights, *low, *gradients, *states)}.values())


def _torch_amp(**options: Any) -> Build:
    """torch.amp as its documentation has it: FP32 weights, ``unscale_``, ``clip_grad_norm_``, ``step``, ``update``."""

    def build(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Ready:
        weights = _Weights(shapes, device)
        weights.make_gradients()
        optimizer = torch.optim.AdamW(weights.params, **options)
        scaler = torch.amp.GradScaler(device.type, init_scale=_SCALE)

        def before() -> None:
            scaler.scale(torch.ones((), device=device))
            weights.give(copies=True)

        def step() -> None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(weights.params, 1.0)
            scaler.step(optimizer)
            scaler.update()

        return Ready(before=before, step=step, casts=lambda: weights.casts(dtype), kept=lambda: weights.kept(optimizer))

    return build


def _session(
    level: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], *, captured: bool = False
) -> Build:
    """A session's step.

    Args:
        level: Of the policy.
        make: Makes the optimizer.
        captured: Whether it is a replay of a CUDA graph, with the backward pass of one element that makes a train step
            of it.
    """

    def build(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Ready:
        weights = _Weights(shapes, device)
        optimizer = make(weights.params)
        policy = f"{level},dtype={dtype_name(dtype)},loss_scale=dynamic(init={_SCALE:g}),emulate=true"
        model = nn.ParameterList(weights.params)
        amp = MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)
        rewrites = as_one_pass(optimizer) is None
        weights.make_gradients(dtype if level == "O2" and not rewrites else torch.float32)
        one = torch.zeros((), device=device, requires_grad=True)

        def before() -> None:
            amp.zero_grad()
            amp.backward(one * 1.0)
            weights.give(copies=rewrites)

        def train_step() -> None:
            one.grad = None
            before()
            amp.step()
            amp.zero_grad()

        run: Callable[[], object] = amp.step
        if captured:
            run = mezzo.capture(train_step, amp)
            for _ in range(4):  # three real steps; then the graph is recorded
                run()
        return Ready(
            # The graph sets gradients by itself; those that are given count among what is kept.
            before=(lambda: weights.give(copies=False)) if captured else before,
            step=run,
            casts=(lambda: weights.casts(dtype)) if level == "O1" else None,
            kept=lambda: weights.kept(optimizer),
        )

    return build


def _fused(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def _short_moments(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return optim.AdamW(params, state_dtype="bfloat16")


def _coded_moments(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return optim.AdamW(params, state_dtype="int8")


#: By name; the first is what all others are compared with. torch.amp: unscale 8, norm 4, clip 8, AdamW 28, cast 6.
#: Folded: the multiplication happens in AdamW's kernel, which writes the gradients. torch's fused AdamW over halves:
#: norm 4, both halves read and written 8, gradient 8, moments 16; FP32 values stay in a cache. One pass: norm 2, then
#: gradient, both halves and moments; scales of codes are 4/32 each way.
CONTENDERS: Final[Mapping[str, Contender]] = MappingProxyType(
    {
        "torch.amp, fused AdamW": Contender(_torch_amp(fused=True), 54),
        "torch.amp, foreach AdamW": Contender(_torch_amp(foreach=True), 54),
        "mezzo O1, torch's fused AdamW": Contender(_session("O1", _fused), 42),
        "mezzo O2, torch's fused AdamW": Contender(_session("O2", _fused), 36),
        "mezzo O2, AdamW split": Contender(_session("O2", optim.AdamW), 28),
        "mezzo O2, AdamW split, BF16 moments": Contender(_session("O2", _short_moments), 20),
        "mezzo O2, AdamW split, int8 moments": Contender(_session("O2", _coded_moments), 16.25),
    }
)

#: The same steps without their Python, which CUDA devices alone have.
CAPTURED: Final[Mapping[str, Contender]] = MappingProxyType(
    {
        "mezzo O2, AdamW split, captured": Contender(_session("O2", optim.AdamW, captured=True), 28),
        "mezzo O2, AdamW split, BF16 moments, captured": Contender(_session("O2", _short_moments, captured=True), 20),
        "mezzo O2, AdamW split, int8 moments, captured": Contender(
            _session("O2", _coded_moments, captured=True), 16.25
        ),
    }
)
