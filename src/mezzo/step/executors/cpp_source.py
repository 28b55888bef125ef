"""C++ source of both passes: pass 2 from its one pure function (:mod:`.source`), pass 1 as written here.

Pass 2 computes in vectors (:mod:`mezzo.emit.vectors`); no header is torch's or the processor's, so that kernels
compile in tenths of a second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Final

import torch

from mezzo.emit.cpp import CPP as NUMBERS
from mezzo.emit.cpp import headers
from mezzo.emit.tracing import Dialect, Line, Of
from mezzo.emit.vectors import VECTORS
from mezzo.step.executors.source import ORDER, spelled_update
from mezzo.step.moments import GROUP
from mezzo.step.storage import Storage, nearest
from mezzo.step.update import UpdateRule

#: C++ of vectors, where it differs from that of numbers: functions have other names, and a condition that holds is
#: -1. Elements are read from memory as FP32 or int32.
CPP: Final[Dialect] = replace(
    NUMBERS,
    types=MappingProxyType({**NUMBERS.types, torch.float32: "F", torch.int32: "I", torch.bool: "I"}),
    operations=MappingProxyType(
        {
            **NUMBERS.operations,
            "aten.scalar_tensor.default": "same<{dtype}>({0})",
            "aten.sqrt.default of torch.float32": "root({0})",
            "aten.abs.default of torch.float32": "size({0})",
            "aten.abs.default of torch.int32": "size({0})",
            "aten.round.default of torch.float32": "rounded({0})",
            "aten.round.default, to=float16": "rounded_to_float16({0})",
            "aten.sign.default of torch.float32": "to_float(({0} < 0.0f) - ({0} > 0.0f))",
            "aten.__rshift__.Scalar, zeros=True": "shifted({0}, {1})",
            "aten._to_copy.default of torch.bool": "is_nonzero({0})",
            "aten.maximum.default": "larger({0}, {1})",
            "aten._to_copy.default of torch.float32": "to_float({0})",
            "aten._to_copy.default of torch.float32 from torch.bool": "to_float(-{0})",
            "aten._to_copy.default of torch.int32 from torch.bool": "-{0}",
        }
    ),
    widened=MappingProxyType(dict.fromkeys(NUMBERS.widened, "{0}")),
    narrowed=MappingProxyType(dict.fromkeys(NUMBERS.types, "{0}")),
    spread="{0}",
    stored="store({target}_row + i, {value}, n);",
    stored_of_group="store({target}_row + i, {value}, n);",
    largest="{name} = larger({name}, {value});",
    instructions=MappingProxyType({"aten.round.default, to=float16": partial(nearest, dtype=torch.float16)}),
    literal=lambda value, dtype: str(-int(value)) if dtype == torch.bool else NUMBERS.literal(value, dtype),
)

#: Types of elements in memory, by which ``load`` and ``store`` convert them.
_IN_MEMORY: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {**NUMBERS.types, torch.float16: "float16", torch.bfloat16: "bfloat16"}
)

_UPDATE: Final = """\
static void update(
    {columns}, const float* __restrict scalars, const float of_step, const int32_t of_tensor, const int64_t start,
    const int64_t end
) {{
    const F multiplier = same<F>(of_step);
    const I key = same<I>(of_tensor);
    {numbers}
    for (int64_t row = start; row < end; row += {row}) {{
        const int64_t count = row + {row} < end ? {row} : end - row, groups = (count + {group} - 1) / {group};
        {rows}
        {loops}
    }}
}}

