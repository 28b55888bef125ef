"""What is added to torch's errors about dtypes: which two tensors meet, in which module, under which rule."""

from __future__ import annotations

import ast
import linecache
import opcode
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from mezzo.errors import PolicyError, message
from mezzo.policy import Policy
from mezzo.policy.rules import both
from mezzo.tensors import LOW, described, dtype_name

#: How torch says that operands differ in dtype.
_TWO_DTYPES: Final = (
    "same dtype", "should be the same", "mixed dtype", "expected scalar type", "match weight dtype", "dtypes match",
    "to be equal to src.dtype", "expected dtype", "have the same type", "same scalar type", "dtypes must be the same",
    "Found dtype", "Type promoting not supported", "not match input dtype", "to have scalar type", "different dtypes",
    "Expected object of scalar type", "Float did not match", "did not match Float",
)  # fmt: skip
#: How it says that there is no kernel for a dtype.
_NO_KERNEL: Final = (
    "not implemented for", "Unsupported dtype", "powers of two when computing in half", "is only supported for",
    "dtypes not supported", "inputs to be Half, Float or Double", "doesn't support tensors of type",
    "doesn't handle types other than", "more dimensions of float", "must be either float or double",
    "complex tensor, but got", "integer tensors, but got",
)  # fmt: skip
#: What gives numbers of the same dtype, some or all of those that are there.
_SAME: Final = frozenset("clone detach contiguous t view reshape permute transpose unsqueeze squeeze expand".split())
_LIBRARIES: Final = tuple(
    str(Path(place).parent) for place in (torch.__file__, __file__.rpartition("/cast/")[0] + "/x")
)


#: What to write where a parameter is not the one that was stored low.
_LATE: Final = (
    "mezzo.prepare, or the session, after the model got that parameter;\n"
    "or dict(model.named_parameters()) as what functional_call is given"
)


class _Operand(NamedTuple):
    text: str  # how the program writes it
    tensor: Tensor | None  # none of what is computed in place


def explain(
    error: BaseException, model: nn.Module, policy: Policy, stored: Container[Tensor], written: Container[Tensor] = ()
) -> None:
    """Add a note to an error of torch's about dtypes, once.

    Args:
        error: Any exception.
        model: The model that it left.
        policy: The model's policy, under which weights are low.
        stored: The tensors of the model that are stored as it says.
        written: Buffers that are FP32 since a forward pass writes them.
    """
    if not isinstance(error, RuntimeError | ValueError | TypeError):
        return
    text = str(error)
    differ, lacks = (any(words in text for words in those) for those in (_TWO_DTYPES, _NO_KERNEL))
    if not (differ or lacks) or any(note.startswith("mezzo: ") for note in getattr(error, "__notes__", ())):
        return
    paths = {id(module): path for path, module in model.named_modules()}
    program = [*_program(error.__traceback__, paths)]
    operands = [*_operands(program[-1])] if program else []
    known = [(each.text, each.tensor) for each in operands if each.tensor is not None]
    computed = [each.text for each in operands if each.tensor is None]
    lows = [text for text, tensor in known if tensor.dtype in LOW]
    wides = [text for text, tensor in known if tensor.dtype == torch.float32]
    if lacks:
        lows, wides = lows or computed[:1], []
    elif lows:
        lows, wides = lows[:1], wides or computed[:1]
    elif wides:
        lows = computed[:1]
    elif "Complex" not in text:
        wides = computed
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    where = [*map(_line, program[-1:])]
    told = {*lows, *wides}
    where += [_described(text, tensor, names, policy, written) for text, tensor in known if text in told]
    path = next((paths[id(module)] for at in reversed(program) if id(module := _first(at)) in paths), None)
    where += [f"{text} is computed there, in another dtype" for text in computed if text in told]
    if path is not None:
        where.append(f"in {path or 'the model itself'}, of which {_rule(policy, path)}")
    low = dtype_name(policy.param_dtype)
    what = f"torch has no kernel in {low} for this" if lacks else f"float32 and {low} meet in one function"
    why = f"under {policy.level} modules cast what they take in to the dtype of their weights, {low}, and give that out"
    why += "" if lacks else "; a function takes what it is given"
    widened = next((names[id(tensor)] for _, tensor in known if tensor in written and id(tensor) in names), "")
    if program and wides and (widened or wides[0] == _written(program[-1])):  # what is summed there stays FP32
        wides, lows = lows or computed[:1], wides
    is_backward = bool(program) and program[-1].tb_frame.f_code.co_name == "backward"  # where nothing is cast
    op = _op(program[-1]) if program and not is_backward else ""
    others = {id(param) for param in model.parameters() if param not in stored}
    is_late = any(id(tensor) in others and text in wides for text, tensor in known)
    alone = [tensor for _, tensor in known if tensor.dtype in LOW] if not computed else []
    is_buffer = len(alone) == 1 and id(alone[0]) in names and not isinstance(alone[0], nn.Parameter)
    buffer = names[id(alone[0])] if is_buffer else ""
    cures = [_LATE] if is_late else []
    cures += _cures(policy, path, [] if is_late else wides, lows, lacks=lacks, widened=widened, buffer=buffer, op=op)
    cures = cures or ["x.float()" if lacks else f"x.to({policy.param_dtype})"]
    error.add_note(message(f"mezzo: {what}", where="\n".join(where), why=why, write=";\nor ".join(cures)))


