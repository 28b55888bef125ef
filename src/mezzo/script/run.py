"""``mezzo.script.run``: an unmodified training script under a policy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from mezzo.errors import MezzoError, raise_together
from mezzo.policy import Policy
from mezzo.script.gathering import Gathering, convert_before_wrapping
from mezzo.script.own_amp import replace_amp
from mezzo.script.program import Enough, Program, Seams, own_traceback
from mezzo.script.report import ScriptReport, StepLog
from mezzo.script.steps import StepRecord
from mezzo.session.attach import AttachedPrecision, attach
from mezzo.session.refusals import wrong_options

__all__ = ["ScriptRun", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """How a script's run has ended.

    Attributes:
        report: What it came to.
        error: What the script raised, with the traceback that it has by itself; ``None`` where it ran to its end.
    """

    report: ScriptReport
    error: BaseException | None

    @property
    def failure(self) -> BaseException | None:
        """What the script raised, but for an exit that says that all went well."""
        is_well = isinstance(self.error, SystemExit) and self.error.code in (None, 0)
        return None if is_well else self.error


def run(
    program: Program,
    policy: Policy | str | os.PathLike[str] = "O1",
    *,
    max_grad_norm: float | None = None,
    hold_schedulers: bool = True,
    steps: int | None = None,
    told: Callable[[StepRecord], None] | None = None,
    around: Callable[[list[nn.Module]], AbstractContextManager[None]] | None = None,
) -> ScriptRun:
    """Run a training script as it is under a policy, with one session over all optimizers that it makes.

    The session begins with the first forward pass that trains a parameter of an optimizer. What cannot be in it, since
    no module holds it or the policy is impossible for it, stays in FP32, and the report says so.

    Args:
        program: The script.
        policy: A policy, its text, or the path of a policy file.
        max_grad_norm: Clip the 2-norm of all gradients of a step together to this.
        hold_schedulers: Whether schedulers wait where a step was skipped, at one host sync a step.
        steps: After how many steps of sessions the script is ended, in its next backward pass; by itself when omitted.
        told: Is told of each step, at one transfer from the device.
        around: Returns what is entered once the first session has begun, over these models, and left with the script.

    Returns:
        How it ended; nothing that it raises passes through.

    Raises:
        PolicyError: No policy, or a norm that is none.

    **Cost**: that of :func:`mezzo.attach`; some microseconds of Python for each kernel in the first three steps.
    """
    chosen = Policy.of(policy)
    raise_together(wrong_options(max_grad_norm=max_grad_norm))
    report, entered = ScriptReport(program=program.name, policy=str(chosen)), contextlib.ExitStack()

    def begin(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> AttachedPrecision:
        log.count()
        amp = attach(models, optimizers, policy, max_grad_norm=max_grad_norm, hold_schedulers=hold_schedulers)
        amp.engine.observers.append(log)
        if around is not None and not report.models:  # written down once it has begun
            entered.enter_context(around(models))
        return amp

    error: BaseException | None = None
    with Seams() as seams:
        log = StepLog(report, told, steps)
        gathering = Gathering(begin, chosen, report, seams)
        converted = convert_before_wrapping(chosen, report, seams)
        replace_amp(gathering, report, seams)
        try:
            with entered, contextlib.suppress(Enough):
                program.run()
        except BaseException as raised:  # an exit and an interrupt are the script's own, too
            error = raised.with_traceback(own_traceback(raised))
        with contextlib.suppress(MezzoError) if error else contextlib.nullcontext():
            log.close()
            gathering.close()
            converted.close()
    return ScriptRun(report=report, error=error)
