"""Faults of ``overflow/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "overflow/search.py",
        (
            "overflow: scales are tried upwards",
            "gradient * (scale / self.context.loss_scale)",
            "gradient * (self.context.loss_scale / scale)",
            "tests/overflow/test_search.py::test_a_gradient_that_overflows_by_the_scale",
            "a scale that is too large would be blamed on the model",
        ),
        (
            "overflow: the loss is scaled in FP16",
            "return loss.float() if loss.dtype in LOW else loss",
            "return loss",
            "tests/overflow/test_search.py::test_a_loss_in_float16",
            "the search itself would overflow",
        ),
    ),
    *in_file(
        "overflow/report.py",
        (
            "overflow: masks are blamed",
            "return self.may_be_meant, self.number",
            "return False, self.number",
            "tests/overflow/test_watch.py::test_what_is_meant_is_blamed_last",
            "an attention mask's -inf would be the first non-finite tensor",
        ),
    ),
    *in_file(
        "overflow/diagnose.py",
        (
            "overflow: a scale of one step less",
            "    return 2.0**low\n",
            "    return 2.0**high\n",
            "tests/overflow/test_cures.py::test_the_highest_scale_is_the_one_that_trying_all_finds",
            "the cure would overflow again",
        ),
    ),
)
