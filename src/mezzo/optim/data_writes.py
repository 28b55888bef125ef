"""Masters in a program that knows of none: what it writes into parameters through ``.data`` counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.optim.masters import MasterWeights
from mezzo.tensors import is_distributed, versions

__all__ = ["ShownMasters"]


class ShownMasters(MasterWeights):
    """Masters that count as what their parameters show, where these are written to through ``.data``.

    That leaves no trace. So where a parameter is not what its master rounds to, and the master was not changed in
    place, the parameter was: an average of weights that is swapped in, say. The master stays, for what is swapped out
    again; the next step writes it over the parameter. A parameter in parts on several ranks shows its master.

    **Cost**: one list of numbers a step; where a value is asked for, one comparison and a host sync.
    """

    def __init__(self, optimizer: Optimizer, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._rounded = versions(list(self._master.values()))  # as they were when they were rounded last

    def round_to_params(self) -> None:
        """Write every master, rounded to nearest even, into its parameter."""
        super().round_to_params()
        self._rounded = versions(list(self._master.values()))

    def _see(self, param: Tensor) -> None:
        super()._see(param)
        if (place := self._places[id(param)]) < len(self._rounded):
            self._rounded[place] = self._master[param]._version

    @torch.no_grad()
    def master_of(self, param: Tensor) -> Tensor:
        """Return the FP32 value that a parameter shows: its master, where it rounds to the parameter.

        Raises:
            StateError: The optimizer does not update this parameter.
        """
        master = super().master_of(param)
        if master is param or is_distributed(param) or self._is_behind(param, master):
            return master
        kept = (master.to(param.dtype) == param) | (master.isnan() & param.isnan())
        return master if bool(kept.all()) else torch.where(kept, master, param.float())

    def leave(self) -> None:
        """Serve no session any more; parameters that are FP32 again have the values that they showed."""
        for param, master in self._master.items():
            if param.dtype == master.dtype:
                master.data = param.data
        super().leave()

    def _is_behind(self, param: Tensor, master: Tensor) -> bool:
        """Whether a master was changed since it was rounded into its parameter, so that it alone counts."""
        place = self._places[id(param)]
        return place >= len(self._rounded) or self._rounded[place] != master._version
