"""Faults of ``distributed/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "distributed/exchange.py",
        (
            "ranks: norms of shards are added, not their squares",
            "norms.index_select(0, at).double().square())",
            "norms.index_select(0, at).double())",
            "tests/distributed/test_exchange.py::test_norms_of_shards_become_those_of_whole_gradients",
            "clipping would depend on the number of ranks",
        ),
        (
            "ranks: a rank that is absent is not waited for",
            'if numbers.device.type == "cpu" and (error',
            "if False and (error",
            "tests/distributed/test_exchange.py",
            "ranks would drift apart after an error on one of them",
        ),
        (
            "ranks: sums beyond FP32 stay finite",
            "whole = squares.masked_fill(squares > _LARGEST, torch.inf).sqrt().float()",
            "whole = squares.sqrt().float()",
            "tests/distributed/test_exchange.py::test_what_one_rank_finds_holds_on_all_and_an_absent_rank_ends_the_step_of_all",
            "several ranks would take a step that one skips",
        ),
    ),
)
