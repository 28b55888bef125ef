"""The options of ``amp.initialize`` as a policy, and what they contradict each other in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from mezzo.errors import PolicyError, nearest, not_switches, shown
from mezzo.policy import Policy
from mezzo.policy.ops import OPS
from mezzo.policy.ops.lists import APEX
from mezzo.scale import LossScale

__all__ = ["policy_of"]

_LEVELS: Final = ("O0", "O1", "O2", "O3")
_YES_OR_NO: Final = {"True": True, "False": False, True: True, False: False, None: None}
#: What apex computed in FP32 at O1 and a policy leaves alone; of composed functions the parts decide.
_FLOAT: Final = sorted(op for op in APEX["float list"] if OPS[op].portable == "native" and not OPS[op].parts)
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


def policy_of(
    opt_level: Any, cast_model_type: Any = None, patch_torch_functions: Any = None, keep_batchnorm_fp32: Any = None,
    master_weights: Any = None, loss_scale: Any = None, cast_model_outputs: Any = None,
    min_loss_scale: Any = None, max_loss_scale: Any = 2.0**24,
) -> Policy:  # fmt: skip
    """Return the policy that apex's options mean; the options are those of :func:`mezzo.compat.apex.initialize`.

    Raises:
        PolicyError: Options that are unknown, or cannot go together; one message lists all.
    """
    if opt_level not in _LEVELS:
        raise PolicyError(
            f"unknown opt_level {shown(opt_level)}",
            where="amp.initialize",
            why=nearest(str(opt_level), _LEVELS),
            write='opt_level="O1"; in bfloat16, opt_level="O2", cast_model_type=torch.bfloat16, '
            'or mezzo.MixedPrecision(model, optimizer, "O1,dtype=bfloat16")',
        )
    problems = [
        *_conflicts(opt_level, cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights),
        *_wrong_dtype("cast_model_outputs", cast_model_outputs),
        *([] if patch_torch_functions is None else not_switches(patch_torch_functions=patch_torch_functions)),
    ]
    if not _is_known(keep_batchnorm_fp32):
        what = f"keep_batchnorm_fp32 is {shown(keep_batchnorm_fp32)}"
        problems.append(PolicyError(what, write='keep_batchnorm_fp32=True or False, or the strings "True" and "False"'))
    if problems:
        raise PolicyError.together(problems)
    given = {
        "loss_scale": _loss_scale(opt_level, loss_scale, min_loss_scale, max_loss_scale),
        "output_dtype": cast_model_outputs,
    }
    if opt_level in ("O2", "O3"):
        given |= {"keep_batchnorm_fp32": _YES_OR_NO[keep_batchnorm_fp32], "master_weights": master_weights}
    fields = {name: value for name, value in given.items() if value is not None}
    if opt_level == "O1" and patch_torch_functions in (None, True):
        return Policy.O1(**fields).fp32(*_FLOAT)
    if opt_level in ("O0", "O1"):
        return Policy.O0(**fields)
    make = Policy.O2 if opt_level == "O2" else Policy.O3
    return make(cast_model_type or torch.float16, **fields)


def _is_known(value: Any) -> bool:
    return isinstance(value, bool | str | None) and value in _YES_OR_NO


def _conflicts(level: str, cast: Any, patch: Any, norms: Any, masters: Any) -> Iterator[PolicyError]:
    """Yield what an option asks for that the level cannot have."""
    is_low = level in ("O2", "O3")
    reasons = (
        ("cast_model_type", cast, level == "O1" and cast not in (None, False, torch.float32),
         "O1 casts at ops; the model's weights stay FP32", 'opt_level="O2", cast_model_type=…'),
        ("cast_model_type", cast, level == "O0" and cast not in (None, False, torch.float32),
         "O0 is FP32 training", 'opt_level="O3", cast_model_type=…'),
        ("cast_model_type", cast, is_low and cast not in (None, torch.float16, torch.bfloat16),
         f"{level} stores the model in 16 bits", 'torch.float16 or torch.bfloat16; or opt_level="O0", which is FP32'),
        ("patch_torch_functions", patch, level != "O1" and bool(patch),
         "casts at ops are what O1 is", 'opt_level="O1"'),
        ("keep_batchnorm_fp32", norms, level == "O1" and norms is not None,
         "the model's weights stay FP32, batch norm's too", "amp.initialize(…) without keep_batchnorm_fp32"),
        ("master_weights", masters, level == "O1" and masters is not None,
         "the model's weights are FP32 themselves", "amp.initialize(…) without master_weights"),
        ("master_weights", masters, level == "O0" and bool(masters),
         "the model's weights are FP32 themselves", 'opt_level="O2", which has masters'),
    )  # fmt: skip
    for name, value, is_there, why, write in reasons:
        if is_there:
            where = f"amp.initialize(opt_level={level!r}, {name}={shown(value)})"
            yield PolicyError(
                f"{level} and {name}={shown(value)} contradict each other", where=where, why=why, write=write
            )


def _wrong_dtype(name: str, value: Any) -> Iterator[PolicyError]:
    if value is not None and value not in _DTYPES:
        yield PolicyError(f"{name} is {shown(value)}", write=" or ".join(map(str, _DTYPES)))


def _loss_scale(level: str, value: Any, least: Any, most: Any) -> LossScale:
    if value is None:
        value = "dynamic" if level in ("O1", "O2") else 1.0
    if value != "dynamic":
        try:
            number = float("" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            raise PolicyError(
                f"loss_scale is {shown(value)}", where="amp.initialize", write='loss_scale="dynamic", 128.0 or "128.0"'
            ) from None
        return LossScale.constant(number)
    bounds = {name: bound for name, bound in (("floor", least), ("ceiling", most)) if bound is not None}
    init = LossScale.like("apex").init
    if isinstance(most, int | float) and most > 0:
        init = min(init, float(most))
    if isinstance(least, int | float):
        init = max(init, float(least))
    return LossScale.like("apex", init=init, **({"ceiling": None} | bounds))
