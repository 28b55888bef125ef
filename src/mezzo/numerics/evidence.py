"""What was recorded of a run, as a value: histograms by kind, module and step, and updates that vanish.

A :class:`Evidence` is what a recorder hands out, and what is read back from the file that it wrote, whose
form stands below: one from memory and one from a file answer alike.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar

import torch

from mezzo.errors import PolicyError, StateError, nearest, shown, some_of
from mezzo.files import atomic_file, jsonable, made_of
from mezzo.formats import Format, by_name
from mezzo.numerics.histogram import ExponentHistogram
from mezzo.policy.rules import as_named, matches
from mezzo.trace.observe import BINS, FIRST, INFS, LARGEST, NANS, ROW, ZEROS

#: What is recorded of a module, in the order in which a step makes it.
KINDS: Final = ("weights", "activations", "activation_gradients", "weight_gradients", "updates")

#: The operands of a weight's product, in the order in which a step quantises them, and the kind that each is of.
OPERANDS: Final = {"activation": "activations", "weight": "weights", "gradient": "activation_gradients"}
#: Where ‖g‖ is less than so many times the norm of the quantisation noise, quantised training becomes less effective.
#: Source: Chmiel et al., FP4 All the Way, https://arxiv.org/abs/2505.19115.
NOISE_LIMIT: Final = math.sqrt(3.0)

Steps = Literal["newest", "all"] | int

T = TypeVar("T", "RecordedTensor", "RecordedOperand")  # Python 3.11 has no `def f[T]`
Key = TypeVar("Key")


def grouped(items: Iterable[T], key: Callable[[T], Key]) -> dict[Key, list[T]]:
    """Return items by their keys, both in the order in which they come."""
    groups: dict[Key, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def kind_of(name: str) -> str:
    """Find a kind by what a user calls it: singular or plural, with underscores, hyphens or spaces.

    Raises:
        PolicyError: There is no such kind; the message names the nearest one.

    Example:
        >>> kind_of("Activation gradient"), kind_of("weight-gradients")
        ('activation_gradients', 'weight_gradients')
    """
    word = re.sub(r"[\s_-]+", "_", name.strip().lower()) if isinstance(name, str) else ""
    for tensor_kind in KINDS:
        if word in (tensor_kind, tensor_kind.removesuffix("s")):
            return tensor_kind
    close = difflib.get_close_matches(word, KINDS, 1, 0.4)
    raise PolicyError(
        f"unknown kind of tensors {shown(name)}", why=nearest(word, KINDS), write=f'"{close[0] if close else KINDS[2]}"'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwallowedUpdates:
    """How many updates of a weight vanish.

    Attributes:
        updated: Elements whose update is not zero.
        swallowed: Of these, by storage format: elements where round(w + Δw) == w.
        beyond: Of these: elements whose weight is at least 2048 times their update, in magnitude.
        with_gradient: Elements whose gradient is not zero.
        unmoved: Of these: elements whose update is zero. In weights that are stored in 16 bits alone, they are
            the updates that were swallowed already.
    """

    updated: int
    swallowed: Mapping[str, int]
    beyond: int
    with_gradient: int = 0
    unmoved: int = 0

    def share(self, format: str | torch.dtype | Format) -> float:
        """Return the share of updates that a storage format swallows; NaN where no element is updated.

        Raises:
            PolicyError: This format was not recorded.
        """
        name = by_name(format).name
        if name not in self.swallowed:
            raise PolicyError(
                f"updates swallowed by {name} were not recorded",
                why=f"recorded: {', '.join(self.swallowed) or 'none'}",
                write=f'Recorder(model, optimizer, formats=("{name}", …))',
            )
        return self.swallowed[name] / self.updated if self.updated else math.nan

    @property
    def share_unmoved(self) -> float:
        """The share of weights with a gradient that did not move; NaN where no element has a gradient."""
        return self.unmoved / self.with_gradient if self.with_gradient else math.nan

    def __add__(self, other: SwallowedUpdates) -> SwallowedUpdates:
        common = [name for name in self.swallowed if name in other.swallowed]
        return SwallowedUpdates(
            updated=self.updated + other.updated,
            swallowed={name: self.swallowed[name] + other.swallowed[name] for name in common},
            beyond=self.beyond + other.beyond,
            with_gradient=self.with_gradient + other.with_gradient,
            unmoved=self.unmoved + other.unmoved,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTensor:
    """What one step had of one tensor of a module, summed over its calls in the step.

    Attributes:
        kind: One of :data:`KINDS`.
        module: The module's path; empty for the model itself.
        name: The parameter's name in the module, or ``output``, with the place in it where it is a container.
        dtype: Of the tensor. Gradients are recorded unscaled, so that in float16 they hold more than that dtype could.
        histogram: Of its values.
        swallowed: Of updates: what vanishes of them.
    """

    kind: str
    module: str
    name: str
    dtype: str
    histogram: ExponentHistogram
    swallowed: SwallowedUpdates | None = None

    @property
    def path(self) -> str:
        """The module's path and the tensor's name, as ``blocks.0.up.weight``."""
        return f"{self.module}.{self.name}" if self.module else self.name

    @classmethod
    def total_of(cls, tensors: Sequence[RecordedTensor]) -> RecordedTensor:
        """Return the sum of several recorded tensors, at least one, with the names of the last."""
        lost = [tensor.swallowed for tensor in tensors if tensor.swallowed is not None]
        return dataclasses.replace(
            tensors[-1],
            histogram=ExponentHistogram.total_of(tensor.histogram for tensor in tensors),
            swallowed=functools.reduce(operator.add, lost) if lost else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOperand:
    """What one step lost of one operand of a weight's products below sixteen bits, over all times it was quantised.

    Formats whose scales depend on the dimension quantise an operand once for each product that it is in.

    Attributes:
        module: The path of the module that has the weight; empty for the model itself.
        name: The weight's name in it.
        role: ``activation``, ``weight`` or ``gradient``, which is the output's.
        format: The block format.
        elements: Elements that were quantised.
        saturated: Of these: elements beyond the largest that their scale reaches.
        flushed: Of these: elements that are not zero, and became zero.
        gradient_norm: Of gradients: the 2-norm of the weight's gradient, unscaled, from the output's gradient before it
            was quantised, of this rank's batch; ``None`` where no quantised gradient went into it.
        noise_norm: The 2-norm of what quantising that added to the weight's gradient.
    """

    module: str
    name: str
    role: str
    format: str
    elements: int
    saturated: int
    flushed: int
    gradient_norm: float | None = None
    noise_norm: float | None = None

    @property
    def noise(self) -> float | None:
        """‖noise‖ / ‖g‖; ``None`` where the ratio is not known, or not finite."""
        if not self.gradient_norm or self.noise_norm is None:
            return None
        is_known = math.isfinite(self.gradient_norm) and math.isfinite(self.noise_norm)
        return self.noise_norm / self.gradient_norm if is_known else None

    @property
    def below_noise(self) -> bool | None:
        """Whether ‖g‖ < √3 ‖noise‖; ``None`` where that is not known, or not finite."""
        return None if self.noise is None else self.noise * NOISE_LIMIT > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandLosses:
    """What some recorded steps lost of one operand of a weight's products.

    Attributes:
        module: The path of the module that has the weight.
        name: The weight's name in it.
        role: ``activation``, ``weight`` or ``gradient``.
        format: The block format.
        saturated: The share of elements beyond the largest that their scale reaches.
        flushed: The share of elements that are not zero, and became zero.
        below_noise: Of gradients: the share of steps in which ‖g‖ < √3 ‖noise‖; ``None`` where that is not known.
        noise: Of gradients: the mean of ‖noise‖ / ‖g‖ over steps.
        steps: How many steps had it.
    """

    module: str
    name: str
    role: str
    format: str
    saturated: float
    flushed: float
    below_noise: float | None
    noise: float | None
    steps: int

    @classmethod
    def of(cls, steps: Sequence[RecordedOperand]) -> OperandLosses:
        """Return the sum of what several steps lost of one operand."""
        first, elements = steps[0], sum(step.elements for step in steps)
        below = [step.below_noise for step in steps if step.below_noise is not None]
        noises = [step.noise for step in steps if step.noise is not None]
        return cls(
            module=first.module, name=first.name, role=first.role, format=first.format, steps=len(steps),
            saturated=sum(step.saturated for step in steps) / elements,
            flushed=sum(step.flushed for step in steps) / elements,
            below_noise=sum(below) / len(below) if below else None,
            noise=sum(noises) / len(noises) if noises else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One recorded step.

    Attributes:
        step: Its number, from 1.
        loss_scales: The scale of each loss that took part; empty where losses are not scaled.
        skipped: Whether the weights were left alone; there are no updates then.
        tensors: What it had.
        operands: What its products below sixteen bits lost of their operands.
    """

    step: int
    loss_scales: tuple[float, ...]
    skipped: bool
    tensors: tuple[RecordedTensor, ...]
    operands: tuple[RecordedOperand, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedModule:
    """A module that is recorded.

    Attributes:
        path: Its path; empty for the model itself.
        type: The name of its class.
        parameters: The dtypes of its own parameters by name.
        same_as: For a module that the model holds at several places: the path that it is recorded at.
        tied: Of its parameters, those that are recorded as another module's: by name, the path of that one.
    """

    path: str
    type: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    same_as: str | None = None
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceHeader:
    """Of what the evidence is.

    Attributes:
        mezzo: The version that recorded it.
        model: The name of the model's class.
        policy: The session's policy as text; ``None`` without a session.
        compute_dtype: The policy's dtype; ``None`` without a session.
        loss_scale: ``none``, ``constant`` or ``dynamic``; ``given`` where a loop without a session named its scale.
        every: A step is recorded, and then each that comes so many steps later.
        kinds: What is recorded.
        formats: The formats that updates are rounded to.
        modules: Those that are recorded, in the order of the forward pass.
    """

    mezzo: str
    model: str
    policy: str | None
    compute_dtype: str | None
    loss_scale: str
    every: int
    kinds: tuple[str, ...]
    formats: tuple[str, ...]
    modules: tuple[RecordedModule, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was recorded of a run.

    Attributes:
        header: Of what.
        steps: The recorded steps, oldest first.
        num_steps: How many steps were taken, recorded or not, as far as it is known.
    """

    header: EvidenceHeader
    steps: tuple[RecordedStep, ...]
    num_steps: int

    def histogram(
        self,
        kind: str | Iterable[str],
        module: str | None = None,
        *,
        step: Steps = "newest",
        name: str | None = None,
    ) -> ExponentHistogram:
        """Sum the histograms of some tensors.

        Args:
            kind: One of :data:`KINDS` in any spelling that :func:`kind_of` takes, or several.
            module: A module's path or a glob of paths; all when omitted. It stands for the module's own tensors, not
                for those of modules inside it.
            step: The newest step that has such a tensor, ``"all"``, or a step's number.
            name: A parameter's name, or ``output``; all when omitted.

        Raises:
            PolicyError: No such kind or module was recorded.
            StateError: No step, or not that one, has such a tensor.
        """
        return RecordedTensor.total_of(self.tensors(kind, module, step=step, name=name)).histogram

    def swallowed(
        self, module: str | None = None, *, step: Steps = "newest", name: str | None = None
    ) -> SwallowedUpdates:
        """Count the updates that vanish, summed over some weights; arguments as of :meth:`histogram`."""
        lost = RecordedTensor.total_of(self.tensors("updates", module, step=step, name=name)).swallowed
        assert lost is not None, "each recorded update tells what of it vanishes"
        return lost

    def tensors(
        self,
        kind: str | Iterable[str],
        module: str | None = None,
        *,
        step: Steps = "newest",
        name: str | None = None,
    ) -> list[RecordedTensor]:
        """Return what :meth:`histogram` would sum; never an empty list."""
        several = kind if isinstance(kind, Iterable) and not isinstance(kind, str) else [kind]
        kinds = [kind_of(word) for word in several]

        def wanted_tensors(recorded: RecordedStep) -> list[RecordedTensor]:
            return [tensor for tensor in recorded.tensors if tensor.kind in kinds and name in (None, tensor.name)]

        tensors = self._of_steps(wanted_tensors, module, step)
        if not tensors:
            raise self._nothing(kinds, module, step, name)
        return tensors

    def operands(self, module: str | None = None, *, step: Steps = "all") -> list[OperandLosses]:
        """Return what products below sixteen bits lost of their operands; an empty list where none is.

        Args:
            module: A module's path or a glob of paths; all when omitted.
            step: ``"all"`` recorded steps, the newest that has any, or a step's number.

        Raises:
            PolicyError: No such module was recorded.
            StateError: That step was not recorded.
        """
        operands = self._of_steps(lambda recorded: recorded.operands, module, step)
        of_operand = grouped(operands, lambda operand: (operand.module, operand.name, operand.role, operand.format))
        return [OperandLosses.of(steps) for steps in of_operand.values()]

    def statistics(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each recorded step, module and kind: where its numbers lie, as JSON has it.

        ``largest`` is the largest finite magnitude; ``zeros``, ``infs``, ``nans``, ``flushed_fp16`` (zero in FP16) and
        ``swallowed_bf16`` (updates that vanish in BF16 weights; ``None`` where there are none) are counts of ``count``.
        """
        for recorded in self.steps:
            for (module, tensor_kind), several in grouped(
                recorded.tensors, lambda tensor: (tensor.module, tensor.kind)
            ).items():
                total = RecordedTensor.total_of(several)
                counts, lost = total.histogram, total.swallowed
                yield {
                    "step": recorded.step, "module": module, "kind": tensor_kind,
                    "dtype": "+".join(dict.fromkeys(tensor.dtype for tensor in several)),
                    "largest": counts.max_abs, "zeros": counts.zeros, "infs": counts.infs, "nans": counts.nans,
                    "flushed_fp16": counts.coverage("float16").underflow,
                    "swallowed_bf16": None if lost is None else lost.swallowed.get("bfloat16"),
                    "count": counts.total,
                }  # fmt: skip

    def _of_steps(self, records_of: Callable[[RecordedStep], Sequence[T]], module: str | None, step: Steps) -> list[T]:
        """Return the records of the chosen steps that belong to the chosen modules."""
        homes = None if module is None else self._homes(module)
        records: list[T] = []
        for recorded in self._chosen(step):
            records += (
                record
                for record in records_of(recorded)
                if homes is None or not homes.isdisjoint([(record.module, None), (record.module, record.name)])
            )
            if records and step == "newest":
                break
        return records

    def _chosen(self, step: Steps) -> Iterator[RecordedStep]:
        """Return the steps asked for, newest first."""
        if isinstance(step, int):
            steps = [recorded for recorded in self.steps if recorded.step == step]
            if not steps:
                numbers = [str(recorded.step) for recorded in self.steps]
                raise StateError(f"step {step} was not recorded", why=f"recorded: {some_of(numbers) or 'none yet'}")
            return iter(steps)
        if step not in ("newest", "all"):
            raise PolicyError(f"unknown steps {shown(step)}", write='step="newest", step="all" or step=51')
        return reversed(self.steps)

    def _homes(self, module: str) -> set[tuple[str, str | None]]:
        """Return where tensors of modules are recorded: paths, each with a tensor's name, or ``None`` for all."""
        homes: set[tuple[str, str | None]] = set()
        glob = as_named(module, [entry.path for entry in self.header.modules])
        for entry in self.header.modules:
            if matches(entry.path, glob):
                homes.add((entry.path if entry.same_as is None else entry.same_as, None))
                for path in entry.tied.values():
                    owner, _, name = path.rpartition(".")
                    homes.add((owner, name))
        if not homes:
            raise PolicyError(
                f"no recorded module is called {shown(module)}",
                why=nearest(module, [entry.path for entry in self.header.modules if entry.path]),
                write='histogram("activations", "blocks.0"), or a glob of paths, or nothing for all modules',
            )
        return homes

    def _nothing(self, kinds: list[str], module: str | None, step: Steps, name: str | None) -> StateError:
        of = "" if module is None else f" of {shown(module)}"
        missing = [tensor_kind for tensor_kind in kinds if tensor_kind not in self.header.kinds]
        if missing:
            why = f"recorded: {', '.join(self.header.kinds)}"
        elif not self.steps:
            why = f"no step was recorded yet, of {self.num_steps} taken"
        elif name is not None:
            names = {e.name for s in self.steps for e in s.tensors if e.kind in kinds}
            why = f"no tensor has the name {shown(name)}; there are {some_of(sorted(names))}"
        elif isinstance(step, int):
            (recorded,) = self._chosen(step)
            why = f"step {step} {'was skipped' if recorded.skipped else 'had none'}"
        else:
            why = "no recorded step called it" if module is not None else "no recorded step had any"
        return StateError(f"there are no {' and no '.join(kinds)}{of}", why=why)


# How evidence is kept in a file: one JSON object a line, so that a run can be followed while it goes on.
#
# Its lines, by example (wrapped here). The first says of what it is::
#
#     {"schema": 3, "mezzo": "0.1.0", "model": "ByteGPT", "policy": "O1", "compute_dtype": "float16",
#      "loss_scale": "dynamic", "every": 50, "kinds": ["weights", …], "formats": ["float16", …],
#      "modules": [{"path": "blocks.0.up", "type": "Linear", "parameters": {"weight": "float32"},
#                   "same_as": "blocks.1.up" or null, "tied": {"weight": "embed.weight"}}, …]}
#
# then one for each recorded step::
#
#     {"step": 51, "loss_scales": [65536.0], "skipped": false, "tensors": [
#       {"kind": "updates", "module": "blocks.0.up", "name": "weight", "dtype": "float32",
#        "counts": {"-12": 4031, …}, "powers": {"-12": 2, …}, "zeros": 0, "infs": 0, "nans": 0, "max_abs": 0.0025,
#        "swallowed": {"updated": 65536, "beyond": 120, "with_gradient": 65536, "unmoved": 0,
#                      "swallowed": {"bfloat16": 7031, …}} (null but for updates)}, …],
#      "operands": [
#       {"module": "blocks.0.up", "name": "weight", "role": "gradient", "format": "nvfp4", "elements": 65536,
#        "saturated": 210, "flushed": 4031, "gradient_norm": 0.25, "noise_norm": 0.031 (null but for gradients)}, …]}
#
# ``counts`` has the values with 2^k < \|x\| < 2^(k+1), by k, and ``powers`` those that are exactly 2^k: formats end at
# powers of two, and only so is it known on which side of a limit they lie. Exponents without values are left out.
# Numbers that JSON cannot write are the texts ``"nan"``, ``"inf"`` and ``"-inf"``.

#: What the file is called in a folder of results, and the one of :meth:`Evidence.statistics` beside it.
FILE: Final = "evidence.jsonl"
STATISTICS: Final = "statistics.jsonl"
SCHEMA: Final = 3


def write(evidence: Evidence, path: str | os.PathLike[str]) -> None:
    """Write a file that :func:`read` reads; it appears whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    lines = [_line({"schema": SCHEMA, **dataclasses.asdict(evidence.header)}), *map(_step_line, evidence.steps)]
    with atomic_file(path) as file:
        file.writelines(line.encode() for line in lines)


def write_statistics(evidence: Evidence, path: str | os.PathLike[str]) -> None:
    """Write :meth:`Evidence.statistics`, a JSON object a line; the file appears whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    with atomic_file(path) as file:
        file.writelines(_line(row).encode() for row in evidence.statistics())


def write_step(file: IO[str], header: EvidenceHeader, step: RecordedStep) -> None:
    """Append a step to a file, behind the header if the step is the first, and flush the file."""
    if not file.tell():
        file.write(_line({"schema": SCHEMA, **dataclasses.asdict(header)}))
    file.write(_step_line(step))
    file.flush()


def _step_line(step: RecordedStep) -> str:
    return _line(dataclasses.asdict(dataclasses.replace(step, tensors=())) | {"tensors": [*map(_tensor, step.tensors)]})


def _tensor(recorded: RecordedTensor) -> dict[str, Any]:
    numbers, histogram, lost = recorded.histogram.numbers, recorded.histogram, recorded.swallowed
    counts, powers = (
        {str(FIRST + index): count for index, count in enumerate(numbers[start : start + BINS]) if count}
        for start in (0, BINS)
    )
    return {
        "kind": recorded.kind, "module": recorded.module, "name": recorded.name, "dtype": recorded.dtype,
        "counts": counts, "powers": powers, "zeros": histogram.zeros, "infs": histogram.infs, "nans": histogram.nans,
        "max_abs": histogram.max_abs, "swallowed": None if lost is None else dataclasses.asdict(lost),
    }  # fmt: skip


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(jsonable(value), allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def read(path: str | os.PathLike[str]) -> Evidence:
    """Read what a recorder wrote; a last line that a run was killed in is left out.

    Args:
        path: The file, or the folder that holds it.

    Raises:
        StateError: There is no such file, it is damaged, or another version of mezzo wrote it; the message names file
            and line.
    """
    file, number = Path(path), 1
    file = file / FILE if file.is_dir() else file
    try:
        first, *others = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or [""]
        header = _header(json.loads(first))
        steps = list[RecordedStep]()
        for number, line in enumerate(others, start=2):  # noqa: B007  (an error names it)
            if line.endswith("\n"):
                steps.append(_step(json.loads(line)))
    except OSError as error:
        write = "with Recorder(model, optimizer, stream=path) as recorder: …, or recorder.save(path)"
        raise StateError("there is no evidence here", where=str(file), why=str(error.strerror), write=write) from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        where, why = f"{file}, line {number}", str(error).partition("\n")[0]
        raise StateError("the evidence cannot be read", where=where, why=why) from error
    return Evidence(header=header, steps=tuple(steps), num_steps=steps[-1].step if steps else 0)


def _header(line: dict[str, Any]) -> EvidenceHeader:
    if (schema := line.pop("schema", None)) != SCHEMA:
        raise ValueError(f"it has schema {schema!r}, and this version of mezzo reads schema {SCHEMA}")
    header: EvidenceHeader = made_of(EvidenceHeader, line)
    return header


def _step(line: dict[str, Any]) -> RecordedStep:
    step: RecordedStep = made_of(
        RecordedStep, line | {"tensors": [tensor | _pop_histogram(tensor) for tensor in line["tensors"]]}
    )
    return step


def _pop_histogram(line: dict[str, Any]) -> dict[str, ExponentHistogram]:
    """Remove a tensor's counts from its line of JSON, and return them as a histogram."""
    numbers = [0] * ROW
    for start, name in ((0, "counts"), (BINS, "powers")):
        for exponent, count in line.pop(name).items():
            numbers[start + int(exponent) - FIRST] = count
    for index, name in ((ZEROS, "zeros"), (INFS, "infs"), (NANS, "nans")):
        numbers[index] = line.pop(name)
    numbers[LARGEST] = int(torch.tensor(line.pop("max_abs"), dtype=torch.float32).view(torch.int32))
    return {"histogram": ExponentHistogram(torch.tensor(numbers, dtype=torch.int64))}
