"""Faults of ``distributed/`` and of ``shards.py``."""

from .fault import in_file

VERDICT = "tests/distributed/test_verdict.py::"
EXCHANGE = "tests/distributed/test_exchange.py::"
FOUR = "tests/distributed/test_four_ranks.py::"
SHARDS = "tests/distributed/test_fully_shard.py::"

FAULTS = (
    *in_file(
        "distributed/exchange.py",
        (
            "ranks: norms of shards are added, not their squares",
            "norms.index_select(0, at).double().square())",
            "norms.index_select(0, at).double())",
            EXCHANGE + "test_norms_of_shards_become_those_of_whole_gradients",
            "clipping would depend on the number of ranks",
        ),
        (
            "ranks: each has the norm of its own shards",
            '            self._reduce(part, dist.ReduceOp.SUM, group, "the norms of gradients")\n',
            "",
            EXCHANGE + "test_norms_of_shards_become_those_of_whole_gradients",
            "ranks would clip by different norms, and their weights drift apart",
        ),
        (
            "ranks: copies count as shards",
            "for dim, placement in enumerate(param.placements) if not placement.is_replicate())",
            "for dim, placement in enumerate(param.placements))",
            FOUR + "test_norms_over_several_groups_send_nothing_to_the_device_once_it_has_their_places",
            "the norm would grow with the number of replicas",
        ),
        (
            "ranks: a rank that is absent is not waited for",
            'if numbers.device.type == "cpu" and (error',
            "if False and (error",
            "tests/distributed/test_exchange.py",
            "ranks would drift apart after an error on one of them",
        ),
        (
            "ranks: an absent rank does not say so",
            "number = float(self.size - self.rank)  # the first absent rank's is the largest",
            "number = 0.0",
            EXCHANGE + "test_what_one_rank_finds_holds_on_all_and_an_absent_rank_ends_the_step_of_all",
            "the others would take the step",
        ),
        (
            "ranks: a rank that raises leaves the others waiting for its norms",
            "            if not self._has_summed:\n",
            "            if False:\n",
            EXCHANGE + "test_what_one_rank_finds_holds_on_all_and_an_absent_rank_ends_the_step_of_all",
            "norms and verdicts of two ranks would be exchanged for each other",
        ),
        (
            "ranks: sums beyond FP32 stay finite",
            "whole = squares.masked_fill(squares > _LARGEST, torch.inf).sqrt().float()",
            "whole = squares.sqrt().float()",
            EXCHANGE + "test_what_one_rank_finds_holds_on_all_and_an_absent_rank_ends_the_step_of_all",
            "several ranks would take a step that one skips",
        ),
        (
            "ranks: an overflow is told to nobody",
            "numbers = torch.stack([found_inf, failed, torch.zeros_like(found_inf)]).float()\n        self._reduce(numbers",
            "numbers = torch.stack([found_inf, failed, torch.zeros_like(found_inf)]).float()\n        self._reduce(numbers.clone()",
            VERDICT + "test_what_one_rank_sees_decides_for_all",
            "one rank would skip a step that the others take",
        ),
        (
            "ranks: a loss that failed elsewhere lowers the scale here",
            "numbers = torch.stack([found_inf, failed, torch.zeros_like(found_inf)]).float()",
            "numbers = torch.stack([found_inf, torch.zeros_like(failed), torch.zeros_like(found_inf)]).float()",
            VERDICT + "test_what_one_rank_sees_decides_for_all",
            "the loss scales of ranks would drift apart",
        ),
        (
            "ranks: sums that never were taken are parameters",
            "if any(placement.is_partial() for placement in param.placements):",
            "if False:",
            EXCHANGE + "test_what_does_not_fit_the_group_is_refused",
            "each rank would update a part of the sum by itself",
        ),
        (
            "ranks: who steps alone shares gradients",
            "        if group.size() > 1:\n",
            "        if False:\n",
            EXCHANGE + "test_what_does_not_fit_the_group_is_refused",
            "an overflow on one rank would not be seen on the others",
        ),
        (
            "ddp: sums of micro-batches are not divided",
            "        torch._foreach_div_(parts, group.size())\n",
            "",
            EXCHANGE + "test_sums_that_wait_beside_a_wrapper_are_averaged_whoever_has_them",
            "accumulated gradients would be as many times too large as there are ranks",
        ),
        (
            "ddp: a sum that only another rank has is lost here",
            "else (counts > 0).tolist()",
            "else [param in sums for param in here]",
            EXCHANGE + "test_sums_that_wait_beside_a_wrapper_are_averaged_whoever_has_them",
            "ranks would update different parameters",
        ),
        (
            "ddp: each rank keeps its own FP32 values",
            "        dist.broadcast(value, group=group, group_src=0)\n",
            "        pass\n",
            "tests/distributed/test_ddp.py::test_every_order_trains_the_same",
            "ranks that were initialised apart would stay so, by half a unit in the last place of a low weight",
        ),
    ),
    *in_file(
        "distributed/wrappers.py",
        (
            "ddp: every pass counts as reduced",
            "self._met[wrapper].reduces = wrapper.require_backward_grad_sync",
            "self._met[wrapper].reduces = True",
            "tests/distributed/test_ddp.py::test_any_backward_passes_are_means_once_the_last_has_reduced",
            "micro-batches in no_sync() would stay each rank's own",
        ),
        (
            "ddp: the first rank's FP32 values are thrown away",
            "                    owners[param].write(param, value)\n",
            "                    pass\n",
            "tests/distributed/test_ddp.py::test_every_order_trains_the_same",
            "replicas would differ in their lower halves",
        ),
        (
            "fsdp2: no_sync() exchanges",
            "                    unit.set_requires_gradient_sync(False, recurse=False)\n",
            "                    pass\n",
            "tests/distributed/test_sharded_sessions.py::test_gradients_that_wait_are_not_stepped_with_and_are_cleared",
            "accumulation would cost an exchange for each micro-batch",
        ),
    ),
    *in_file(
        "distributed/sharding.py",
        (
            "fsdp2: gradients are reduced in 16 bits",
            "torch.float32 if low else None, cast_forward_inputs=False",
            "None, cast_forward_inputs=False",
            "tests/distributed/test_sharded_sessions.py::test_fp16_gradients_are_averaged_in_fp32_and_rounded_once",
            "sums over ranks would lose what is small",
        ),
        (
            "fsdp2: what is kept in FP32 is gathered with what is low",
            "if module is model or module in chosen or dtype != around:",
            "if module is model or module in chosen:",
            SHARDS + "test_modules_compute_in_the_dtypes_that_they_have_in_one_process",
            "batch norms would be rounded",
        ),
        (
            "fsdp2: a model of another policy is sharded",
            "        if handle.asked != policy:\n",
            "        if False:\n",
            "tests/distributed/test_sharded_refusals.py::test_what_cannot_be_sharded_stays_as_it_is",
            "parameters would be gathered in another dtype than their modules compute in",
        ),
    ),
    *in_file(
        "shards.py",
        (
            "shards: all are rounded alike",
            "            number = number * tensor.device_mesh.size(dim) + coordinate[dim]\n",
            "            number = 0\n",
            FOUR + "test_copies_of_a_shard_are_rounded_alike_at_random_and_shards_are_not",
            "moments of two shards would be rounded with the same random bits",
        ),
        (
            "shards: copies are rounded apart",
            "    return [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]",
            "    return [*range(len(tensor.placements))]",
            FOUR + "test_copies_of_a_shard_are_rounded_alike_at_random_and_shards_are_not",
            "replicas would drift apart",
        ),
        (
            "shards: the first rank sends its own to all",
            "whole.placements, src_data_rank=None)",
            "whole.placements, src_data_rank=None).mul(2)",
            "tests/distributed/test_checkpoints.py",
            "what is loaded would be another value",
        ),
    ),
)
