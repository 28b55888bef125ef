"""All faults, a file for each room: ``make faults`` plants each."""

from . import (
    cast,
    cli,
    compat,
    distributed,
    explanation,
    ground,
    numerics,
    optim,
    overflow,
    policy,
    report,
    scale,
    script,
    session,
    step,
    weights,
)
from .fault import Fault

_ROOMS = (
    *(policy, scale, step, optim, weights, cast, session, distributed, compat),
    *(explanation, overflow, numerics, script, report, cli, ground),
)
FAULTS: tuple[Fault, ...] = tuple(fault for room in _ROOMS for fault in room.FAULTS)
