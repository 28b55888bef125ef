"""What a session promises, as plain Python and float64: weights, moments, counts, gradients, scales, accounts.

Nothing here imports mezzo or torch. The oracle never follows the program over two roundings: where an update rounds, it
says which values may come out, takes the one that did, and goes on from there. All else it knows to the bit.
"""

import copy
import math
from dataclasses import dataclass, field, replace

import numpy as np

from .near import Near, rounded
from .rules import LR, RULES

#: How far the sum of squares reaches: beyond, finite gradients count as an overflow (documented).
LARGEST_SQUARES = 2.0**128


@dataclass
class Scale:
    """A loss scale by the book: halved by an overflow, doubled after ``interval`` clean steps in a row."""

    mode: str = "none"  # "none", "constant", "dynamic"
    now: float = 1.0
    interval: int = 2000
    ceiling: float = 2.0**24
    floor: float = 2.0**-24
    clean: int = 0
    #: Which of the scale's values: gradients carry this, not only the number.
    epoch: int = 0
    growths: int = 0
    backoffs: int = 0
    lowest: float = 0.0
    highest: float = 0.0
    #: The scale when a step was last accounted for.
    noted: float = 0.0
    #: What it began at, by its rules.
    first: float = 0.0
    #: For each step since the last move: whether it was skipped, and whether it leaves the scale as it is.
    outcomes: list = field(default_factory=list)

    def __post_init__(self):
        self.first = self.first or self.now
        self.lowest = self.lowest or self.now
        self.highest = self.highest or self.now
        self.noted = self.noted or self.now

    @property
    def is_carried(self):
        """Whether gradients carry it: not a constant 1."""
        return self.mode == "dynamic" or (self.mode == "constant" and self.now != 1.0)

    def advance(self):
        """Move once for all that was found since the last move; it stays where no step counts."""
        outcomes, self.outcomes = self.outcomes, []
        if not outcomes or self.mode == "none":
            return
        self.epoch += 1
        if self.mode == "constant" or all(failed for _, failed in outcomes):
            return
        if any(overflowed and not failed for overflowed, failed in outcomes):
            self.now, self.clean = max(self.now / 2, self.floor), 0
            return
        self.clean += 1
        if self.clean >= self.interval:
            self.now, self.clean = min(self.now * 2, self.ceiling), 0

    def under(self, rules):
        """This scale under other rules: a dynamic one goes on within their bounds, any other begins anew."""
        if (self.mode, self.interval, self.ceiling, self.first) == (
            rules.mode,
            rules.interval,
            rules.ceiling,
            rules.first,
        ):
            return self
        if self.mode == rules.mode == "dynamic":
            scale = replace(self, interval=rules.interval, ceiling=rules.ceiling, first=rules.first, outcomes=[])
            scale.now = max(min(self.now, rules.ceiling), rules.floor)
        else:
            scale = replace(rules, growths=self.growths, backoffs=self.backoffs, noted=self.noted)
            scale.lowest, scale.highest = self.lowest, self.highest
        if scale.now != scale.noted:
            scale.noted = scale.lowest = scale.highest = scale.now
        return scale

    def account(self):
        """A step is over: how the scale has moved since the one before."""
        self.growths += self.now > self.noted
        self.backoffs += self.now < self.noted
        self.noted = self.now
        self.lowest, self.highest = min(self.lowest, self.now), max(self.highest, self.now)


@dataclass
class Weight:
    """One parameter.

    Attributes:
        dtype: Of the model's tensor.
        form: ``plain``; ``torch`` for low ones, which one of torch's optimizers updates in their own arithmetic.
        half: The dtype of its high half, where it is stored in two.
        exact: Its value.
        states: The optimizer's moments; zeros where it has not made them yet.
        count: Updates so far.
        trains: ``requires_grad``.
    """

    dtype: str
    form: str
    half: str
    exact: np.ndarray
    states: dict = field(default_factory=dict)
    count: int = 0
    trains: bool = True

    @property
    def grid(self):
        """How far from an FP32 value what is stored of it may be."""
        return 2.0**-40 if self.half == "float16" else 0.0

    def keep(self, value):
        """What is stored of a value: in FP16 halves a tiny one is a whole number of 2⁻³⁹."""
        value = rounded(value, self.dtype)
        if self.half != "float16":
            return value
        high = rounded(value, "float16")
        return np.where(np.abs(high) >= 2.0**-14, value, high + np.rint((value - high) * 2.0**39) * 2.0**-39)


