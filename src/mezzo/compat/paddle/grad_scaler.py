"""``GradScaler`` with Paddle's parameters, methods and state, over torch's of this room."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.compat.paddle.regions import last_dtype
from mezzo.compat.torch import grad_scaler
from mezzo.errors import StateError, not_switches, raise_together, shown
from mezzo.scale.config import PADDLES_RULES, PADDLES_WORDS, from_words, one_number
from mezzo.tensors import LOW

_COUNTS: Final = ("incr_count", "decr_count")


def _rule(word: str, what: str) -> tuple[Callable[[PaddleGradScaler], Any], Callable[[PaddleGradScaler, Any], None]]:
    """Return what gets one of the rules, and what sets it."""

    def get(self: PaddleGradScaler) -> Any:
        return getattr(self.loss_scale.config, PADDLES_WORDS[word])

    def set_(self: PaddleGradScaler, value: Any) -> None:
        self._follow(**{word: value})

    get.__doc__, set_.__doc__ = f"Return {what}.", f"Set {what}, from now on."
    return get, set_


class PaddleGradScaler(grad_scaler.GradScaler):
    """``paddle.amp.GradScaler``: the scale follows Paddle's rule step by step, with the same state.

    What is mended: several optimizers between two updates are one step, which overflowed where one of them did; a
    constant scale skips a step that is not finite, and counts none; nothing waits for the device but an optimizer that
    cannot skip by itself; and ``last_step`` says whether the last step was skipped.

    Args:
        enable: ``False`` for a scaler that scales nothing, and steps always. One that is asked to scale a loss after an
            ``auto_cast`` in bfloat16 disables itself, as Paddle's does, with a warning.
        init_loss_scaling: The first scale.
        incr_ratio: What the scale is multiplied by after ``incr_every_n_steps`` clean steps.
        decr_ratio: What it is multiplied by after ``decr_every_n_nan_or_inf`` overflows without a clean step between.
        incr_every_n_steps: See there.
        decr_every_n_nan_or_inf: See there.
        use_dynamic_loss_scaling: Whether the scale moves.

    Raises:
        PolicyError: Numbers that no scale follows, in Paddle's words.

    **Cost**: that of :class:`mezzo.compat.torch.GradScaler`.

    Example:
        >>> import torch
        >>> from mezzo.compat import paddle
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = paddle.GradScaler(init_loss_scaling=1024)
        >>> with paddle.auto_cast():
        ...     loss = model(torch.ones(2, 4)).mean()
        >>> scaled = scaler.scale(loss)
        >>> scaled.backward()
        >>> scaler.minimize(optimizer, scaled)
        (None, None)
        >>> optimizer.zero_grad()
        >>> scaler.state_dict()["incr_count"]
        1
    """

    _system = "paddle"
    _cure = 'decorate(models=model, optimizers=optimizer, level="O2") of a model in FP32: model.float() first'

    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 2.0**16,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        words = {
            "init_loss_scaling": init_loss_scaling, "incr_ratio": incr_ratio, "decr_ratio": decr_ratio,
            "incr_every_n_steps": incr_every_n_steps, "decr_every_n_nan_or_inf": decr_every_n_nan_or_inf,
        }  # fmt: skip
        rules, wrong = from_words("paddle", words, "GradScaler")
        raise_together(not_switches(enable=enable, use_dynamic_loss_scaling=use_dynamic_loss_scaling) + wrong)
        self._is_dynamic = use_dynamic_loss_scaling and enable
        self._begin("cpu", rules, enabled=enable)

    def scale(self, var: Any) -> Any:
        """Multiply a loss by the scale; in FP32, so that the product itself does not overflow."""
        dtype = last_dtype.get()
        if self._enabled and self._is_dynamic and dtype != torch.float16:
            self._enabled = self._is_dynamic = False
            problem = f"GradScaler is disabled: {dtype} needs no loss scale, and the last auto_cast was in it"
            warnings.warn(problem, UserWarning, stacklevel=2)
        return super().scale(var.float() if isinstance(var, Tensor) and var.dtype in LOW else var)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale and step, or skip; with a constant scale no update has to follow."""
        returned = super().step(optimizer, *args, **kwargs)
        if not self._is_dynamic:
            self.update()
        return returned

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what was found since the last call, once for all optimizers; a constant one stays."""
        super().update(self.loss_scale.state.scale if new_scale is None and not self._is_dynamic else new_scale)

    def minimize(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> tuple[None, None]:
        """Step, and move the scale: :meth:`step` and :meth:`update` in one.

        Args:
            optimizer: The optimizer.
            *args: What Paddle's ``Optimizer.minimize`` takes, the scaled loss first: its gradients are there already.
            **kwargs: By name.

        Returns:
            Paddle's pair of operators and gradients, which are of static programs: ``(None, None)``.
        """
        self.step(optimizer)
        self.update()
        return None, None

    # The rules --------------------------------------------------------------------------------------------

    def is_enable(self) -> bool:
        """Return whether it scales at all."""
        return self._enabled

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Return whether the scale moves."""
        return self._is_dynamic

    def get_init_loss_scaling(self) -> float:
        """Return the first scale, or the one that was set or loaded last; 1.0 of a disabled scaler."""
        return self.loss_scale.config.init if self._enabled else 1.0

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Set another scale."""
        self._follow(init_loss_scaling=new_init_loss_scaling)
        self.loss_scale.set(float(new_init_loss_scaling))

    get_incr_ratio, set_incr_ratio = _rule("incr_ratio", "what the scale is multiplied by when it grows")
    get_decr_ratio, set_decr_ratio = _rule("decr_ratio", "what the scale is multiplied by when it backs off")
    get_incr_every_n_steps, set_incr_every_n_steps = _rule(
        "incr_every_n_steps", "after how many clean steps the scale grows"
    )
    get_decr_every_n_nan_or_inf, set_decr_every_n_nan_or_inf = _rule(
        "decr_every_n_nan_or_inf", "after how many overflows since a clean step the scale backs off"
    )

    def _follow(self, **words: Any) -> None:
        """Change the rules, in Paddle's words."""
        rules, problems = from_words("paddle", words, "GradScaler", self.loss_scale.config)
        raise_together(problems)
        self.loss_scale.reconfigure(rules)

    # State ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what ``paddle.amp.GradScaler.load_state_dict`` loads; empty for a disabled scaler. A host sync.

        The scale is a list of one number, where Paddle's is an array of NumPy's, which ``torch.load`` would refuse.
        """
        if not self._enabled:
            return {}
        state, rules = self.loss_scale.state_dict(), self.loss_scale.config
        return {
            "scale": [state["scale"]],
            **{theirs: getattr(rules, ours) for theirs, ours in PADDLES_RULES.items()},
            "incr_count": state["clean_steps"],
            "decr_count": rules.hysteresis - state["budget"],
            "use_dynamic_loss_scaling": self._is_dynamic,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``GradScaler``'s state, mezzo's or Paddle's, rules included; a disabled scaler loads nothing.

        Raises:
            StateError: Not such a state, or a disabled scaler's, or rules that no scale follows. Nothing was loaded.
        """
        if not self._enabled:
            return
        self._require(state_dict, "scale", *PADDLES_RULES, *_COUNTS, "use_dynamic_loss_scaling")
        words = {
            "init_loss_scaling": one_number(state_dict["scale"]),
            **{word: state_dict[word] for word in PADDLES_RULES},
        }
        rules, problems = from_words("paddle", words, "the state of a GradScaler")
        counts, is_dynamic = [state_dict[key] for key in _COUNTS], state_dict["use_dynamic_loss_scaling"]
        problems += not_switches(use_dynamic_loss_scaling=is_dynamic)
        if problems or not all(isinstance(count, int) and count >= 0 for count in counts):
            wrong = "\n".join(map(str, problems)) or f"{' and '.join(_COUNTS)} are {shown(counts)}, not counts"
            raise StateError("the state has wrong values", where=wrong)
        self.loss_scale.config, self._is_dynamic = rules, is_dynamic
        self._go_on(state_dict)

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Load the scale and the counts."""
        rules = self.loss_scale.config
        left = max(1, rules.hysteresis - state["decr_count"])
        self._load(rules, one_number(state["scale"]), clean_steps=state["incr_count"], budget=left)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin as a copy."""
        self._is_dynamic = state["enabled"]
        super().__setstate__(state)


GradScaler = PaddleGradScaler
