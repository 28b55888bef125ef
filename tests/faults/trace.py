"""Faults of ``trace/`` that its own tests are to catch; ``explanation.py`` and ``overflow.py`` have more."""

from .fault import in_file

_TESTS = "tests/trace/test_trace.py::test_"

FAULTS = (
    *in_file(
        "trace/where.py",
        (
            "trace: a backward kernel belongs to the module before",
            "bisect_right(self._timeline, node._sequence_nr(), key",
            "bisect_right(self._timeline, node._sequence_nr() - 1, key",
            _TESTS + "each_kernel_belongs_to_the_module_that_runs_or_whose_backward_pass_runs",
            "explain and locate would name the wrong layer",
        ),
        (
            "trace: recomputation counts as gradients",
            "return self.is_backward and not recomputes",
            "return self.is_backward",
            _TESTS + "each_kernel_belongs_to_the_module_that_runs_or_whose_backward_pass_runs",
            "an overflow of an activation would be called one of a gradient",
        ),
    ),
    *in_file(
        "trace/modes.py",
        (
            "trace: a module's hooks stay",
            "                    hooks.callback(handle.remove)\n",
            "                    pass\n",
            _TESTS + "each_kernel_belongs_to_the_module_that_runs_or_whose_backward_pass_runs",
            "a model that was explained would be watched for ever",
        ),
    ),
    *in_file(
        "trace/names.py",
        (
            "trace: a part of a buffer has no name",
            "for candidate in (tensor, tensor._base):",
            "for candidate in (tensor,):",
            _TESTS + "names_are_those_of_what_is_viewed_or_cast",
            "an overflow in a table would be called one of an input",
        ),
        (
            "trace: a weight that is used again has no name",
            "hands_on = name in _SAME_NUMBERS or is_further_use(node)",
            "hands_on = name in _SAME_NUMBERS",
            _TESTS + "names_are_those_of_what_is_viewed_or_cast",
            "the second use of a tied weight would be an input",
        ),
    ),
    *in_file(
        "trace/products.py",
        (
            "trace: emulated products are FP32",
            '"emulated" if doing() == "emulation" else dtype_name(counted[1])',
            "dtype_name(counted[1])",
            _TESTS + "operations_of_products_are_counted_by_the_format_that_they_read",
            "doctor would say of each emulated format that nothing ran in it",
        ),
    ),
    *in_file(
        "trace/sandbox.py",
        (
            "trace: NumPy draws on",
            "        np.random.set_state(self.numpy)\n",
            "",
            _TESTS + "a_pass_in_the_sandbox_leaves_everything_as_it_was",
            "explaining a model would change what a program draws after it",
        ),
        (
            "trace: optimizers in the backward pass step",
            "                leaf._post_accumulate_grad_hooks = {}  # None would leave the hooks where they run\n",
            "                pass\n",
            _TESTS + "a_pass_in_the_sandbox_leaves_everything_as_it_was",
            "locating an overflow would train the model",
        ),
        (
            "trace: another buffer stays in a buffer's place",
            "            table.clear()\n            table.update(before)\n",
            "            pass\n",
            _TESTS + "a_pass_in_the_sandbox_leaves_everything_as_it_was",
            "a cache that a pass replaces would be the model's afterwards",
        ),
    ),
    *in_file(
        "trace/measure.py",
        (
            "trace: what is not finite counts as zero",
            "num_zeros=finite.numel() - positive.numel(),",
            "num_zeros=magnitudes.numel() - positive.numel(),",
            _TESTS + "a_range",
            "a report would count infinities as zeros",
        ),
        (
            "trace: what is written is measured afterwards",
            "tensor.clone() if is_written else tensor, tensor))",
            "tensor, tensor))",
            _TESTS + "what_a_kernel_reads",
            "locate would blame the numbers that an in-place op has made",
        ),
        (
            "trace: the format that overflowed is said to hold it",
            "if torch.finfo(wider).bits > torch.finfo(dtype).bits:",
            "if torch.finfo(wider).bits >= 64:",
            _TESTS + "the_format_that_holds_a_result",
            "the cure of an FP16 overflow would be FP64",
        ),
    ),
)