def _cures(
    policy: Policy,
    path: str | None,
    wides: Sequence[str],
    lows: Sequence[str],
    *,
    lacks: bool,
    widened: str,
    buffer: str,
    op: str,
) -> Iterator[str]:
    if lacks and lows:
        yield ", ".join(f"{low}.float()" for low in lows)
    elif wides and not lacks:
        yield ", ".join(f"{wide}.to({f'{lows[0]}.dtype' if lows else policy.param_dtype})" for wide in wides)
    if widened:
        yield f"{both(f'low_param={widened}')}: keeps it in 16 bits, if it is assigned and never summed"
    if buffer:
        yield f"{both(f'fp32_param={buffer}')}: stores it in float32"
    if path:
        yield f"{both(f'fp32_module={path}')}: computes there in float32"
    if not policy.autocast and not lacks and _is_cast(op, policy):
        yield f"{both('autocast=true')}: casts at each op, as O1 does"


def _is_cast(op: str, policy: Policy) -> bool:
    """Whether O1 would cast what an op is given; nothing is cast for what writes in place."""
    try:
        return not op.endswith("_") and policy.evolve(autocast=True).explain(op).treatment != "native"
    except PolicyError:
        return False


def _rule(policy: Policy, path: str) -> str:
    rule = policy.module_rule(path)
    return f"the rule {rule} speaks" if rule is not None else f"no rule speaks: the level {policy.level} holds"


def _described(text: str, tensor: Tensor, names: dict[int, str], policy: Policy, written: Container[Tensor]) -> str:
    name = names.get(id(tensor))
    whose = "" if name is None else f", the model's {name}"
    whose += ", in float32 since a forward pass writes it" if tensor in written else ""
    if name is not None and (rule := policy.storage(name, name.rpartition(".")[0])[1]) is not None:
        whose += f", stored so by {rule}"
    return f"{text} is {described(tensor)}{whose}"


# The failing line ------------------------------------------------------------------------------------------


def _program(traceback: TracebackType | None, paths: Container[int]) -> Iterator[TracebackType]:
    """Yield the frames of the program's own and of the model's modules, the innermost last.

    Args:
        traceback: Where it failed.
        paths: The modules, by ``id``.
    """
    while traceback is not None:
        is_library = traceback.tb_frame.f_code.co_filename.startswith(_LIBRARIES)
        if not is_library or (traceback.tb_frame.f_code.co_name == "forward" and id(_first(traceback)) in paths):
            yield traceback
        traceback = traceback.tb_next


