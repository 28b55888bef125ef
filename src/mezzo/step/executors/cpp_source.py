"""C++ source of both passes: pass 2 from its one pure function (:mod:`.source`), pass 1 as it stands here.

Plain loops over elements, which compilers turn into vector instructions; no header of torch's, so that they compile in
a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Final

import torch

from mezzo.emit.cpp import CPP as LANGUAGE
from mezzo.emit.cpp import headers
from mezzo.emit.tracing import Dialect, Line, Of
from mezzo.step.executors.source import ORDER, written
from mezzo.step.moments import GROUP
from mezzo.step.storage import Storage
from mezzo.step.update import UpdateRule

#: Loops over a row, one after another: over its elements; and where those come in groups, over the groups, and over the
#: elements of each for its largest. What one loop makes and another one reads lies in an array in between, and what a
#: group has lies there once for each element: so all loops are long.
_OVER_ELEMENTS: Final = """\
#pragma omp simd
        for (int32_t i = 0; i < int32_t(count); ++i) {{
            {lines}
        }}"""

_OVER_GROUPS: Final = """\
#pragma omp simd
        for (int64_t at = 0; at < groups; ++at) {{
            const int64_t group = row / {group} + at;
            {lines}
        }}"""

_SPREAD: Final = """\
for (int64_t at = 0; at < groups; ++at)
            for (int64_t i = {group} * at; i < {group} * at + {group}; ++i) each_{name}[i] = all_{name}[at];"""

_LARGEST: Final = """\
for (int64_t i = count; i < {group} * groups; ++i) all_{{value}}[i] = 0;
        for (int64_t at = 0; at < groups; ++at) {{{{
            {{type}} largest = 0;
            for (int64_t i = {group} * at; i < {group} * at + {group}; ++i)
                largest = all_{{value}}[i] > largest ? all_{{value}}[i] : largest;
            all_{{name}}[at] = largest;
        }}}}"""

#: C++ that walks over rows.
CPP: Final[Dialect] = replace(
    LANGUAGE,
    stored="{target}_row[i] = {value};",
    stored_of_group="{target}_at[group] = {value};",
    largest=_LARGEST.format(group=GROUP),
    spread="{0}",
)

#: What elements that go through a row of others are there.
_BUFFERED: Final[Mapping[torch.dtype, str]] = MappingProxyType({torch.float16: "float"})

_UPDATE: Final = """\
static void update(
    {columns}, const float* __restrict scalars, const float multiplier, const int32_t key, const int64_t start,
    const int64_t end
) {{
    {numbers}
    for (int64_t row = start; row < end; row += {row}) {{
        const int64_t count = row + {row} < end ? {row} : end - row;
        {rows}
        {loops}
        {stores}
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

_ORDER: Final = f"const int32_t {ORDER} = int32_t(row) + i;"

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


def _row(name: str, dtype: torch.dtype, *, read: bool = True, constant: bool = False) -> str:
    """Write where a row's elements are found: in memory, or widened."""
    if dtype not in _BUFFERED:
        return f"{'const ' if constant else ''}{CPP.types[dtype]}* __restrict {name}_row = {name}_at + row;"
    buffer = f"alignas(64) {_BUFFERED[dtype]} {name}_row[{ROW}];"
    return f"{buffer} widen({name}_at + row, {name}_row, count);" if read else buffer


@cache
def update_source(rule: UpdateRule, storage: Storage, dtypes: tuple[torch.dtype, ...]) -> str:
    """Write the kernel of pass 2 for tensors without gaps.

    ``kernel`` takes pointers: a gradient's address for each tensor (int64), the rows of tensors (int64: length, then
    the addresses of parts and states), the chunks (int32: tensor, number of the chunk) and how many and how long they
    are, numbers of the rule, multiplier, flag, keys (one for each tensor), and how many threads to use.

    Args:
        rule: What to do.
        storage: How weights are stored.
        dtypes: The gradient's, then the parts' and the states'.

    Raises:
        NoKernel: The rule or the storage uses an operation that is not in the table.
    """
    names, stored, step = written(rule, storage, dtypes, CPP)
    types = ["const " * (name not in stored) + CPP.types[dtype] for name, dtype in zip(names, dtypes, strict=True)]
    places = ["addresses[tensor]", *(f"row[{place}]" for place in range(1, len(types)))]
    operands = list(zip(names, dtypes, strict=True))
    of_elements = [(name, dtype) for name, dtype in operands if step.places[name][0] == Of.ELEMENT]
    rows = [
        _row(name, dtype, read=name in step.used, constant=name not in stored)
        for name, dtype in of_elements
        if name in step.used or name in stored
    ]
    buffered = [name for name, dtype in of_elements if dtype in _BUFFERED and name in stored]
    lines = [_read(name, dtype, step.places[name][0]) for name, dtype in operands if name in step.used]
    numbers = [f"const float {number} = scalars[{place}];" for place, number in enumerate(rule.numbers)]
    numbers += [line.text for line in step.lines if line.of == Of.STEP]
    return headers(dtypes) + _UPDATE.format(
        columns=", ".join(f"{kind}* __restrict {name}_at" for kind, name in zip(types, names, strict=True)),
        numbers="\n    ".join(numbers),
        rows="\n        ".join(rows),
        loops=_loops([*lines, *step.lines]),
        stores="\n        ".join(f"narrow({name}_row, {name}_at + row, count);" for name in buffered),
        row=ROW,
        width=len(types),
        pointers=", ".join(f"reinterpret_cast<{kind}*>({place})" for kind, place in zip(types, places, strict=True)),
        key="keys[tensor]" if "key" in step.used else "0",
    )


def _read(name: str, dtype: torch.dtype, of: Of) -> Line:
    """Write where the value of a name is read, in the first phase."""
    kind = _BUFFERED.get(dtype, CPP.types[dtype])
    place = f"{name}_row[i]" if of == Of.ELEMENT else f"{name}_at[group]"
    return Line(f"const {kind} {name} = {place};", of, 0, name, kind)


def _loops(lines: Sequence[Line]) -> str:
    """Write the loops over a row: one for each phase and for what lines are of, in this order.

    What a loop makes and a later one reads goes through an array: ``all_NAME`` has it for each element, or for each
    group, and ``each_NAME`` a group's for each of its elements.
    """
    keys = sorted({(line.phase, line.of) for line in lines if line.of != Of.STEP})
    loops = {key: [line for line in lines if (line.phase, line.of) == key] for key in keys}
    made = {line.name: line for line in lines if line.name}
    reads = {key: {made[name] for line in loop for name in line.reads if name in made} for key, loop in loops.items()}
    kept = [line for line in lines if any(line in reads[key] and line not in loops[key] for key in keys)]
    spread = [line for line in kept if any(line in reads[key] for key in keys if line.of < key[1] == Of.ELEMENT)]
    arrays, text = [], []
    for line in kept:
        size = ROW if line.of == Of.ELEMENT else ROW // GROUP
        arrays += [f"alignas(64) {line.type} all_{line.name}[{size}];"]
        arrays += [f"alignas(64) {line.type} each_{line.name}[{ROW}];"] if line in spread else []
    for (phase, of), loop in loops.items():
        taken = [line for line in kept if line in reads[phase, of] and line not in loop]
        body = [f"const {line.type} {line.name} = {_place(line, of)};" for line in taken]
        body += [line.text for line in loop]
        body += [f"{_place(line, of)} = {line.name};" for line in loop if line in kept]
        if of == Of.LARGEST:  # a whole loop each
            text += [line.text for line in loop]
        elif of == Of.GROUP:
            text.append(_OVER_GROUPS.format(group=GROUP, lines=_lines(12, *body)))
        else:
            text.append(_OVER_ELEMENTS.format(lines=_lines(12, _ORDER, *body)))
        text += [_SPREAD.format(group=GROUP, name=line.name) for line in loop if line in spread]
    groups = [f"const int64_t groups = (count + {GROUP - 1}) / {GROUP};"] if len(loops) > 1 else []
    return _lines(8, *groups, *arrays, *text)


def _place(line: Line, of: Of) -> str:
    """Write where a loop finds what another loop made."""
    if of == Of.ELEMENT:
        return f"{'all' if line.of == Of.ELEMENT else 'each'}_{line.name}[i]"
    return f"all_{line.name}[at]"


def _lines(indent: int, *lines: str) -> str:
    return f"\n{indent * ' '}".join(lines)


@cache
def norm_source(dtype: torch.dtype) -> str:
    """Write the kernel of pass 1 for gradients of a dtype.

    ``kernel`` takes pointers to addresses and lengths of tensors (int64), the chunks (as :func:`update_source`), and
    where to put the sum of each chunk's squares (float64), which depends on no number of threads.
    """
    value = CPP.widened.get(dtype, "{0}").format("gradient_row[i]")
    rows = _row("gradient", dtype, constant=True)
    return headers((dtype,)) + _NORM.format(type=CPP.types[dtype], value=value, rows=rows, row=ROW)
