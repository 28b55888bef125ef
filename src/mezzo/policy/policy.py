"""``Policy``: one frozen value that says what precision everything gets."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import torch

from mezzo.errors import PolicyError, raise_together, shown
from mezzo.policy import fields
from mezzo.policy.fields import Level
from mezzo.policy.ops import MOVES, OPS, QUANTISED, VIEWS, Op, Treatment, out_of_place, resolve, written_form
from mezzo.policy.rules import Decision, Rule, both, format_rules
from mezzo.scale import LossScale
from mezzo.tensors import DTYPES, dtype_name

Lists = Literal["portable", "device"]
Norms = Literal["fp32", "fp32_math"]
#: How an op is carried out that writes into tensors which keep their dtype: :meth:`Policy.written`.
Written = Literal["left", "follows", "treated"]

#: The kinds of device that the table tells apart, and how they are called where none is asked about.
_KINDS: Final = {"cpu": "a CPU", "cuda": "an accelerator"}
_DECIDERS: Final[dict[Lists, str]] = {"portable": "op table", "device": "lists=device"}
_AS_IN: Final[dict[Treatment, str]] = {
    "native": "left to torch, as in torch.amp",
    "fp32_math": "FP32 inside, the input's dtype out",
    "promote": "promoted, as in torch.amp",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What precision each op, module and parameter gets, as one value.

    Make one with a level, ``Policy.O1("bfloat16")``, or from text, ``Policy.parse("O1,dtype=bfloat16")``; the
    constructor itself takes every field resolved. Policies compare by value and print as text that parses back.

    Attributes:
        level: ``O0`` … ``O3``, the defaults this policy started from.
        dtype: What low-precision ops compute in; ``float32`` only in O0.
        param_dtype: What parameters are to everybody, where no rule says otherwise: ``dtype`` in O3, else FP32.
        output_dtype: What the model's floating outputs are cast to; ``None`` leaves them.
        keep_batchnorm_fp32: Whether norms with running statistics keep FP32 weights in O3; in O2 theirs are too small
            for halves.
        loss_scale: How the loss is scaled; :meth:`LossScale.none` when it is not.
        lists: ``portable`` gives torch's CUDA dtypes on every device, and sums in FP32 inside products; ``device``
            torch's own behaviour on each.
        norms: Whether softmax and normalisations return FP32 (``fp32``) or the input's dtype (``fp32_math``).
        emulate: Whether products compute in FP32 from rounded operands; ``auto`` follows the device, family by family.
        fp8_recipe: How operands under ``fp8`` are scaled: ``tensorwise``, each by its largest value now; ``rowwise``,
            each row by a power of two; ``delayed``, each by the largest value of the steps before.
        fp8_history: Of how many steps ``delayed`` keeps the largest values.
        fp8_amax: Whether ``delayed`` takes the ``max`` of them or the ``latest``.
        low_products: Which products of a weight under ``fp8``, ``mxfp8`` or ``nvfp4`` stay in ``dtype`` all the same:
            none, ``wgrad`` (the weight's gradient) or ``forward``.
        nvfp4_tricks: What ``nvfp4`` does beside rounding, of ``rht+stochastic+2d``, or ``none``.
        rules: Exceptions, in order; the first match wins.

    Raises:
        PolicyError: A value outside its vocabulary, or a combination that cannot be carried out.

    Example:
        >>> policy = Policy.O1("bfloat16").low("softmax").keep_fp32(modules=["head"])
        >>> print(policy)
        O1,dtype=bfloat16,fp32_module=head,low=softmax
        >>> Policy.parse(str(policy)) == policy
        True
        >>> policy.explain("softmax").treatment
        'low'

    References:
        Micikevicius et al., *Mixed Precision Training*, ICLR 2018; the levels are those of NVIDIA's apex.amp.
    """

    level: Level
    dtype: torch.dtype
    param_dtype: torch.dtype
    output_dtype: torch.dtype | None
    keep_batchnorm_fp32: bool
    loss_scale: LossScale
    lists: Lists = "portable"
    norms: Norms = "fp32"
    emulate: Literal["auto"] | bool = "auto"
    fp8_recipe: Literal["tensorwise", "rowwise", "delayed"] = "tensorwise"
    fp8_history: int = 1024
    fp8_amax: Literal["max", "latest"] = "max"
    low_products: Literal["none", "wgrad", "forward"] = "none"
    nvfp4_tricks: str = "rht+stochastic+2d"
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        values = self._values()
        raise_together([*fields.wrong_values(values)] or [*fields.impossible_combinations(values)])

    # Levels -----------------------------------------------------------------------------------------

    @classmethod
    def O0(cls, **overrides: Any) -> Self:
        """FP32 throughout: the reference every other level is compared with."""
        return cls(**fields.resolved("O0", overrides))

    @classmethod
    def O1(cls, dtype: str | torch.dtype = "float16", **overrides: Any) -> Self:
        """FP32 weights; each op cast by the op table. The level to start with."""
        return cls(**fields.resolved("O1", {"dtype": dtype, **overrides}))

    @classmethod
    def O2(cls, dtype: str | torch.dtype = "float16", **overrides: Any) -> Self:
        """O1 with weights stored in two halves: one of 16 bits, which products read, and the rest of FP32."""
        return cls(**fields.resolved("O2", {"dtype": dtype, **overrides}))

    @classmethod
    def O3(cls, dtype: str | torch.dtype = "float16", **overrides: Any) -> Self:
        """Low precision throughout, what ``model.to(dtype)`` computes: the speed to aim for, not a way to train."""
        return cls(**fields.resolved("O3", {"dtype": dtype, **overrides}))

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def evolve(self, **overrides: Any) -> Self:
        """Return a policy with some fields replaced; dtypes and loss scales may be given as text.

        Raises:
            PolicyError: An unknown field, or as the constructor.
        """
        return dataclasses.replace(self, **fields.replaced(overrides))

    @property
    def casts(self) -> bool:
        """Whether ops are cast one by one from the op table."""
        return self.level in ("O1", "O2")

    @property
    def halves(self) -> bool:
        """Whether weights are stored in halves, where no rule says otherwise: FP32 to everybody, low to products."""
        return self.level == "O2"

    # Rules ------------------------------------------------------------------------------------------

    def low(self, *ops: str) -> Self:
        """Run these ops in ``dtype``. The new rules come first, as for every builder below."""
        return self._on_ops("low", ops)

    def fp32(self, *ops: str) -> Self:
        """Run these ops in FP32 and return FP32."""
        return self._on_ops("fp32", ops)

    def fp32_math(self, *ops: str) -> Self:
        """Run these ops in FP32 and return their input's dtype."""
        return self._on_ops("fp32_math", ops)

    def promote(self, *ops: str) -> Self:
        """Run these ops in the widest of their inputs' dtypes."""
        return self._on_ops("promote", ops)

    def native(self, *ops: str) -> Self:
        """Run these ops in the dtypes they are given, without a cast."""
        return self._on_ops("native", ops)

    def ban(self, *ops: str) -> Self:
        """Refuse these ops with an error."""
        return self._on_ops("ban", ops)

    def fp8(self, *ops: str, modules: Any = (), params: Any = ()) -> Self:
        """Compute products of weights from operands in FP8: E4M3, and E5M2 for gradients.

        Args:
            *ops: Of ``linear``, ``addmm``, ``mm`` and ``matmul``, wherever they run.
            modules: Globs on module paths, or one of them: their products. The first and the last layer of a model stay
                in ``dtype`` unless a glob other than ``*`` names them.
            params: Globs on parameter paths, or one of them: products that read them.

        Example:
            >>> print(Policy.O2("bfloat16").fp8(modules=["blocks.*"]))
            O2,dtype=bfloat16,fp8_module=blocks.*
        """
        return self._on_products("fp8", ops, modules, params)

    def mxfp8(self, *ops: str, modules: Any = (), params: Any = ()) -> Self:
        """Compute products of weights from operands in MXFP8, E4M3 in blocks of 32; as :meth:`fp8`."""
        return self._on_products("mxfp8", ops, modules, params)

    def nvfp4(self, *ops: str, modules: Any = (), params: Any = ()) -> Self:
        """Compute products of weights from operands in NVFP4, four bits in blocks of 16; as :meth:`fp8`."""
        return self._on_products("nvfp4", ops, modules, params)

    def _on_products(self, treatment: Treatment, ops: tuple[str, ...], modules: Any, params: Any) -> Self:
        modules, params = ([globs] if isinstance(globs, str) else globs for globs in (modules, params))
        rules = [Rule(treatment, op=op) for op in ops]
        rules += [
            *(Rule(treatment, module=glob) for glob in modules),
            *(Rule(treatment, param=glob) for glob in params),
        ]
        if not rules:
            raise PolicyError(f"{treatment}() names nothing", write=both(f"{treatment}_module=blocks.*"))
        return self._first(rules)

    def keep_fp32(self, *, modules: Any = (), params: Any = ()) -> Self:
        """Keep modules and parameters in FP32: what they store, and every op that uses it.

        Args:
            modules: Globs on module paths, such as ``["head", "blocks.*.norm"]``, or one of them.
            params: Globs on parameter paths, such as ``["*.scale"]``, or one of them; buffers match too.
        """
        modules, params = ([globs] if isinstance(globs, str) else globs for globs in (modules, params))
        return self._first(
            [*(Rule("fp32", module=glob) for glob in modules), *(Rule("fp32", param=glob) for glob in params)]
        )

    def _on_ops(self, treatment: Treatment, ops: tuple[str, ...]) -> Self:
        if not ops:
            raise PolicyError(f"{treatment}() names no op", write=both(f"{treatment}=softmax"))
        return self._first(Rule(treatment, op=op) for op in ops)

    def _first(self, rules: Any) -> Self:
        first = tuple(rules)
        selectors = {rule.selector for rule in first}
        # An older rule on exactly the same thing can never win again.
        remaining = (rule for rule in self.rules if rule.selector not in selectors)
        return dataclasses.replace(self, rules=(*first, *remaining))

    def explain(self, op: str, module: str | None = None, *, device_type: str | None = None) -> Decision:
        """Return the treatment of an op, and why.

        Args:
            op: Any spelling of the op's name.
            module: Path of the module it runs in.
            device_type: The device it runs on. When omitted the answer is that of the policy's lists (of the current
                accelerator, else the CPU, with ``lists="device"``), and the reason names the devices where it is
                another: on an accelerator ops outside torch's CUDA lists are left to torch, most of them for want
                of a low kernel.

        Returns:
            The decision. In-place forms (``exp_``) and ``out=`` forms (``aten::exp.out``) write to a tensor that keeps
            its dtype: they compute as the op itself does, and round to that (:meth:`written`).

        Raises:
            PolicyError: No table and no rule knows the op, or torch no such device type.

        Example:
            >>> policy = Policy.O1("bfloat16", rules=[])
            >>> policy.explain("fft_rfft", device_type="cpu").treatment
            'fp32'
            >>> decision = policy.explain("fft_rfft", device_type="cuda")
            >>> decision.treatment, decision.reason
            ('native', 'no low kernel; on cuda left to torch, as in torch.amp')
            >>> policy.fp32("fft_rfft").explain("fft_rfft", device_type="cuda").treatment
            'fp32'
        """
        name = resolve(op, in_place=True)
        if (form := written_form(op, name)) is not None:
            return self._explain_form(form, name, module, device_type)
        for rule in self.rules:
            if rule.matches(op=name, module=module):
                reason = rule.reason or f"the rule {rule} matches first"
                return Decision(treatment=rule.treatment, rule=rule, reason=reason, source="policy")
        entry = OPS.get(name)
        if entry is not None and entry.is_norm and self.norms == "fp32_math":
            reason = f"{entry.reason}: FP32 inside, the input's dtype out"
            return Decision(treatment="fp32_math", rule=None, reason=reason, source="norms=fp32_math")
        if not self.casts:
            why = f"{self.level} casts no op"
            return Decision(treatment="native", rule=None, reason=why, source=f"level {self.level}")
        if entry is None:
            return Decision(treatment="native", rule=None, reason="no list names this op", source="op table")
        return _from_table(entry, device_type, lists=self.lists, norms=self.norms)

    def written(self, op: str, decision: Decision, device_type: str | None = None) -> Written:
        """Return how the in-place and ``out=`` forms of an op are carried out.

        Args:
            op: The op's base name.
            decision: The decision about the op itself.
            device_type: The device; on an accelerator the table's ops are torch's.

        Returns:
            ``treated``: computed as the op is, and rounded to the written tensor's dtype. ``follows``: the operands
            are cast to that dtype, since the op only moves them, or is a product, whose operands have one dtype.
            ``left``: to torch.
        """
        if decision.rule is not None and decision.rule.op is not None and decision.treatment not in QUANTISED:
            return "left" if decision.treatment == "native" else "treated"
        is_torchs = self.lists == "device" or (self.norms == "fp32" and _is_accelerator(device_type))
        if not self.casts or decision.treatment == "native" or is_torchs:
            return "left"
        return "follows" if decision.treatment in ("low", *QUANTISED) or op in MOVES else "treated"

    def _explain_form(self, form: str, name: str, module: str | None, device_type: str | None) -> Decision:
        """Explain an in-place or ``out=`` form by the op that returns a new tensor."""
        keeps = f"what an {form} op writes to keeps its dtype"
        op = out_of_place(name) if form == "in-place" else name
        if op is None or op in VIEWS:
            return Decision(treatment="native", rule=None, reason=keeps, source="torch")
        of_op = self.explain(op, module, device_type=device_type)
        if form == "out=" and not self.casts and of_op.rule is not None:
            why = f"{keeps}; {of_op.rule} is idle there: under {self.level} nothing tells it from compiled code's own"
            return Decision(treatment="native", rule=None, reason=why, source="torch")
        module_rule = self.module_rule(module or "")
        is_island = module_rule is not None and module_rule is of_op.rule and module_rule.treatment == "fp32"
        written: Written = "left" if is_island else self.written(op, of_op, device_type)
        gets = f"gets {of_op.treatment}: {of_op.reason}"
        if written == "left":
            also = "" if of_op.treatment == "native" else f"; {op}, which returns a new tensor, {gets}"
            return Decision(treatment="native", rule=None, reason=keeps + also, source="torch")
        here_alone = device_type is None and self.written(op, of_op, "cuda") == "left"
        note_on_cuda = f"; on {_KINDS['cuda']} {_AS_IN['native']}" * here_alone
        if written == "follows":
            reason = f"{keeps}, and what it reads is cast to that{note_on_cuda}"
            return Decision(treatment="promote", rule=None, reason=reason, source=of_op.source)
        return dataclasses.replace(
            of_op, reason=f"{keeps}, and the result is rounded to that; {op} {gets}{note_on_cuda}"
        )

    def module_rule(self, path: str) -> Rule | None:
        """Return the rule that treats a module of the model as a whole, if one does."""
        return next((rule for rule in self.rules if rule.op is None and rule.matches_module(path)), None)

    def storage(self, param: str, module: str, *, is_norm: bool = False) -> tuple[torch.dtype, Rule | None]:
        """Return the dtype that a floating parameter or buffer is stored in, and the rule that decides it.

        In O1 and O2 a low dtype is that of the high half of an FP32 parameter. Shapes are not known here: where no
        rule decides, the caller stores only parameters with two or more dimensions longer than one in halves, and no
        buffer.

        Args:
            param: Its path in the model.
            module: Path of the module that owns it.
            is_norm: Whether that module is a norm with running statistics.

        Example:
            >>> Policy.O2("bfloat16").storage("head.weight", "head")
            (torch.bfloat16, None)
            >>> Policy.O2("bfloat16").keep_fp32(modules=["head"]).storage("head.weight", "head")[0]
            torch.float32
        """
        stored = self.dtype if self.halves else self.param_dtype
        for rule in self.rules:
            pinned = (rule.matches_param(param) and rule.treatment not in QUANTISED) or (
                rule.op is None and rule.treatment in ("low", "fp32") and rule.matches_module(module)
            )
            # A module rule speaks about storage only where the level stores 16 bits at all.
            if pinned and (rule.param is not None or stored != torch.float32):
                return (self.dtype if rule.treatment == "low" else torch.float32), rule
        if is_norm and self.keep_batchnorm_fp32:
            return torch.float32, None
        return stored, None

    def product_rule(self, param: str) -> Rule | None:
        """Return the rule on a parameter that decides the format of its products, if there is one."""
        first = next((rule for rule in self.rules if rule.matches_param(param)), None)
        return first if first is not None and first.treatment in QUANTISED else None

    # Text -------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Write the level, the dtype, every field that differs from the level's, and the rules."""
        return self._text_with(fields.FIELDS)

    def region_text(self) -> str:
        """Return the text without the loss scale, which a region does not carry out."""
        return self._text_with(tuple(name for name in fields.FIELDS if name != "loss_scale"))

    def _text_with(self, names: tuple[str, ...]) -> str:
        return ",".join([*self._entries(names), *([format_rules(self.rules)] if self.rules else [])])

    def _entries(self, names: tuple[str, ...]) -> list[str]:
        values, default = self._values(), fields.level_fields(self.level, self.dtype)
        parts: list[str] = [self.level, *([] if self.level == "O0" else [f"dtype={fields.text_of(self.dtype)}"])]
        return parts + [f"{name}={fields.text_of(values[name])}" for name in names if values[name] != default[name]]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a policy from its text.

        Args:
            text: A level, then ``key=value`` for fields and rules, such as
                ``O1,bf16,low=softmax+gelu,fp32_module=head.*``. ``bf16``, ``fp16`` and ``fp32`` are words for a dtype
                wherever one stands, and one alone is ``dtype``. Without a level it is O1: ``bf16`` means ``O1,bf16``,
                as Lightning's ``bf16-mixed`` does; ``bf16-true`` means ``O3,bf16``, and ``fp32`` means ``O0``. Lines
                are entries, too, and the text behind ``#`` is the reason of the rules before it.

        Raises:
            PolicyError: Every problem of the text: unknown levels, keys and values with the nearest valid one.
        """
        if not isinstance(text, str):
            raise PolicyError(f"a policy's text is not {shown(text)}", write='Policy.parse("O1,bf16")')
        return cls(**fields.resolved(*fields.read(text)))

    @classmethod
    def of(cls, value: PolicyLike) -> Policy:
        """Return the policy that a value stands for: a policy, its text, a dtype, or the path of a file.

        A dtype means O1 in it. A string that is no policy's text, and ends in ``.policy`` or names a file, is a path.

        Raises:
            PolicyError: As :meth:`parse` and :meth:`load`; or the value is something else.
        """
        if isinstance(value, Policy):
            return value
        if isinstance(value, os.PathLike):
            return cls.load(value)
        if isinstance(value, torch.dtype) and value in DTYPES.values():
            return cls.parse(dtype_name(value))
        if isinstance(value, str):
            try:
                return cls.parse(value)
            except PolicyError:
                is_text = fields.is_opening(value.partition(",")[0].strip())
                is_path = os.path.exists(value) and os.sep in value  # of a folder, too, which `load` refuses
                if os.path.isfile(value) or is_path or (value.endswith(fields.SUFFIX) and not is_text):
                    return cls.load(value)
                raise
        raise PolicyError(
            f"a policy cannot be made from {value if isinstance(value, torch.dtype) else type(value).__name__}",
            write=f"mezzo.{both('O1,bf16')}; or the path of a policy file",
        )

    def differences(self, other: Policy) -> tuple[str, ...]:
        """List the fields in which two policies differ, as ``field: this → other``."""
        mine, theirs = self._values(), other._values()
        return tuple(
            f"{name}: {fields.text_of(value)} → {fields.text_of(theirs[name])}"
            for name, value in mine.items()
            if value != theirs[name]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the text as a file, one entry a line, each rule with its reason behind ``#``.

        Written beside and then renamed, so that no reader sees half a file.

        Args:
            path: A name that ends in ``.policy`` is told from a text wherever a policy is asked for.

        Raises:
            PolicyError: It cannot be written.
        """
        fields.save(self._entries(fields.FIELDS), self.rules, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that :meth:`save` wrote, or one written by hand: lines that are empty or comments say nothing.

        Raises:
            PolicyError: No such file, or all its wrong lines: each with its number, and the nearest key or word.
        """
        level, field_texts = fields.load(path)
        try:
            return cls(**fields.resolved(level, field_texts))
        except PolicyError as problem:
            raise PolicyError(f"policy file {shown(os.fspath(path))}: {problem}") from None


#: What a policy is given as: itself, its text, a dtype (O1 in it), or the path of a file.
PolicyLike = Policy | str | os.PathLike[str] | torch.dtype


# The op table, where no rule decides -------------------------------------------------------------------


def _from_table(entry: Op, device_type: str | None, *, lists: Lists, norms: Norms) -> Decision:
    """Decide about an op by its row.

    On an accelerator torch does by itself what the portable lists ask for, but for the ops that its CUDA lists leave
    out, most of which have no low kernel there. A region that cast them would need a function mode, and so Python for
    each op of every model; they stay torch's instead, and a rule changes that where they matter. On a CPU, where the
    mode runs anyway, they get what the table says, and ops that CUDA runs in low precision FP32 inside.

    Args:
        entry: The op's row.
        device_type: The device; when omitted the reason names the devices where the answer is another.
        lists: The policy's lists.
        norms: The policy's treatment of softmax and normalisations, which needs the mode on an accelerator too.

    Raises:
        PolicyError: torch knows no such device type.
    """
    by_device = {device: _on(entry, device, lists, norms) for device in _KINDS}
    if device_type is not None:
        treatment = by_device["cpu" if _checked(device_type) == "cpu" else "cuda"]
        differs = lists == "portable" and treatment != entry.portable
        reason = f"{entry.reason}; on {device_type} {_AS_IN[treatment]}" if differs else entry.reason
        source = "torch" if differs and treatment == "native" else _DECIDERS[lists]
        return Decision(treatment=treatment, rule=None, reason=reason, source=source)
    treatment = entry.portable if lists == "portable" else by_device[_default_kind()]
    words = _AS_IN if lists == "portable" else {}
    device_notes = [
        f"on {_KINDS[device]} {words.get(other, other)}" for device, other in by_device.items() if other != treatment
    ]
    reason = "; ".join((entry.reason, *device_notes))
    return Decision(treatment=treatment, rule=None, reason=reason, source=_DECIDERS[lists])


def _on(entry: Op, device: str, lists: Lists, norms: Norms) -> Treatment:
    if lists == "device":
        return entry.by_torch(device)
    if device == "cpu":  # which may lack a low-precision kernel that is right: same dtypes then, FP32 inside
        return "fp32_math" if entry.cpu == "fp32" and entry.portable in ("native", "promote") else entry.portable
    # On an accelerator portable means what torch does: there is no difference there.
    return entry.cuda if norms == "fp32" else entry.portable


def _is_accelerator(device_type: str | None) -> bool:
    return device_type is not None and _checked(device_type) != "cpu"


def _checked(device_type: str) -> str:
    try:
        return device_type if device_type in _KINDS else torch.device(device_type).type
    except RuntimeError as error:
        why = "torch has no such device type"
        raise PolicyError(f"unknown device type {device_type!r}", why=why, write='"cpu" or "cuda"') from error


def _default_kind() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else "cuda"