extern "C" void kernel(
    const int64_t* addresses, const int64_t* rows, const int32_t* chunks, int64_t count, int64_t size,
    const float* scalars, const float* multiplier, const bool* found_inf, const int32_t* keys, int64_t threads
) {{
    if (*found_inf) return;
    #pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t chunk = 0; chunk < count; ++chunk) {{
        const int64_t tensor = chunks[2 * chunk], start = chunks[2 * chunk + 1] * size;
        const int64_t* row = rows + tensor * {width};
        const int64_t end = start + size < row[0] ? start + size : row[0];
        update({pointers}, scalars, *multiplier, {key}, start, end);
    }}
}}
"""

#: A loop over a row's elements or groups. ``at`` counts spans, which are vectors, or groups of elements: what is known
#: of a group is spread over a vector before the loop over its elements. The last span may not be full.
_LOOP: Final = """\
{{
            I {order} = int32_t(row) + lanes();
            int64_t at = 0, i = 0;
            for (; at < {count} / {span}; ++at) {{
                constexpr int n = W;
                {before}
#pragma GCC unroll 4
                for (int part = 0; part < {span} / W; ++part, i += W, {order} += W) {{
                    {lines}
                }}
                {after}
            }}
            if (i < {count}) {{
                {before}
                for (; i < {count}; i += W, {order} += W) {{
                    const int n = {count} - i < W ? int({count} - i) : W;
                    {lines}
                }}
                {after}
            }}
        }}"""

_NORM: Final = """\
extern "C" void kernel(
    const int64_t* addresses, const int64_t* lengths, const int32_t* chunks, int64_t count, int64_t size,
    double* sums, int64_t threads
) {{
    #pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t chunk = 0; chunk < count; ++chunk) {{
        const int64_t tensor = chunks[2 * chunk], start = chunks[2 * chunk + 1] * size;
        const int64_t end = start + size < lengths[tensor] ? start + size : lengths[tensor];
        const {type}* __restrict gradient_at = reinterpret_cast<const {type}*>(addresses[tensor]);
        double total = 0;
        for (int64_t row = start; row < end; row += {row}) {{
            const int64_t count = row + {row} < end ? {row} : end - row;
            float sum = 0;
            {rows}
            #pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < count; ++i) {{
                const float value = {value};
                sum += value * value;
            }}
            total += sum;
        }}
        sums[chunk] = total;
    }}
}}
"""
#: Elements that are widened, and squares that are summed in FP32, before the sums are in FP64.
ROW: Final = 1 << 10


@cache
def update_source(rule: UpdateRule, storage: Storage, dtypes: tuple[torch.dtype, ...]) -> str:
    """Write the kernel of pass 2 for tensors without gaps.

    ``kernel`` takes pointers: a gradient's address for each tensor (int64), the rows of tensors (int64: length, then
    the addresses of parts and states), the chunks (int32: tensor, number of the chunk) and how many and how long they
    are, numbers of the rule, multiplier, flag, keys (one for each tensor), and how many threads to use.

    Args:
        rule: The update rule.
        storage: How weights are stored.
        dtypes: The gradient's, then the parts' and the states'.

    Raises:
        NoKernel: The rule or the storage uses an operation that is not in the table.
    """
    names, stored, step = spelled_update(rule, storage, dtypes, CPP)
    tensors = list(zip(names, dtypes, strict=True))
    pointers = [f"{'' if name in stored else 'const '}{_IN_MEMORY[dtype]}*" for name, dtype in tensors]
    addresses = ["addresses[tensor]", *(f"row[{column}]" for column in range(1, len(names)))]
    starts = [f"row / {GROUP}" if step.places[name][0] == Of.GROUP else "row" for name in names]
    rows = [
        f"{pointer} __restrict {name}_row = {name}_at + {start};"
        for pointer, name, start in zip(pointers, names, starts, strict=True)
        if name in step.used or name in stored
    ]
    reads = [_read(name, dtype, step.places[name][0]) for name, dtype in tensors if name in step.used]
    numbers = [f"const F {number} = same<F>(scalars[{index}]);" for index, number in enumerate(rule.numbers)]
    numbers += [line.text for line in step.lines if line.of == Of.STEP]
    return (
        headers(())
        + VECTORS
        + _UPDATE.format(
            columns=", ".join(f"{pointer} __restrict {name}_at" for pointer, name in zip(pointers, names, strict=True)),
            numbers=_lines(4, *numbers),
            rows=_lines(8, *rows),
            loops=_loops([*reads, *step.lines]),
            row=ROW,
            group=GROUP,
            width=len(names),
            pointers=", ".join(
                f"reinterpret_cast<{pointer}>({address})" for pointer, address in zip(pointers, addresses, strict=True)
            ),
            key="keys[tensor]" if "key" in step.used else "0",
        )
    )


def _read(name: str, dtype: torch.dtype, of: Of) -> Line:
    """Return the line that reads the values of a name, in the first phase."""
    vector = "F" if dtype.is_floating_point else "I"
    return Line(f"const {vector} {name} = load({name}_row + i, n);", of, 0, name, vector)


def _loops(lines: Sequence[Line]) -> str:
    """Write the loops over a row: for each phase one over its groups and one over its elements.

    A value that one loop computes and a later one reads goes through an array, ``all_NAME``; but a value that takes one
    operation on values that are read anyway is computed again. The loop over elements leaves a group's largest in each
    lane of a vector, in ``lanes_NAME``: the next loop over groups begins with the largest of those, of many groups at
    once.
    """
    largest = [line for line in lines if line.of == Of.LARGEST]
    computed = [replace(line, of=Of.GROUP, text=_LARGEST.format(name=line.name), reads=()) for line in largest]
    computed += [line for line in lines if line.of in (Of.GROUP, Of.ELEMENT)]
    loops = [
        _Loop(
            of,
            [line for line in computed if (line.phase, line.of) == (phase, of)],
            [line for line in largest if (line.phase - 1, Of.ELEMENT) == (phase, of)],
        )
        for phase, of in sorted({(line.phase, line.of) for line in computed})
    ]
    read = {line.name for loop in loops for line in loop.read_from(computed)}
    arrays = [
        f"alignas(64) {_VALUES[line.type]} all_{line.name}[{ROW if line.of == Of.ELEMENT else ROW // GROUP}];"
        for line in computed
        if line.name in read
    ]
    arrays += [f"alignas(64) int32_t lanes_{line.name}[W * {ROW // GROUP}];" for line in largest]
    return _lines(8, *arrays, *(loop.text(computed, read) for loop in loops))


#: The types of the values of vectors in an array.
_VALUES: Final = {"F": "float", "I": "int32_t"}
_LARGEST: Final = "const I {name} = largest<W>(lanes_{name} + W * i);"


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop over a row.

    Args:
        of: Whether it runs over groups or elements.
        lines: The lines that it computes.
        largest: The lines whose values it reduces to the largest of a group.
    """

    of: Of
    lines: list[Line]
    largest: list[Line]

    def inputs(self, computed: Sequence[Line]) -> list[Line]:
        """Return the lines of earlier loops whose values it reads."""
        names = {name for line in (*self.lines, *self.largest) for name in line.reads}
        return [line for line in computed if line.name in names and line not in self.lines]

    def again(self, computed: Sequence[Line]) -> list[Line]:
        """Return the inputs that it computes again: those that one operation makes of other inputs."""
        inputs = self.inputs(computed)
        names = {line.name for line in inputs}
        return [line for line in inputs if line.reads and names.issuperset(line.reads)]

    def read_from(self, computed: Sequence[Line]) -> list[Line]:
        """Return the inputs that it reads from arrays."""
        again = self.again(computed)
        return [line for line in self.inputs(computed) if line not in again]

    def text(self, computed: Sequence[Line], read: Collection[str]) -> str:
        """Write the loop.

        Args:
            computed: The lines of all loops.
            read: The names that loops read from arrays.
        """
        inputs = self.read_from(computed)
        of_groups = [line for line in inputs if line.of < self.of]
        before = [f"const {line.type} {line.name} = same<{line.type}>(all_{line.name}[at]);" for line in of_groups]
        lines = [f"const {line.type} {line.name} = read(all_{line.name} + i);" for line in inputs if line.of == self.of]
        lines += [line.text for line in (*self.again(computed), *self.lines, *self.largest)]
        lines += [f"write(all_{line.name} + i, {line.name});" for line in self.lines if line.name in read]
        return _LOOP.format(
            order=ORDER,
            count="count" if self.of == Of.ELEMENT else "groups",
            span=GROUP if of_groups or self.largest else "W",
            before=_lines(16, *before, *(f"I {line.name} = {{}};" for line in self.largest)),
            lines=_lines(20, *lines),
            after=_lines(16, *(f"write(lanes_{line.name} + W * at, {line.name});" for line in self.largest)),
        )


def _lines(indent: int, *lines: str) -> str:
    return f"\n{indent * ' '}".join(lines)


@cache
def norm_source(dtype: torch.dtype) -> str:
    """Write the kernel of pass 1 for gradients of a dtype.

    ``kernel`` takes pointers to addresses and lengths of tensors (int64), to the chunks (as :func:`update_source`), and
    to the sums of each chunk's squares (float64), which it writes and which no number of threads changes.
    """
    row = f"const {NUMBERS.types[dtype]}* __restrict gradient_row = gradient_at + row;"
    if dtype == torch.float16:
        row = f"alignas(64) float gradient_row[{ROW}]; widen(gradient_at + row, gradient_row, count);"
    value = NUMBERS.widened.get(dtype, "{0}").format("gradient_row[i]")
    return headers((dtype,)) + _NORM.format(type=NUMBERS.types[dtype], value=value, rows=row, row=ROW)
