"""Training tasks on real data that installs with the package, and the loop that compares policies on them.

Here live recipes, the training loop, what it counts, and the files a comparison leaves behind. Pictures and
tables are ``report``'s, printing is ``cli``'s. No recipe downloads anything.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from mezzo.errors import PolicyError, nearest
from mezzo.recipes.comparison import Comparison, compare
from mezzo.recipes.digits_cnn import DIGITS_CNN
from mezzo.recipes.docs_lm import DOCS_LM
from mezzo.recipes.inspection import Inspection, inspect
from mezzo.recipes.recipe import Metric, Recipe, Split
from mezzo.recipes.training import RunResult, StepRecord, Watcher, train
from mezzo.recipes.tuning import tune

__all__ = [
    "RECIPES", "Comparison", "Inspection", "Metric", "Recipe", "RunResult", "Split", "StepRecord", "Watcher", "compare",
    "get", "inspect", "train", "tune",
]  # fmt: skip

#: Every built-in recipe by name.
RECIPES: Final = MappingProxyType({recipe.name: recipe for recipe in (DIGITS_CNN, DOCS_LM)})


def get(name: str, write: str = "mezzo compare digits-cnn") -> Recipe:
    """Return a built-in recipe.

    Args:
        name: A key of :data:`RECIPES`.
        write: What the error says to write instead.

    Raises:
        PolicyError: There is no such recipe; the message names the nearest.

    Example:
        >>> get("digits-cnn").metric.name
        'test accuracy'
    """
    if name not in RECIPES:
        raise PolicyError(f"unknown recipe {name!r}", why=nearest(name, RECIPES), write=write)
    return RECIPES[name]
