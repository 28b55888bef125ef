"""mezzo trains PyTorch models in automatic mixed precision.

``MixedPrecision`` ties models, optimizers and a ``Policy`` into a training loop. The pages are in ``docs/`` of the
repository: ``docs/start.md`` to begin, ``docs/nan.md`` where a loss is NaN, ``docs/index.md`` for all of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mezzo.releases import require_oldest

require_oldest()  # before what an older torch does not have is taken of it

from mezzo import formats
from mezzo.cast import Prepared, autocast, checkpoint_contexts, fp32, linear_cross_entropy, low, prepare
from mezzo.errors import (
    DistributedError,
    MezzoError,
    NumericsError,
    PolicyError,
    ScaleCollapsed,
    StateError,
    UnsupportedError,
)
from mezzo.policy import Decision, Policy, Rule, Schedule
from mezzo.scale import LossScale
from mezzo.session import MixedPrecision, Stats, Step, load, save

if TYPE_CHECKING:
    from mezzo import numerics, optim, overflow, plan
    from mezzo.distributed import fully_shard
    from mezzo.explanation import Explanation, explain
    from mezzo.plan import compile_backend
    from mezzo.session.attach import AttachedPrecision, attach
    from mezzo.session.capture import Captured, capture

__version__ = "0.1.0"

__all__ = [
    "AttachedPrecision", "Captured", "Decision", "DistributedError", "Explanation", "LossScale", "MezzoError",
    "MixedPrecision", "NumericsError", "Policy", "PolicyError", "Prepared", "Rule", "ScaleCollapsed",
    "Schedule", "StateError", "Stats", "Step", "UnsupportedError", "__version__", "attach", "autocast", "capture",
    "checkpoint_contexts", "compile_backend", "explain", "formats", "fp32", "fully_shard", "linear_cross_entropy",
    "load", "low", "numerics", "optim", "overflow", "plan", "prepare", "save",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what only some programs need, when they first ask for it."""
    if name in ("Explanation", "explain"):
        from mezzo import explanation

        return getattr(explanation, name)
    if name in ("Captured", "capture"):
        from mezzo.session import capture as module

        return getattr(module, name)
    if name in ("AttachedPrecision", "attach"):
        from mezzo.session import attach as own_loop

        return getattr(own_loop, name)
    if name == "compile_backend":
        from mezzo.plan import compile_backend

        return compile_backend
    if name == "fully_shard":
        from mezzo.distributed import fully_shard

        return fully_shard
    if name in ("compat", "integrations", "numerics", "optim", "overflow", "plan"):
        return importlib.import_module(f"mezzo.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return sorted(__all__)