@dataclass
class Window:
    """The backward passes since one optimizer's last step.

    Attributes:
        calls: How many.
        carried: What the gradients carry, a number; ``None`` for plain ones.
        epoch: Which value of the scale that is.
        made_with: The epoch of the last pass, and the scale that it was.
        found: Whether gradients were not finite when they were unscaled.
        finite: Whether all losses were.
        assigned: Whose ``.grad`` is another object since, which the step will see.
        touched: Whether gradients were written, replaced or cleared since the last pass, or since they were unscaled.
    """

    calls: int = 0
    carried: float | None = None
    epoch: int | None = None
    made_with: tuple | None = None
    found_inf: bool = False
    finite: bool = True
    assigned: set = field(default_factory=set)
    touched: bool = False


@dataclass
class Group:
    """One optimizer: its weights, its rule, its gradients."""

    members: list
    rule: str
    lr: dict
    window: Window | None = None
    gradients: dict = field(default_factory=dict)  # as they stand, scaled where a scale is carried

    def unscaled(self):
        carried = self.window.carried if self.window is not None else None
        return {name: gradient / (carried or 1.0) for name, gradient in self.gradients.items()}

    def rescale(self, scale, epoch, *, checks=False):
        """Rescale the gradients; those that lose their scale are checked."""
        window = self.window
        if window.carried is not None or checks:
            window.found_inf |= not_finite(self.gradients.values()) or not_finite(self.unscaled().values())
        factor = scale or 1.0
        self.gradients = {name: rounded(g * factor, "float32") for name, g in self.unscaled().items()}
        window.carried, window.epoch, window.touched = scale, epoch, False

    def clear(self, zeros):
        """The user has cleared all gradients, or filled some with zeros."""
        self.gradients = {name: np.zeros_like(gradient) for name, gradient in self.gradients.items() if name in zeros}
        self.touch()

    def touch(self):
        """The user has written gradients, replaced or cleared them."""
        if self.window is not None:
            self.window.touched = True


@dataclass
class Verdict:
    """What a step finds, and what it then may do to each weight."""

    skipped: bool
    norm: float
    scale: float
    updates: dict


@dataclass(frozen=True)
class Contract:
    """What a call style promises otherwise than the five lines do.

    Attributes:
        is_plain: Gradients are unscaled and checked when a pass has ended.
        waits: The scale moves in ``update()`` alone.
        updates: A step calls that as well.
        sees_losses: A loss that is not finite skips the step.
        sums_low: Gradients are summed in their weights' dtype, and not in FP32.
    """

    is_plain: bool = False
    waits: bool = False
    updates: bool = False
    sees_losses: bool = True
    sums_low: bool = False


