"""What a session promises, as plain Python and float64: weights, moments, counts, gradients, scales, accounts.

Nothing here imports mezzo or torch. The oracle never follows the program over two roundings: where an update rounds, it
says which values may come out, takes the one that did, and goes on from there. All else it knows to the bit.
"""

import copy
import math
from dataclasses import dataclass, field

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
    clean: int = 0
    #: Which of the scale's values: gradients carry this, not only the number.
    epoch: int = 0
    growths: int = 0
    backoffs: int = 0
    lowest: float = 0.0
    highest: float = 0.0
    #: The last judgement: epoch, state before it, whether there was an overflow, whether it was held.
    last: tuple | None = None

    def __post_init__(self):
        self.lowest = self.lowest or self.now
        self.highest = self.highest or self.now

    @property
    def moves(self):
        return self.mode == "dynamic"

    def judge(self, found, held, epoch):
        """All gradients that one value of the scale made count as one step, together with those of a later call."""
        if not self.moves:
            return
        found = found and not held
        if epoch == self.epoch:
            self._judge(epoch, (self.now, self.clean), found, held, stays=held)
        elif self.last is not None and self.last[0] == epoch:
            _, before, found_before, held_before = self.last
            found, held = found or found_before, held or held_before
            self._judge(epoch, before, found, held, stays=held and not found)
        else:  # from longer ago: only what overflowed counts, and only if the scale is not below already
            found = found and self.now >= self.values[epoch]
            self._judge(self.epoch, (self.now, self.clean), found, False, stays=not found)

    values: dict = field(default_factory=dict)

    def _judge(self, epoch, before, found, held, *, stays):
        self.last = (epoch, before, found, held)
        scale, clean = before
        if not stays:
            if found:
                scale, clean = max(scale / 2, 1.0), 0
            else:
                clean += 1
                if clean == self.interval:
                    scale, clean = min(scale * 2, self.ceiling), 0
        self.values[self.epoch] = self.now
        self.epoch += 1
        previous, self.now, self.clean = self.now, scale, clean
        self.growths += scale > previous
        self.backoffs += scale < previous
        self.lowest, self.highest = min(self.lowest, scale), max(self.highest, scale)

    def forget(self):
        """Of gradients that were made before nothing is known any more."""
        self.last = None


@dataclass
class Weight:
    """One parameter.

    Attributes:
        dtype: Of the model's tensor.
        form: ``plain``, ``stochastic``, ``kahan``; ``split``, ``full``; ``master`` and ``torch`` for torch's optimizers
            with and without masters; ``loose`` for what no optimizer updates.
        exact: What the optimizer knows of it.
        low: What the model computes with.
        states: The optimizer's moments; zeros where it has not made them yet.
        count: Updates so far.
        trains: ``requires_grad``.
        pending: ``"low"`` or ``"exact"``: edited, and the other half follows at the next step. ``"remainder"``: edited
            beside the remainder of another value, which takes the exact one at most half a spacing away.
    """

    dtype: str
    form: str
    exact: np.ndarray
    low: np.ndarray
    states: dict = field(default_factory=dict)
    count: int = 0
    trains: bool = True
    pending: str | None = None

    @property
    def keeps_all(self):
        """Whether FP32 values are kept beside low-precision weights."""
        return self.dtype == "float32" or self.form in ("split", "full", "master", "kahan")

    def edit(self, low):
        """Somebody wrote the model's tensor."""
        if self.form in ("full", "master"):
            self.pending = "low"
        elif self.form == "split":
            self.pending = "remainder"
        else:  # what compensates for rounding stays where there is any
            self.exact = rounded(low + (self.exact - self.low), "float32")
        self.low = low

    def round(self, exact):
        """What the model computes with, for an exact value."""
        if self.form in ("split", "full") and self.dtype == "bfloat16":
            return rounded(exact, "bfloat16", away=True)
        return rounded(exact, self.dtype)

    def taken_over(self):
        """The exact value after an edit of the model's: where it still rounds to that, it stays."""
        if self.pending != "low":
            return self.exact
        return np.where(self.round(self.exact) == self.low, self.exact, self.low)


