"""Recipes: in which formats the operands of a product are written down, and whether a device multiplies them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, replace
from typing import Final

import torch

from mezzo.cast.notes import Quantising
from mezzo.cast.products.native import Support, support_on
from mezzo.errors import UnsupportedError
from mezzo.formats import MXFP8_E4M3, NVFP4, NVFP4_2D, ROWWISE_E4M3, TENSORWISE_E4M3, TENSORWISE_E5M2, BlockFormat
from mezzo.policy import Policy, Treatment
from mezzo.policy.ops import QUANTISED
from mezzo.tensors import dtype_name


def depends(form: BlockFormat) -> bool:
    """Whether what a format makes of a matrix depends on the dimension that is summed over."""
    return isinstance(form.block, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the products of a weight are computed.

    Attributes:
        treatment: The policy's word for it.
        activation: The format of what a layer is given.
        weight: That of its weight.
        gradient: That of its output's gradient.
        multiple: What each dimension must be a multiple of.
        delayed: Whether scales come from the steps before.
        stochastic: Whether gradients are rounded at random.
        transformed: Whether what weight gradients are made of is first spread over 16 rows by a random rotation.
        low: Which product stays in the policy's dtype: ``none``, ``wgrad`` or ``forward``.
        emulated: Whether products in that dtype are computed in FP32 from rounded operands.
        native: Whether the device computes products of quantised operands.
        output: What its kernels return, which is rounded to the policy's dtype where that is another.
        key: What compiled code knows it by.
    """

    treatment: Treatment
    activation: BlockFormat
    weight: BlockFormat
    gradient: BlockFormat
    multiple: int = 16
    delayed: bool = False
    stochastic: bool = False
    transformed: bool = False
    low: str = "none"
    emulated: bool = False
    native: bool = False
    output: torch.dtype | None = None
    key: str = ""

    def kept_dim(self, form: BlockFormat) -> int:
        """Return along which dimension an operand is quantised that a backward pass needs."""
        return 0 if self.low == "forward" or depends(form) else 1

    def support_on(self, device_type: str, dtype: torch.dtype) -> Support:
        """Find out whether a device has all of its products: see :func:`mezzo.cast.products.native.support_on`."""
        pairs = [(self.gradient, self.weight)]
        pairs += [] if self.low == "forward" else [(self.activation, self.weight)]
        pairs += [] if self.low == "wgrad" else [(self.gradient, self.activation)]
        supports = [support_on(device_type, *pair, dtype) for pair in pairs]
        lacking = next((support for support in supports if support.lacks), None)
        return lacking or next((support for support in supports if support.output != dtype), supports[0])

    def output_note(self, device_type: str, policy: Policy) -> str:
        """Return a note where a device's kernels return another dtype than the policy's; else an empty text."""
        support = self.support_on(device_type, policy.dtype)
        if policy.emulate is True or support.lacks or support.output == policy.dtype:
            return ""
        wanted, returned = dtype_name(policy.dtype), dtype_name(support.output)
        return f"{wanted} is rounded from {returned}, which the device's kernel returns"

    @property
    def as_note(self) -> Quantising:
        """What it is to those who watch a pass."""
        if self.low == "forward":
            return Quantising((), self.emulated)
        names = dict.fromkeys(form.element.name for form in (self.activation, self.weight))
        return Quantising(tuple(names), not self.native)

    @property
    def remembers(self) -> bool:
        """Whether something is to be known from step to step."""
        return self.delayed or self.stochastic


@functools.lru_cache(maxsize=256)
def recipe_of(policy: Policy, treatment: Treatment) -> Recipe:
    """Return how a policy has the products under a treatment computed, whatever the device."""
    recipe = Recipe(
        treatment=treatment, activation=MXFP8_E4M3, weight=MXFP8_E4M3, gradient=MXFP8_E4M3, multiple=32,
        low=policy.low_products,
    )  # fmt: skip
    if treatment == "mxfp8":
        return recipe
    recipe = replace(recipe, multiple=16)
    if treatment == "nvfp4":
        tricks = policy.nvfp4_tricks.split("+")
        return replace(
            recipe, activation=NVFP4, weight=NVFP4_2D if "2d" in tricks else NVFP4, gradient=NVFP4,
            stochastic="stochastic" in tricks, transformed="rht" in tricks,
        )  # fmt: skip
    if policy.fp8_recipe == "rowwise":
        return replace(recipe, activation=ROWWISE_E4M3, weight=ROWWISE_E4M3, gradient=ROWWISE_E4M3)
    return replace(
        recipe, activation=TENSORWISE_E4M3, weight=TENSORWISE_E4M3, gradient=TENSORWISE_E5M2,
        delayed=policy.fp8_recipe == "delayed",
    )  # fmt: skip


def recipe_support(device_type: str, dtype: torch.dtype) -> dict[str, Support]:
    """Find out which kinds of products below sixteen bits a device has, by what policies call them.

    Args:
        device_type: The device.
        dtype: The policy's.

    **Cost**: on an accelerator some small products the first time.
    """
    policy = Policy.O1(dtype)
    recipes = {f"fp8, {how}": recipe_of(policy.evolve(fp8_recipe=how), "fp8") for how in ("tensorwise", "rowwise")}
    recipes |= {name: recipe_of(policy, name) for name in QUANTISED if name != "fp8"}
    return {name: recipe.support_on(device_type, dtype) for name, recipe in recipes.items()}


#: Every recipe that a region has been given, by its key.
BY_KEY: Final[dict[str, Recipe]] = {}


@functools.lru_cache(maxsize=256)
def recipe_on(device_type: str, policy: Policy, treatment: Treatment, *, emulated: bool) -> Recipe:
    """Return how the products under a treatment are computed on a device.

    Args:
        device_type: The device.
        policy: The policy.
        treatment: The treatment.
        emulated: Whether products in the policy's dtype are emulated there.

    Raises:
        UnsupportedError: The device lacks such products, and ``emulate=False``.
    """
    recipe = replace(recipe_of(policy, treatment), emulated=emulated)
    if policy.emulate is not True:
        support = recipe.support_on(device_type, policy.dtype)
        if policy.emulate is False and support.lacks:
            products = f"{treatment} products" + (f" scaled {policy.fp8_recipe}" if treatment == "fp8" else "")
            raise UnsupportedError(
                f"{products} cannot be computed natively on this {device_type}",
                why=support.lacks,
                write='emulate="auto", the text emulate=auto',
            )
        recipe = replace(recipe, native=not support.lacks, output=support.output)
    key = " ".join(str(getattr(recipe, field.name)) for field in dataclasses.fields(recipe))
    return BY_KEY.setdefault(key, replace(recipe, key=key))
