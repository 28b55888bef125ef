"""Faults of ``explanation/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "trace/measure.py",
        (
            "explain: integers up to the bound count as lost",
            "    lowest = 2 / torch.finfo(dtype).eps ",
            "    lowest = 4 / torch.finfo(dtype).eps ",
            "tests/explanation/test_explain_asked.py::test_positions_that_enter_a_low_product_rounded",
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
            "tests/overflow/test_search.py::test_everything_is_as_it_was",
            "explaining a model would train its batch norm",
        ),
        (
            "explain: gradients are lost",
            "            leaf.grad = gradient\n",
            "            pass\n",
            "tests/overflow/test_search.py::test_everything_is_as_it_was",
            "locating an overflow would clear the user's gradients",
        ),
    ),
    *in_file(
        "explanation/rows.py",
        (
            "explain: emulation's casts are the policy's",
            'and (cast.by != "emulation" or "by" in fields)',
            "",
            "tests/explanation/test_explanation.py::test_sums_leave_emulation_out_unless_asked",
            "a policy would seem to cost casts that no device makes",
        ),
        (
            "explain: a dimension is padded to less",
            "short = ((name, size, -size % self.multiple) for name, size in self.shape)",
            "short = ((name, size, size % self.multiple) for name, size in self.shape)",
            "tests/explanation/test_explain_findings.py::test_a_vocabulary_that_is_no_multiple_of_eight",
            "50257 would be padded to 50258",
        ),
    ),
    *in_file(
        "explanation/answer.py",
        (
            "explain: shares are of kernels, not of FLOPs",
            "share = share_text(_flops(explained.products) - _flops(others), _flops(explained.products))",
            "share = share_text(total - wide, total)",
            "tests/explanation/test_answer.py::test_what_does_not_run_low_is_named_with_who_decided",
            "a small layer would weigh as much as the head",
        ),
        (
            "explain: emulation's casts are among the dearest",
            '        if cast.by != "emulation":\n',
            "        if True:\n",
            "tests/explanation/test_answer.py::test_emulation_moves_no_bytes_of_its_own",
            "the dearest casts would be those that no device makes",
        ),
    ),
    *in_file(
        "explanation/findings.py",
        (
            "explain: a rule that another shadows is idle",
            "        if winners and not any(winner is rule for winner in winners):\n",
            "        if False:\n",
            "tests/explanation/test_explain_findings.py::test_shadowed_rules",
            "nothing would say that the order of rules is why",
        ),
        (
            "explain: a rule inside a composite goes unsaid",
            "            if reached:\n",
            "            if False:\n",
            "tests/explanation/test_explain_findings.py::test_a_rule_on_an_op_inside_a_composite",
            "a rule on softmax would be thought to hold inside attention",
        ),
        (
            "explain: a product in FP32 goes unsaid",
            '        if dtype == "float32":\n',
            '        if dtype == "float64":\n',
            "tests/explanation/test_explain_findings.py::test_products_that_stay_in_fp32_are_named_with_their_share",
            "most of a network's FLOPs could stay in FP32 without a word",
        ),
    ),
    *in_file(
        "explanation/fold.py",
        (
            "fold: a digit in a name is an index",
            "is_index = text.isascii() and text.isdecimal() and str(int(text)) == text",
            "is_index = text.isdecimal()",
            "tests/explanation/test_explanation.py::test_folds",
            "a.01 and a.1 would be one module",
        ),
        (
            "fold: two calls of one module are one row",
            "            turn += 1\n",
            "            break\n",
            "tests/explanation/test_explanation.py::test_folds",
            "a module's second call would be lost from a table",
        ),
    ),
    *in_file(
        "explanation/table.py",
        (
            "explain: names of modules move the cursor",
            "made.add_row(*(Text(printable(cell)) for cell in row))",
            "made.add_row(*(Text(cell) for cell in row))",
            "tests/explanation/test_explanation.py::test_names_of_modules_move_no_cursor",
            "a stranger's model could write over a terminal",
        ),
    ),
)