@dataclass
class Carried:
    """The scale that gradients carry."""

    loss: int
    epoch: int
    scale: float


@dataclass
class Share:
    """What one loss made with one scale, and whether that overflowed."""

    loss: int
    epoch: int
    found: bool


@dataclass
class Window:
    """The backward passes since one optimizer's last step."""

    calls: int = 0
    carried: Carried | None = None
    shares: list = field(default_factory=list)
    aside: dict = field(default_factory=dict)
    losses: list = field(default_factory=list)  # (loss, whether it was finite)
    assigned: set = field(default_factory=set)  # whose ``.grad`` is another object since, which the step will see


@dataclass
class Group:
    """One optimizer: its weights, its rule, its gradients."""

    members: list
    rule: str
    lr: dict
    window: Window | None = None
    gradients: dict = field(default_factory=dict)  # as they stand, scaled where a scale is carried

    def set_aside(self):
        self.share()
        for name, gradient in self.unscaled().items():
            self.window.aside[name] = self.window.aside.get(name, 0.0) + gradient
        self.gradients, self.window.carried = {}, None

    def share(self):
        carried = self.window.carried
        if carried is not None and self.gradients:
            self.window.shares.append(Share(carried.loss, carried.epoch, not_finite(self.gradients.values())))

    def unscaled(self):
        scale = 1.0 if self.window.carried is None else self.window.carried.scale
        return {name: gradient / scale for name, gradient in self.gradients.items()}

    def clear(self, zeros):
        """The user has cleared all gradients, or filled some with zeros."""
        self.gradients = {name: np.zeros_like(gradient) for name, gradient in self.gradients.items() if name in zeros}
        if self.window is not None:
            self.window.aside = {}

    def settle(self):
        """The unscaled sum of everything, in ``.grad``."""
        if self.window.aside:
            self.set_aside()
            self.gradients, self.window.aside = self.window.aside, {}
            return
        self.share()
        self.gradients, self.window.carried = self.unscaled(), None


@dataclass
class Verdict:
    """What a step finds, and what it then may do to each weight."""

    skipped: bool
    norm: float
    shares: list
    updates: dict


