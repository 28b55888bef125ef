"""Drivers of a model that DistributedDataParallel wraps: one rank alone, and two, each in a process of its own."""

import gc

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .drivers import DRIVERS, FiveLines
from .oracle import Contract


class OneRank(FiveLines):
    """The session first, then the wrapper, which remembers what trains, by its dtype, and counts the passes that began.

    Nothing is broadcast, as all ranks begin alike: a write, of the same numbers too, rounds a low buffer.
    """

    contract = Contract(sums_low=True)
    lacks = FiveLines.lacks | {
        "one at a time", "freezing", "broken passes", "closing", "swapping", "nested", "outputs", "structure", "beside",
    }  # fmt: skip

    def begin(self, model, config, **options):
        gc.collect()  # reducers of earlier sequences, which are in cycles
        amp = super().begin(model, config, **options)
        self.model = DistributedDataParallel(model, broadcast_buffers=False, init_sync=False)
        return amp


class TwoRanks(OneRank):
    """The same calls on both ranks, of which the other has other values, and overflows of its own.

    Values that sixteen bits swallow are left out: whether the mean of a first pass keeps them depends on the wrapper.
    """

    lacks = OneRank.lacks | {"signals"}

    def shares(self, batch):
        there = {**batch, "values": batch["values"] + 1, "kind": batch["elsewhere"]}
        return [{**data, "is_coarse": True} for data in (batch, there)], dist.get_rank()


DRIVERS |= {"one rank": OneRank, "two ranks": TwoRanks}