def _first(at: TracebackType) -> Any:
    """Return the first argument of a frame's function: ``self``, as most call it."""
    names = at.tb_frame.f_code.co_varnames[:1]
    return at.tb_frame.f_locals.get(names[0]) if names else None


def _expression(at: TracebackType) -> str:
    """Return the source of the expression that a frame was computing."""
    code = at.tb_frame.f_code
    first, last, begin, end = [*code.co_positions()][at.tb_lasti // 2]
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    if not lines:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")


def _node(at: TracebackType) -> ast.expr | None:
    try:
        return ast.parse(_expression(at).strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _stored(at: TracebackType, node: ast.AST | None) -> ast.expr | None:
    """Return what a failing line stores in a part of a tensor, as ``out[index] = value`` does."""
    code = at.tb_frame.f_code
    if not isinstance(node, ast.Subscript) or code.co_code[at.tb_lasti] != opcode.opmap["STORE_SUBSCR"]:
        return None
    line, _, column, _ = [*code.co_positions()][at.tb_lasti // 2]
    try:
        source = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):  # it was written to since
        return None
    for each in ast.walk(source):
        if isinstance(each, ast.Assign):
            for target in each.targets:
                if isinstance(target, ast.Subscript) and (target.lineno, target.col_offset) == (line, column):
                    return each.value
    return None


def _written(at: TracebackType) -> str:
    """Return what a failing call writes in place."""
    node = _node(at)
    if isinstance(node, ast.Subscript) and _stored(at, node) is not None:
        return ast.unparse(node.value)
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")
    return ast.unparse(node.func.value) if is_method else ""  # type: ignore[union-attr]


def _op(at: TracebackType) -> str:
    """Return the name of the function that has failed."""
    node = _node(at)
    if isinstance(node, ast.BinOp):
        return "matmul" if isinstance(node.op, ast.MatMult) else ""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return "" if ".sparse." in name else name.rpartition(".")[2]  # torch's autocast leaves those alone


def _operands(at: TracebackType) -> Iterator[_Operand]:
    """Yield the floating tensors that a failing call or product is given, and what is computed in its place."""
    node = _node(at)
    given: list[ast.expr] = []
    if isinstance(node, ast.Call):
        method = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        given = [*method, *node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.BinOp):
        given = [node.left, node.right]
    elif isinstance(node, ast.Subscript) and (stored := _stored(at, node)) is not None:
        given = [node.value, stored]
    given = [part for each in given for part in (each.elts if isinstance(each, ast.List | ast.Tuple) else [each])]
    for each in given:
        value = _value(each, at.tb_frame)
        if isinstance(value, Tensor) and value.is_floating_point():
            yield _Operand(ast.unparse(each), value)
        elif value is None and isinstance(each, ast.Call | ast.BinOp | ast.Subscript | ast.Attribute):
            text = ast.unparse(each)
            yield _Operand(f"({text})" if isinstance(each, ast.BinOp) else text, None)


def _value(node: ast.AST, frame: FrameType) -> Any:
    """Look a name, or an attribute of one, up as it stands; nothing is called."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        if isinstance(owner, nn.Module):
            every = (vars(owner), owner._parameters, owner._buffers, owner._modules)
            return next((names[node.attr] for names in every if node.attr in names), None)
        if isinstance(owner, Tensor) and node.attr in ("T", "mT", "data"):
            return getattr(owner, node.attr)
        if isinstance(owner, ModuleType):
            return owner
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME:
        return _value(node.func.value, frame)  # the same numbers
    return None


def _line(at: TracebackType) -> str:
    place = at.tb_frame.f_code.co_filename
    line = linecache.getline(place, at.tb_lineno).strip()
    return f"{Path(place).name}:{at.tb_lineno}" + (f": {line}" if line else "")
