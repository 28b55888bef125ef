"""The session's state inside an optimizer's: a program's own checkpoints then go on bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mezzo.session.core import Core
from mezzo.session.state import saved
from mezzo.session.state.refusals import check

__all__ = ["CARRIED", "carry", "resume"]

#: What plain torch ignores.
CARRIED: Final = "mezzo"


def carry(core: Core, optimizer: Optimizer) -> list[RemovableHandle]:
    """Have ``optimizer.state_dict()`` hold the session's state under a key of its own, and load it from there.

    Without the masters, whose values the models' state dicts have.

    Args:
        core: The session.
        optimizer: One of its optimizers.

    Returns:
        What takes the hooks off again.
    """
    loaded = list[Mapping[str, Any]]()

    def forget(optimizer: Optimizer) -> None:
        """Drop what a look at ``state[p]`` of a model's own parameter has left: torch knows no number for it."""
        known = {id(param) for group in optimizer.param_groups for param in group["params"]}
        tensors = [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in known]
        looked_at = [key for key in tensors if optimizer.state[key] == {}]
        for key in looked_at:
            del optimizer.state[key]

    def add(_: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[CARRIED] = saved.save(core, weights=False)

    def take(_: Optimizer, state_dict: dict[str, Any]) -> None:
        loaded.clear()
        if CARRIED in state_dict:
            check(core, state_dict[CARRIED])
            loaded.append(state_dict[CARRIED])

    def load(_: Optimizer) -> None:
        core.writes.drop()
        if loaded:
            resume(core, loaded.pop())

    return [
        optimizer.register_state_dict_pre_hook(forget),
        optimizer.register_state_dict_post_hook(add),
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(load),
    ]


def resume(core: Core, state: Mapping[str, Any]) -> None:
    """Go on from what an optimizer has carried.

    Raises:
        StateError: It is another session's. Nothing was loaded.
    """
    if any(group.window for group in core.groups):
        core.clear()
    saved.load(core, state, weights=False)
