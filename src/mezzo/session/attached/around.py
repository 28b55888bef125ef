"""A session around one optimizer, over a model that is in low precision already and that nobody names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.errors import PolicyError, StateError, shown
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.session.attached.standing import Standing
from mezzo.session.weights.words import Words
from mezzo.tensors import LOW

__all__ = ["AroundOptimizer"]


class AroundOptimizer:
    """Keep masters of an optimizer's low-precision parameters, and a loss scale; FP32 parameters stay what they are.

    Args:
        optimizer: The optimizer; its ``step()`` is taken over.
        loss_scale: The loss scale.
        words: What a program writes, for errors and warnings.

    Attributes:
        standing: The session that stands.
        attached: The session.

    Raises:
        PolicyError: No optimizer.
        StateError: It has masters already.
    """

    def __init__(self, optimizer: Optimizer, loss_scale: LossScale, words: Words) -> None:
        if not isinstance(optimizer, Optimizer):
            raise PolicyError(f"an optimizer must be a torch.optim.Optimizer, not {shown(optimizer)}")
        groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        self._low = [[param for param in params if param.dtype in LOW] for params in groups]
        self._model = nn.ParameterList(param for params in groups for param in params)
        kinds = {param.dtype for params in self._low for param in params}
        wide = [name for name, param in self._model.named_parameters() if param.dtype not in LOW]
        policy = Policy.O0(loss_scale=loss_scale)
        if kinds:
            dtype = torch.bfloat16 if kinds == {torch.bfloat16} else torch.float16  # both are refused, by name
            policy = Policy.O2(dtype, loss_scale=loss_scale)
        self.standing = Standing(
            [self._model], [optimizer], policy.keep_fp32(params=wide) if kinds and wide else policy, words=words
        )
        assert self.standing.attached is not None, "there is an optimizer"
        self.attached = self.standing.attached

    def masters(self) -> list[list[Tensor]]:
        """Return copies of the low-precision parameters' FP32 values, group by group."""
        updated = zip(self._model.parameters(), self.attached.amp.master_params(), strict=True)
        of: dict[Tensor, Tensor] = {param: master.detach() for param, master in updated}
        return [[of[param].clone() for param in params] for params in self._low]

    def load_masters(self, masters: Iterable[Iterable[Any]]) -> None:
        """Take over FP32 values, and round them into the parameters.

        Args:
            masters: As :meth:`masters` returned them.

        Raises:
            StateError: Of other shapes; nothing was loaded.
        """
        given = [list(each) for each in masters]
        if [[each.shape for each in group] for group in given] != [[p.shape for p in params] for params in self._low]:
            raise StateError(
                "these are masters of other parameters",
                why="their number or their shapes differ",
                write="the state of an optimizer over the same parameters, in the same groups",
            )
        names: dict[Tensor, str] = {param: name for name, param in self._model.named_parameters()}
        pairs = zip((p for params in self._low for p in params), (m for group in given for m in group), strict=True)
        self._model.load_state_dict({names[param]: master for param, master in pairs}, strict=False)
