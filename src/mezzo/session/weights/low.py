"""Low-precision weights whose gradients or updates would be lost: what refuses to train them."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import UnsupportedError, some_of
from mezzo.optim.optimizer import as_one_pass
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.session.weights.divisors import lost_eps
from mezzo.tensors import LOW, dtype_name

__all__ = ["LowWeights"]


class LowWeights:
    """Refuses low-precision weights whose gradients or updates would be lost, now and when there are new ones.

    Args:
        optimizers: Whose parameters are looked at.
        policy: One with masters refuses nothing. Without them FP16 gradients must not carry a loss scale that FP16
            arithmetic would have to take away, and where the policy stores FP32 no optimizer but mezzo's, which keep
            what rounding takes, may train weights that came in low precision. In FP16 no optimizer may add an ``eps``
            that is zero there.
        name_of: Gives a parameter's name.

    Attributes:
        guards: Whether :meth:`check` refuses anything.
    """

    def __init__(self, optimizers: list[Optimizer], policy: Policy, name_of: Callable[[Tensor], str]) -> None:
        self._optimizers, self._policy, self._name_of = optimizers, policy, name_of
        self.guards = True
        self._num_groups = -1
        self._frozen: list[Tensor] = []

    def check(self, gradients: Set[torch.dtype] | None = None) -> None:
        """Look for such weights if a parameter group was added, or a frozen low-precision parameter trains by now.

        Args:
            gradients: The dtypes of all gradients that a step is about to use, where it asks. Low-precision ones, where
                the policy stores FP32, are the only trace that ``model.half()`` leaves in mid-run.

        Raises:
            UnsupportedError: There are such weights.
        """
        if self._policy.master_weights or not self.guards:
            return
        if self._policy.param_dtype == torch.float16:
            self._refuse_lost_eps()
        if gradients is None:
            if self._count() == self._num_groups and not any(param.requires_grad for param in self._frozen):
                return
        elif self._policy.param_dtype != torch.float32 or gradients.isdisjoint(LOW) or self._keep_halves():
            return
        frozen: list[Tensor] = []
        for optimizer in self._optimizers:
            low = [p for group in optimizer.param_groups for p in group["params"] if p.dtype in LOW]
            frozen += [param for param in low if not param.requires_grad]
            self.refuse_unscaling(optimizer)
            if as_one_pass(optimizer) is None and self._policy.param_dtype == torch.float32:
                self._refuse_lost_updates(optimizer, [param for param in low if param.requires_grad])
        self._num_groups, self._frozen = self._count(), frozen

    def _refuse_lost_eps(self) -> None:
        """Refuse to divide by zero; looked at in each step, since a loaded state brings its own options."""
        others = (optimizer for optimizer in self._optimizers if as_one_pass(optimizer) is None)
        if problems := [problem for optimizer in others for problem in lost_eps(optimizer, self._name_of)]:
            raise UnsupportedError.together(problems)

    def _keep_halves(self) -> bool:
        """Whether the optimizers keep the FP32 values of all their low-precision parameters themselves."""
        return all(own is not None and own.keeps_masters for own in map(as_one_pass, self._optimizers))

    def _count(self) -> int:
        return sum(len(optimizer.param_groups) for optimizer in self._optimizers)

    def refuse_unscaling(self, optimizer: Optimizer, config: LossScale | None = None, write: str = "") -> None:
        """Refuse FP16 weights whose gradients carry a loss scale, and have no FP32 value to be unscaled for.

        Args:
            optimizer: Whose weights.
            config: The loss scale; the policy's when omitted.
            write: What gives them FP32 values, where that is no session of the user's.

        Raises:
            UnsupportedError: An optimizer has such weights.
        """
        scale, own = config or self._policy.loss_scale, as_one_pass(optimizer)
        bare = (group for group in optimizer.param_groups if own is None or group["master"] is None)
        params = [param for group in bare for param in group["params"] if param.requires_grad]
        half = [param for param in params if param.dtype == torch.float16]
        if half and scale.mode != "none" and not (scale.mode == "constant" and scale.init == 1.0):
            raise UnsupportedError(
                "fp16 gradients cannot be unscaled in fp16",
                where=self._where(half, optimizer),
                why="dividing them by the loss scale in float16 flushes small ones to zero",
                write=write
                or 'MixedPrecision(model, optimizer, policy="O2")   # keeps FP32 masters; or model.float() first',
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
