"""How mezzo's optimizers save and load: torch's state dicts and hooks, with every tensor in its own dtype."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.optim.checks import check_group, check_state
from mezzo.optim.halves import Group, HalvesOptimizer
from mezzo.optim.state import WEIGHT_DTYPES, merged_group, plain_group, plain_state, restored_state, share_counts
from mezzo.tensors import LOW

__all__ = ["SavedOptimizer"]


class SavedOptimizer(HalvesOptimizer):
    """An optimizer whose state dicts are torch's in form, and exact in every dtype.

    ``Optimizer.load_state_dict`` casts state to the parameters' dtype, and its hooks see what it casts; so both methods
    are written anew, with the four kinds of hooks where torch has them.
    """

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return what torch's optimizer of this name returns, and the other half of each weight.

        ``step`` is a float64 tensor for each parameter, since float32 counts no further than 2^24; torch's optimizers
        load it. Moments share memory with the optimizer's, as
        torch's do. Entries of ``optimizer.state`` that belong to no parameter are saved as they are. NumPy's numbers
        among the options become Python's, which ``torch.load(weights_only=True)`` reads.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._complete()
        places: dict[int, int] = {}
        groups = []
        for group in self.param_groups:
            packed = plain_group(group)
            packed["params"] = [places.setdefault(id(param), len(places)) for param in group["params"]]
            if any(param.dtype in LOW for param in group["params"]):
                packed[WEIGHT_DTYPES] = [str(param.dtype) for param in group["params"]]
            groups.append(packed)
        state = {
            places[id(key)] if isinstance(key, Tensor) else key: plain_state(value) if _is_state(value) else value
            for key, value in self.state.items()
        }
        saved: dict[str, Any] = {"state": state, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, saved)
            saved = saved if replaced is None else replaced
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this optimizer's state, or that of torch's optimizer of this name.

        Moments keep ``state_dtype``, remainders and counts their own dtypes, whatever the parameters' are; ``master``,
        ``rounding`` and ``state_dtype`` stay what this optimizer was made with. Where the saved state has no other half
        of a weight, or that of a weight of another dtype, the present one stays. A parameter that it says nothing of
        begins anew. Hooks run as in ``torch.optim.Optimizer``: those before see a shallow copy of the whole state, and
        what they return is loaded instead.

        Raises:
            StateError: State of another shape, storage or rule; nothing was loaded.
            ValueError: Other parameter groups, as torch says it.
        """
        # Hooks may delete from what they get; what is no mapping at all is refused after them.
        given: Mapping[str, Any] = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for ahead in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = ahead(self, given)  # type: ignore[arg-type]
            given = given if replaced is None else replaced
        check_state(given, self._rule)
        self._require_groups(given["param_groups"])
        groups: list[Group] = []
        state: defaultdict[Any, Any] = defaultdict(dict)
        known = set()
        for mine, saved in zip(self.param_groups, given["param_groups"], strict=True):
            group, weight_dtypes = merged_group(mine, saved)
            check_group({**group, "params": None})
            groups.append(group)
            known.update(saved["params"])
            for param, index, weight_dtype in zip(mine["params"], saved["params"], weight_dtypes, strict=True):
                kept = self._storage(group, param), self.rule_of(group), group["state_dtype"], weight_dtype
                theirs = given["state"].get(index, {})
                if restored := restored_state(theirs, self.state.get(param, {}), param, *kept):
                    state[param] = restored
        share_counts(state.values())
        self.take_edits()
        before, now = ({p: of.get(p, {}).get("remainder") for _, p in self._pairs()} for of in (self.state, state))
        halves = [param for param, half in now.items() if half is not before[param]]
        state.update((key, copy.deepcopy(value)) for key, value in given["state"].items() if key not in known)
        Optimizer.__setstate__(self, {"state": state, "param_groups": groups})
        self._complete()
        self._begin_anew(halves)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _begin_anew(self, halves: Iterable[Tensor]) -> None:
        """Let go of what was prepared for the state before.

        Args:
            halves: The parameters whose remainders were loaded.
        """
        self._awaiting = set(halves)
        self._ready.clear()
        self._edits.see(self._with_masters())

    def _require_groups(self, saved: list[Group]) -> None:
        """Refuse other parameter groups, in torch's words, which programs look for."""
        if len(saved) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        if any(len(a["params"]) != len(b["params"]) for a, b in zip(self.param_groups, saved, strict=True)):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
            )


def _is_state(value: Any) -> bool:
    return isinstance(value, dict)
