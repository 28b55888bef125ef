"""``mezzo.script.inspect``: a script's run, recorded: what it does to numbers, and so in which formats it is safe."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo.compiling import is_compiled
from mezzo.errors import MezzoError, StateError
from mezzo.explanation import Explanation, explain
from mezzo.explanation.explaining import copied_inputs
from mezzo.formats import BF16, E4M3, E5M2, FP16
from mezzo.numerics import KINDS, Diagnosis, Evidence, RecordedTensor, Recorder, diagnose
from mezzo.numerics.evidence import FILE, grouped
from mezzo.policy import Policy
from mezzo.script.program import (
    METRICS,
    Enough,
    Program,
    Seams,
    StepRecord,
    never_trains,
    own_traceback,
    require_one_process,
)
from mezzo.script.runner import run
from mezzo.tensors import tensors
from mezzo.trace.sandbox import copied

# ``mezzo.script.rehearse``: one step of a script, and what policies would make of it.

T = TypeVar("T")  # Python 3.11 has no `def f[T]`


@dataclass(slots=True)
class Called:
    """A model as a script called it.

    Attributes:
        model: A copy of it.
        inputs: A copy of what it was called with.
        shapes: The shapes that it returned.
        loss: From what it returns to a loss, where the script has made one by ``cross_entropy``.
    """

    model: nn.Module
    inputs: Any
    shapes: tuple[torch.Size, ...] = ()
    loss: Callable[[Any], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed(Generic[T]):
    """What one step of a script has shown.

    Attributes:
        results: What ``ask`` returned for each model whose forward pass was part of the step: of all models under the
            first policy, then under the next.
        left_alone: Models about which nothing can be said, and why.
        error: What the script raised before the step was done; ``None`` where nothing.
    """

    results: tuple[T, ...]
    left_alone: dict[str, str]
    error: BaseException | None


def explained(call: Called, policy: Policy) -> Explanation:
    """Return the explanation of a model as a script called it, with the ``cross_entropy`` that the script computes."""
    return explain(call.model, call.inputs, policy=policy, loss=call.loss)


def rehearse(
    program: Program, policies: Policy | Sequence[Policy], ask: Callable[[Called, Policy], T], *, steps: int = 1
) -> Rehearsed[T]:
    """Run a script in FP32 until an optimizer has stepped, and look at each model that it calls on the way there.

    Args:
        program: The script, which runs once.
        policies: The policy, or several.
        ask: What to find out about a model under a policy: :func:`explained` is one.
        steps: The step to look at; those before it run as they are.

    Returns:
        What that has shown; what the script writes until then is written.

    **Cost**: that of ``ask`` for each model and policy, a copy of each model, and the script until then.
    """
    calls = _Calls(steps)
    error: BaseException | None = None
    with Seams() as seams:
        calls.watch(seams)
        step_hook = register_optimizer_step_post_hook(calls.stepped)
        try:
            program.run()
        except Enough:
            pass
        except BaseException as raised:
            error = raised.with_traceback(own_traceback(raised))
        finally:
            step_hook.remove()
    results = []
    for policy in [policies] if isinstance(policies, Policy) else policies:
        for call in calls.seen:
            try:
                results.append(ask(call, policy))
            except (MezzoError, TypeError) as failed:
                calls.left_alone[type(call.model).__name__] = str(failed)
    return Rehearsed(results=tuple(results), left_alone=calls.left_alone, error=error)


class _Calls:
    """The outermost modules that a script calls with gradients on, each copied at its first call in the chosen step.

    Attributes:
        seen: The calls.
        left_alone: Modules that could not be copied, and why.
    """

    def __init__(self, steps: int) -> None:
        self.seen: list[Called] = []
        self.left_alone: dict[str, str] = {}
        self._steps, self._num_steps = steps, Counter[int]()
        self._seen_modules: set[nn.Module] = set()

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """End the script when an optimizer has taken the step."""
        self._num_steps[id(optimizer)] += 1
        if self._num_steps[id(optimizer)] >= self._steps:
            raise Enough

    def watch(self, seams: Seams) -> None:
        """Replace what calls modules and ``cross_entropy``, so that both are recorded."""
        plain, entropy = vars(nn.Module)["__call__"], nn.functional.cross_entropy
        depth = 0

        @functools.wraps(plain)
        def call(self_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                called = self._recorded(self_, args, kwargs) if depth == 1 else None
                out = plain(self_, *args, **kwargs)
                if called is not None:
                    called.shapes = tuple(output.shape for output in tensors(out))
                return out
            finally:
                depth -= 1

        @functools.wraps(entropy)
        def cross_entropy(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 (torch's name)
            for called in reversed(self.seen):
                if called.loss is None and any(_holds(shape, input) for shape in called.shapes):
                    called.loss = functools.partial(_loss, entropy, input.shape, args, kwargs)
                    break
            return entropy(input, *args, **kwargs)

        seams.replace(nn.Module, "__call__", call)
        seams.replace(nn.functional, "cross_entropy", cross_entropy)

    def _recorded(self, module: nn.Module, args: Any, kwargs: Any) -> Called | None:
        is_due = torch.is_grad_enabled() and max(self._num_steps.values(), default=0) == self._steps - 1
        if not is_due or module in self._seen_modules or not any(param.requires_grad for param in module.parameters()):
            return None
        self._seen_modules.add(module)
        try:
            inputs = copied_inputs(_inputs(module, args, kwargs))
            self.seen.append(Called(copied(module, "mezzo.explain(build_model(), inputs, policy)"), inputs))
        except (MezzoError, TypeError) as error:  # arguments of which no mapping can be made
            self.left_alone[type(module).__name__] = str(error)
            return None
        return self.seen[-1]


def _holds(shape: torch.Size, logits: Any) -> bool:
    """Whether logits are an output of this shape, or rows of one."""
    if not isinstance(logits, Tensor) or not logits.requires_grad or not shape:
        return False
    return logits.shape == shape or (
        logits.dim() == 2 and shape[-1] == logits.shape[-1] and shape.numel() >= logits.numel()
    )


def _loss(entropy: Any, shape: torch.Size, args: Any, kwargs: Any, output: Any) -> Tensor:
    logits = next(
        tensor for tensor in tensors(output) if tensor.is_floating_point() and tensor.shape[-1:] == shape[-1:]
    )
    if logits.shape != shape:
        logits = logits.reshape(-1, shape[-1])[: shape[0]]
    loss: Tensor = entropy(logits, *args, **kwargs)
    return loss.mean() if loss.dim() else loss


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and kwargs:
        return dict(signature(module.forward).bind(*args, **kwargs).arguments)
    return args or kwargs


#: The formats that are looked at.
FORMATS: Final = (FP16, BF16, E4M3, E5M2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """What one format would make of some values, unscaled, over all recorded steps.

    Attributes:
        kind: One of :data:`mezzo.numerics.KINDS`.
        tensor: Its path; empty for all of the kind together.
        format: The format's name.
        flushed: Values that become zero, as a share of all; ``None`` where there are none.
        subnormal: Values that lose digits.
        overflow: Finite values that become infinite.
        swallowed: The share of updates that vanish in weights of this format; ``None`` where it is not known.
    """

    kind: str
    tensor: str
    format: str
    flushed: float | None
    subnormal: float | None
    overflow: float | None
    swallowed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a script's recorded run came to.

    Attributes:
        program: The script.
        policy: What it ran under.
        every: Steps from one recorded step to the next.
        records: Its steps.
        is_interrupted: Whether Ctrl-C has ended it.
        evidence: What was recorded of its largest model.
        diagnosis: What that comes to.
    """

    program: str
    policy: str
    every: int
    records: tuple[StepRecord, ...]
    is_interrupted: bool
    evidence: Evidence
    diagnosis: Diagnosis

    @property
    def is_wrong(self) -> bool:
        """Whether the run itself went wrong under its policy."""
        return any(alert.level == "bad" for alert in self.diagnosis.alerts)

    def lost(self, *, by_tensor: bool = False) -> Iterator[Lost]:
        """Yield what each format would lose of each kind, or of each tensor."""
        tensors = (tensor for step in self.evidence.steps for tensor in step.tensors)
        groups = grouped(tensors, lambda tensor: (tensor.kind, tensor.path if by_tensor else ""))
        for tensor_kind, path in sorted(groups, key=lambda key: KINDS.index(key[0])):
            total = RecordedTensor.total_of(groups[tensor_kind, path])
            for target in FORMATS:
                coverage = total.histogram.coverage(target)
                shares = (coverage.underflow, coverage.subnormal, coverage.overflow - total.histogram.infs)
                flushed, subnormal, overflow = (n / coverage.total if coverage.total else None for n in shares)
                share = math.nan if total.swallowed is None else total.swallowed.share(target)
                yield Lost(
                    kind=tensor_kind, tensor=path, format=target.name, flushed=flushed, subnormal=subnormal,
                    overflow=overflow, swallowed=None if math.isnan(share) else share,
                )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them."""
        return {
            "program": self.program,
            "policy": self.policy,
            "every": self.every,
            "model": self.evidence.header.model,
            "steps": len(self.records),
            "skipped": sum(record.skipped for record in self.records),
            "loss": self.records[-1].loss,
            "scale": self.records[-1].scale,
            "recorded": [step.step for step in self.evidence.steps],
            "interrupted": self.is_interrupted,
            "diagnosis": self.diagnosis.to_dict(),
            "lost": [asdict(lost) for lost in self.lost()],
            "tensors": [asdict(lost) for lost in self.lost(by_tensor=True)],
        }


def inspect(
    program: Program,
    policy: Policy | str = "O0",
    *,
    steps: int | None = None,
    every: int = 50,
    out: Path | None = None,
    compiled: bool = False,
) -> Inspection:
    """Run a script in this process under one policy, and record what that does to the numbers of its largest model.

    Args:
        program: The script.
        policy: A policy, its text, or the path of a policy file; in FP32 what other formats would lose is seen whole.
        steps: After how many steps the script is ended; by itself when omitted, or with Ctrl-C.
        every: Steps from one recorded step to the next; the first one is recorded.
        out: A folder that is there: recorded steps go to ``evidence.jsonl`` in it, and each step to ``metrics.jsonl``,
            while the script runs.
        compiled: Whether the model is compiled by ``torch.compile`` first, where the script has not done so.

    Returns:
        The run, its evidence, and what that comes to.

    Raises:
        PolicyError: Policy or ``every`` make no sense, or the script never trains.
        BaseException: What the script raises; the folder then holds what was recorded until then.
    """
    require_one_process("inspect")
    chosen = Policy.of(policy)
    records, recorders = list[StepRecord](), list[Recorder]()

    @contextmanager
    def recording(models: list[nn.Module]) -> Iterator[None]:
        largest = max(models, key=lambda model: sum(param.numel() for param in model.parameters()))
        stream = None if out is None else out / FILE
        if compiled and not is_compiled(largest):
            largest.compile()
        recorders.append(Recorder(largest, every=every, keep=None, formats=FORMATS, stream=stream))
        with recorders[0]:
            yield

    with ExitStack() as files:
        lines = None if out is None else files.enter_context((out / METRICS).open("w", buffering=1, encoding="utf-8"))

        def write(record: StepRecord) -> None:
            records.append(record)
            if lines is not None:
                lines.write(record.line)

        ended = run(program, chosen, steps=steps, on_step=write, around=recording)
    is_interrupted = bool(records) and isinstance(ended.error, KeyboardInterrupt)
    if ended.failure is not None and not is_interrupted:
        raise ended.failure
    if not records:
        raise never_trains(program.name, ended.report.left_alone)
    if not recorders:
        raise StateError(f"{program.name} has steps, and no model whose forward pass could be recorded")
    evidence = recorders[0].evidence
    return Inspection(
        program=program.name,
        policy=str(chosen),
        every=every,
        records=tuple(records),
        is_interrupted=is_interrupted,
        evidence=evidence,
        diagnosis=diagnose(evidence),
    )
