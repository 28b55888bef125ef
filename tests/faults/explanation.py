"""Faults of ``explanation/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "trace/measure.py",
        (
            "explain: integers up to the bound count as lost",
            "    lowest = 2 / torch.finfo(dtype).eps ",
            "    lowest = 4 / torch.finfo(dtype).eps ",
            "tests/explanation/test_explain_asked.py::test_the_bound_is_two_to_the_significand",
            "positions from 257 to 512 would be rounded in BF16, and nothing be said",
        ),
        (
            "explain: fractions count as integers",
            " or bool((values != values.trunc()).any()):\n",
            ":\n",
            "tests/explanation/test_explain_asked.py::test_near_misses_are_no_finding",
            "every large activation would be called an index",
        ),
        (
            "explain: integers that the format holds count as lost",
            "    if not num_changed:\n        return None\n",
            "",
            "tests/explanation/test_explain_asked.py::test_near_misses_are_no_finding",
            "multiples of 16 would be called lost",
        ),
    ),
    *in_file(
        "trace/kernels.py",
        (
            "explain: a bias counts as a factor",
            "args[1:3] if name in _ADDING else args[:last]",
            "args[:last]",
            "tests/explanation/test_explain_asked.py::test_one_hot_masks_and_biases_are_no_finding",
            "a false alarm for a term that is added",
        ),
    ),
    *in_file(
        "trace/trace.py",
        (
            "explain: what is joined is no longer followed",
            "            _carry(self._rounded, args, results)\n",
            "",
            "tests/explanation/test_explain_asked.py::test_integers_that_the_model_itself_casts_are_followed_through_cat",
            "a position beside other features would go unnoticed",
        ),
        (
            "explain: what is overwritten is still followed",
            "        if kernel._schema.is_mutable:\n            self._rounded.put(results, None)\n",
            "",
            "tests/explanation/test_explain_asked.py::test_what_is_changed_in_place_after_its_cast_is_something_else",
            "a false alarm for memory that is used again",
        ),
        (
            "explain: scores of attention count as logits",
            'is_product or name == "aten::_log_softmax"',
            "True",
            "tests/explanation/test_explain_asked.py::test_what_is_no_cast_of_logits_or_a_small_one",
            "each attention would be told to use linear_cross_entropy",
        ),
    ),
    *in_file(
        "explanation/findings.py",
        (
            "explain: the cast of the logits is named whatever its share",
            "    if not size or size < _LARGE_SHARE * total or size < _WORTH_A_WORD * seen.moved_bytes:\n",
            "    if not size:\n",
            "tests/explanation/test_explain_asked.py::test_what_is_no_cast_of_logits_or_a_small_one",
            "four classes would be called a large vocabulary",
        ),
        (
            "explain: a rule on another module counts for a tied weight",
            '            or (rule.op is None and rule.treatment in ("low", "fp32") and rule.matches_module(module))\n',
            "",
            "tests/explanation/test_explain_asked.py::test_one_tensor_under_two_treatments",
            "a rule on a head would widen the embedding without a word",
        ),
    ),
    *in_file(
        "trace/sandbox.py",
        (
            "explain: buffers stay changed",
            "            buffer.data.copy_(kept)\n",
            "            pass\n",
            "tests/overflow/test_untouched.py::test_everything_is_as_it_was",
            "explaining a model would train its batch norm",
        ),
        (
            "explain: gradients are lost",
            "            leaf.grad = gradient\n",
            "            pass\n",
            "tests/overflow/test_untouched.py::test_everything_is_as_it_was",
            "locating an overflow would clear the user's gradients",
        ),
    ),
)
