"""Low-precision weights that train without FP32 masters, which only some optimizers can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import UnsupportedError, some_of
from mezzo.optim.optimizer import as_one_pass
from mezzo.policy import Policy
from mezzo.tensors import LOW, dtype_name

__all__ = ["LowWeights"]


class LowWeights:
    """Refuses low-precision weights whose gradients or updates would be lost, now and when there are new ones.

    Args:
        optimizers: Whose parameters are looked at.
        policy: One with masters refuses nothing. Without them FP16 gradients must not carry a loss scale that FP16
            arithmetic would have to take away, and where the policy stores FP32 no optimizer but mezzo's, which keep
            what rounding takes, may train weights that came in low precision.
        name_of: Gives a parameter's name.

    Raises:
        UnsupportedError: There are such weights.
    """

    def __init__(self, optimizers: list[Optimizer], policy: Policy, name_of: Callable[[Tensor], str]) -> None:
        self._optimizers, self._policy, self._name_of = optimizers, policy, name_of
        self._num_groups = -1
        self._frozen: list[Tensor] = []
        self.check()

    def check(self) -> None:
        """Look again if a parameter group was added, or a frozen low-precision parameter trains by now.

        Raises:
            UnsupportedError: There are such weights.
        """
        if self._policy.master_weights:
            return
        num_groups = sum(len(optimizer.param_groups) for optimizer in self._optimizers)
        if num_groups == self._num_groups and not any(param.requires_grad for param in self._frozen):
            return
        self._look(num_groups)

    def check_gradients(self, dtypes: Set[torch.dtype]) -> None:
        """Look again if gradients are low-precision: ``model.half()`` in mid-run leaves no other trace.

        Args:
            dtypes: Of all gradients that a step is about to use.

        Raises:
            UnsupportedError: There are low-precision weights that would lose gradients or updates.
        """
        if self._policy.param_dtype != torch.float32 or self._policy.master_weights or dtypes.isdisjoint(LOW):
            return
        if not all(_keeps_halves(optimizer) for optimizer in self._optimizers):
            self._look(sum(len(optimizer.param_groups) for optimizer in self._optimizers))

    def _look(self, num_groups: int) -> None:
        frozen: list[Tensor] = []
        for optimizer in self._optimizers:
            low = list(_low(optimizer))
            frozen += [param for param, _ in low if not param.requires_grad]
            training = [(param, is_kept) for param, is_kept in low if param.requires_grad]
            self._refuse_fp16_unscaling(optimizer, [p for p, is_kept in training if not is_kept])
            if as_one_pass(optimizer) is None and self._policy.param_dtype == torch.float32:
                self._refuse_lost_updates(optimizer, [param for param, _ in training])
        self._num_groups, self._frozen = num_groups, frozen

    def _refuse_fp16_unscaling(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        scale = self._policy.loss_scale
        half = [param for param in params if param.dtype == torch.float16]
        if half and scale.mode != "none" and not (scale.mode == "constant" and scale.init == 1.0):
            raise UnsupportedError(
                "fp16 gradients cannot be unscaled in fp16",
                where=self._where(half, optimizer),
                why="dividing them by the loss scale in float16 flushes small ones to zero",
                write='MixedPrecision(model, optimizer, policy="O2")   # keeps FP32 masters; or model.float() first',
            )

    def _refuse_lost_updates(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        if params:
            dtype = dtype_name(params[0].dtype)
            half_spacing = torch.finfo(params[0].dtype).eps / 2
            rules = any(rule.treatment == "low" and rule.param for rule in self._policy.rules)
            raise UnsupportedError(
                "low-precision weights would train without FP32 masters",
                where=self._where(params, optimizer),
                why=f"{self._policy.level} keeps none, and {dtype} swallows updates below "
                f"{half_spacing:.2g} of their weight",
                write=f'MixedPrecision(model, optimizer, policy="O2,dtype={dtype}")   # keeps FP32 masters;\n'
                "or mezzo.optim, which keeps what rounding takes; or model.float() first"
                + (", and no rule that stores them low" if rules else ""),
            )

    def _where(self, params: list[Tensor], optimizer: Optimizer) -> str:
        named = (f"{self._name_of(p)} ({dtype_name(p.dtype)}, {'×'.join(map(str, p.shape))})" for p in params)
        return f"{some_of(list(named), 1)}, optimizer {type(optimizer).__name__}"


def _keeps_halves(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps the FP32 values of all its low-precision parameters itself."""
    own = as_one_pass(optimizer)
    return own is not None and own.keeps_masters


def _low(optimizer: Optimizer) -> Iterator[tuple[Tensor, bool]]:
    """Yield the low-precision parameters of an optimizer, and whether it keeps their FP32 values itself."""
    own = as_one_pass(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.dtype in LOW:
                yield param, own is not None and group["master"] is not None