@dataclass
class Oracle:
    """The whole session."""

    weights: dict
    groups: list
    scales: list
    clip: float | None = None
    steps: int = 0
    skipped: int = 0
    on_the_way: dict = field(default_factory=dict)
    closed: bool = False

    def copy(self):
        return copy.deepcopy(self)

    @property
    def is_open(self):
        return any(group.window is not None for group in self.groups)

    def owner(self, name):
        return next((group for group in self.groups if name in group.members), None)

    # The loop -------------------------------------------------------------------------------------------

    def begin(self, loss, groups, *, finite):
        """A backward pass is about to add gradients with a loss's scale."""
        scale = self.scales[loss]
        carried = Carried(loss, scale.epoch, scale.now)
        for group in groups:
            if group.window is None:
                group.window = Window()
            else:
                before = group.window.carried
                agrees = not scale.moves and (before is not None or scale.now == 1.0)
                if not agrees and (before is None or (before.loss, before.epoch) != (loss, scale.epoch)):
                    group.set_aside()
            group.window.calls += 1
            group.window.losses.append((loss, finite))
            group.window.carried = carried

    def add(self, name, number, dtype, form):
        """An optimizer gets one weight more."""
        weight, group = self.weights[name], self.groups[number]
        weight.dtype, weight.form = dtype, form
        group.members.append(name)
        group.lr[name] = LR

    def accumulate(self, groups, gradients):
        for group in groups:
            for name in group.members:
                if name in gradients:
                    before = group.gradients.get(name)
                    group.gradients[name] = (
                        gradients[name] if before is None else rounded(before + gradients[name], "float32")
                    )

    def saved(self):
        """What a checkpoint holds: edits are taken over, gradients are part of it inside a window."""
        for weight in self.weights.values():
            if weight.pending == "exact":
                weight.low = weight.round(weight.exact)
            weight.exact, weight.pending = weight.taken_over(), None
        if not self.is_open:
            for group in self.groups:
                group.gradients = {}
        return self

    def loaded(self, present):
        """What a checkpoint makes of a session: no ``requires_grad``, no clipping, and gradients of windows alone."""
        self.clip = present.clip
        for name, weight in self.weights.items():
            weight.trains = present.weights[name].trains
        if not self.is_open:
            for group, other in zip(self.groups, present.groups, strict=True):
                group.gradients = other.gradients
        for scale in self.scales:
            scale.last = None
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
        self.on_the_way.clear()

    def step(self, groups):
        """Check, update or skip, adapt the scales, close the windows."""
        gradients, skipped, shares = self.check(groups)
        norm = math.sqrt(sum(float(np.sum(g * g)) for g in gradients.values()))
        updates = {} if skipped else self.updates(groups, gradients, norm)
        self.finish(groups, skipped, shares)
        return Verdict(skipped, norm, shares, updates)

    def check(self, groups):
        """What a step finds: the gradients unscaled, whether to skip, and each loss's share."""
        windows = [group.window for group in groups]
        carried = {(w.carried.loss, w.carried.epoch) if w.carried else None for w in windows}
        if self.scales[0].mode != "dynamic" and None not in carried:
            carried = {next(iter(carried))}
        if len(carried) > 1 or any(w.carried is None or w.shares or w.aside for w in windows):
            for group in groups:
                group.settle()
            shares = [share for w in windows for share in w.shares]
        else:
            shares = None
        gradients = {name: g for group in groups for name, g in group.unscaled().items()}
        found = not_finite(gradients.values()) or not_finite(g for group in groups for g in group.gradients.values())
        if shares is None:
            last = windows[-1].carried
            shares = [Share(last.loss, last.epoch, found)]
        return gradients, found, shares

    def finish(self, groups, found, shares):
        """The scales move, the windows close, the account is kept."""
        losses = [pair for group in groups for pair in group.window.losses]
        for loss in sorted({share.loss for share in shares}):
            scale = self.scales[loss]
            bad = any(not finite for number, finite in losses if number == loss or not scale.moves)
            overflowed = self.on_the_way.pop(loss, None)
            bad = bad and not overflowed
            for epoch in dict.fromkeys(share.epoch for share in shares if share.loss == loss):
                these = any(share.found for share in shares if (share.loss, share.epoch) == (loss, epoch))
                these = these or bool(overflowed)
                scale.judge(these, these and bad, epoch)
        for group in groups:
            group.window = None
        self.steps += 1
        self.skipped += found

    def updates(self, groups, gradients, norm):
        """What an update may do, by weight."""
        found = {}
        for group in groups:
            for name, gradient in gradients.items():
                if name not in group.members:
                    continue
                weight = self.weights[name]
                arithmetic = weight.dtype if weight.form == "torch" else "float32"
                near = Near(gradient, 0.0, arithmetic)
                if self.clip is not None:
                    # The norm's own sum and root, the quotient, and the product with 1/scale: each rounds once more.
                    near = near * Near(min(1.0, self.clip / (norm + 1e-6)), 16 * 2.0**-24, arithmetic)
                old = Near(weight.taken_over(), 0.0, arithmetic)
                found[name] = RULES[group.rule](old, near, weight, group.lr[name])
        return found


def not_finite(gradients):
    """Whether gradients overflow, their sum of squares included."""
    gradients = list(gradients)
    if not all(np.isfinite(gradient).all() for gradient in gradients):
        return True
    return math.fsum(float(np.sum(gradient * gradient)) for gradient in gradients) >= LARGEST_SQUARES
