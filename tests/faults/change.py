"""Faults of a change of policy between two steps."""

from .fault import in_file

CHANGE = "tests/session/test_change.py::"
REFUSALS = "tests/session/test_change_refusals.py::"
# fmt: off
FAULTS = (
    *in_file("cast/model/storing.py",
        ("change: what lost bits is not put back", "        tensor.detach().copy_(values)\n", "        pass\n",
         f"{REFUSALS}test_an_error_on_the_way_is_walked_back",
         "a change that runs out of memory would have rounded some weights"),
        ("change: a dtype of halves is not changed", "        recode(tensor, form.dtype)\n", "        pass\n",
         f"{CHANGE}test_the_run_goes_on_as_one_that_begins_under_the_policy",
         "FP16 products would read, and round once more, what BF16 left of weights"),
    ),
    *in_file("cast/model/prepare.py",
        ("change: noise begins anew", "            self._draws = memory.draws\n", "            pass\n",
         f"{CHANGE}test_histories_go_on_and_no_noise_comes_twice",
         "the random rounding of the first steps would come a second time"),
        ("change: an undone change leaves no hooks", "self._dtypes_at) = before, dtypes\n            self._enter()\n",
         "self._dtypes_at) = before, dtypes\n", f"{REFUSALS}test_an_error_on_the_way_is_walked_back",
         "after a change that failed a model would run in FP32"),
    ),
    *in_file("session/change.py",
        ("change: of two models the second tells what a shared weight came as",
         "came_as = prepared.came_as() | came_as", "came_as |= prepared.came_as()",
         f"{REFUSALS}test_two_models_that_share_a_module_change_together",
         "weights that both models share would stay in 16 bits after O3"),
        ("change: a scale leaves its new bounds", "if (bounded := within(numbers, config)) != numbers:",
         "if (bounded := within(numbers, config)) is None:", f"{CHANGE}test_a_scale_goes_on_within_its_bounds",
         "a ceiling would hold from the first overflow on"),
        ("change: mezzo's optimizers do not learn of O3", "        optimizer.rounds = weights.are_low\n", "        pass\n",
         f"{CHANGE}test_the_run_goes_on_as_one_that_begins_under_the_policy", "a step after the change to O3 would be refused"),
        ("change: gradients are dropped from a loop of the program's own", "            param.grad = gradient\n",
         "            pass\n", f"{CHANGE}test_an_attached_run_goes_on_as_one_that_begins_there",
         "a program that logs or adds up gradients would find none"),
    ),
    *in_file("session/capture.py",
        ("change: a captured step stays what it was", "if self._changes != engine.changes:", "if False:",
         "tests/session/capture/test_change_captured.py::test_a_captured_step_is_captured_again",
         "the graph would go on under the former policy"),
    ),
    *in_file("distributed/exchange.py",
        ("change: votes are not compared", 'is_alike = set(votes) == {f"yes {word}"}', "is_alike = all(votes)",
         "tests/distributed/test_change_on_ranks.py::test_ranks_that_differ_keep_the_former_policy_and_train_on",
         "ranks would train on under two policies"),
    ),
)