@dataclass
class Oracle:
    """The whole session.

    Attributes:
        contract: Of the style that drives it.
        inner: Whether gradients that a loss is computed from have overflowed.
    """

    weights: dict
    groups: list
    scale: Scale
    clip: float | None = None
    contract: Contract = Contract()
    steps: int = 0
    skipped: int = 0
    inner: bool = False

    def copy(self):
        return copy.deepcopy(self)

    @property
    def is_open(self):
        return any(group.window is not None and group.gradients for group in self.groups)

    @property
    def is_plain(self):
        return self.contract.is_plain

    @property
    def is_users(self):
        """Whether the loop is one of the user's own calls."""
        return self.contract.is_plain or self.contract.waits

    def owner(self, name):
        return next((group for group in self.groups if name in group.members), None)

    # The loop -------------------------------------------------------------------------------------------

    def commit(self):
        """Whatever comes next needs to know the scale, which has moved by then, unless somebody says when."""
        if not self.contract.waits:
            self.scale.advance()

    def next_scale(self):
        """What the next loss is multiplied by: a scale that grows is committed by it."""
        self.commit()
        return self.scale.now

    def begin(self, groups):
        """A backward pass is about to add gradients with the scale."""
        self.commit()
        scale, epoch = (self.scale.now, self.scale.epoch) if self.scale.is_carried else (None, None)
        for group in groups:
            if group.window is None or not group.gradients:
                group.window = Window()
            elif self.is_users and group.window.touched and not any(g.any() for g in group.gradients.values()):
                group.window.found_inf, group.window.finite = False, True  # zeros in all of them clear as well
            if group.window.epoch != epoch:
                group.rescale(scale, epoch)
            group.gradients = {name: rounded(g, self.sums(name)) for name, g in group.gradients.items()}
            group.window.carried, group.window.epoch = scale, epoch
            group.window.made_with = None if scale is None else (epoch, scale)
            group.window.calls += 1

    def accumulate(self, groups, gradients, *, finite):
        """What the pass has added; plain gradients lose the scale at its end."""
        for group in groups:
            group.window.finite &= finite or not self.contract.sees_losses
            group.window.touched = False
            for name in group.members:
                if name in gradients:
                    before = group.gradients.get(name)
                    group.gradients[name] = (
                        gradients[name] if before is None else rounded(before + gradients[name], self.sums(name))
                    )
            if self.is_plain:
                group.rescale(None, None, checks=True)

    def sums(self, name):
        """The dtype in which a weight's gradients are summed."""
        return self.weights[name].dtype if self.contract.sums_low else "float32"

    def add(self, name, number):
        """An optimizer gets one weight more."""
        group = self.groups[number]
        group.members.append(name)
        group.lr[name] = LR

    def loaded(self, present):
        """What a checkpoint makes of a session: it holds no ``requires_grad``, no clipping, no gradients."""
        self.clip, self.contract = present.clip, present.contract
        for name, weight in self.weights.items():
            weight.trains = present.weights[name].trains
        self.zero_grad()
        for group in self.groups:
            group.gradients = {}
        scale = self.scale
        if scale.noted != scale.now:
            scale.noted = scale.lowest = scale.highest = scale.now
        return self

    def continuing(self, closed):
        """A new session over the weights and optimizers of one that was closed."""
        for name, weight in self.weights.items():
            weight.states, weight.count = closed.weights[name].states, closed.weights[name].count
        for group, before in zip(self.groups, closed.groups, strict=True):
            group.lr = before.lr
        return self

    def zero_grad(self):
        for group in self.groups:
            group.window = None
        self.inner = False

    def step(self, groups):
        """Check, update or skip, adapt the scale, close the windows."""
        for group in groups:
            group.window = group.window or Window()
        if len({group.window.epoch for group in groups}) > 1:
            for group in groups:
                group.rescale(None, None)
        gradients = {name: g for group in groups for name, g in group.unscaled().items()}
        overflowed = not_finite(gradients.values()) or not_finite(
            g for group in groups for g in group.gradients.values()
        )
        failed = not all(group.window.finite for group in groups)
        skipped = overflowed or failed or self.inner or any(group.window.found_inf for group in groups)
        failed, self.inner = failed or self.inner, False
        norm = math.sqrt(sum(float(np.sum(g * g)) for g in gradients.values()))
        updates = {} if skipped else self.updates(groups, gradients, norm)
        made_with = groups[0].window.made_with
        scale = self.scale.now if made_with is None else made_with[1]
        for group in groups:
            group.window = None
        self.scale.outcomes.append((skipped, failed))
        waiting = [group.window.made_with for group in self.groups if group.window is not None]
        if not self.contract.waits and (self.scale.epoch, self.scale.now) not in waiting:
            self.scale.advance()
        self.scale.account()
        self.steps += 1
        self.skipped += skipped
        return Verdict(skipped, norm, scale, updates)

    def updates(self, groups, gradients, norm):
        """What an update may do, by weight."""
        updates = {}
        for group in groups:
            for name, gradient in gradients.items():
                if name not in group.members:
                    continue
                weight = self.weights[name]
                arithmetic = weight.dtype if weight.form == "torch" else "float32"
                exact = Near(gradient, 0.0, arithmetic)
                if self.clip is not None:
                    # The norm's own sum and root, the quotient, and the product with 1/scale: each rounds once more.
                    exact = exact * Near(min(1.0, self.clip / (norm + 1e-6)), 16 * 2.0**-24, arithmetic)
                old = Near(weight.exact, 0.0, arithmetic)
                updates[name] = RULES[group.rule](old, exact, weight, group.lr[name])
        return updates


def not_finite(gradients):
    """Whether gradients overflow, their sum of squares included."""
    gradients = list(gradients)
    if not all(np.isfinite(gradient).all() for gradient in gradients):
        return True
    return math.fsum(float(np.sum(gradient * gradient)) for gradient in gradients) >= LARGEST_SQUARES
