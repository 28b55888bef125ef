"""Faults of ``optim/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "optim/checks.py",
        (
            "optimizers: a learning rate of NaN",
            "return math.isfinite(number) and least <= number < end",
            "return not least > number and not number >= end",
            "tests/optim/test_refusals.py::test_what_a_group_must_not_say_is_refused_wherever_it_is_said",
            "R18: NaN in all weights",
        ),
        (
            "optimizers: parameters in a set",
            "if isinstance(params, (set, frozenset)):",
            "if False:",
            "tests/optim/test_refusals.py::test_a_set_has_no_order_that_a_state_could_belong_to",
            "P9: moments would land on other weights after a restart",
        ),
    ),
    *in_file(
        "optim/optimizer.py",
        (
            "optimizers: a step writes low halves of the past",
            " and self.replaced == other.replaced",
            "",
            "tests/optim/test_continued.py::test_a_swapped_weight_is_what_a_step_updates",
            "a weight swapped for an average would stand beside the low half of another",
        ),
        (
            "optimizers: a swapped weight is not stored low again",
            "            halves.settle()",
            "            pass",
            "tests/optim/test_continued.py::test_weights_swapped_for_an_evaluation_and_back_train_as_if_nothing_had_been",
            "the model would go on in two dtypes",
        ),
        (
            "optimizers: low weights of no model",
            "        self._require_owners(",
            "        0 and self._require_owners(",
            "tests/optim/test_refusals.py::test_low_weights_of_no_model_are_refused_before_anything_is_made",
            "small updates of low weights would be lost without a word",
        ),
        (
            "optimizers: weights with and without a low half together",
            "param.dtype, rest is None, id(",
            "param.dtype, id(",
            "tests/optim/test_optim.py::test_models_with_and_without_low_halves_share_an_optimizer",
            "the second model's FP32 values would be lost",
        ),
    ),
    *in_file(
        "optim/state.py",
        (
            "state: a note is a history",
            "any(name in state for name in moments):",
            "state:",
            "tests/optim/test_saving.py::test_a_note_alone_is_no_history",
            "U1: the first AdamW step would have the size of the second",
        ),
        (
            "state: counts in float32",
            "torch.as_tensor(value).to(param.device, torch.int64)",
            "torch.as_tensor(value).to(param.device, torch.float32).to(torch.int64)",
            "tests/optim/test_saving.py::test_a_count_is_saved_exactly",
            "R16: 16777217 steps would be 16777216",
        ),
    ),
)
