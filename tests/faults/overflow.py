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
            "tests/overflow/test_parts.py::test_what_is_meant_is_blamed_last",
            "an attention mask's -inf would be the first non-finite tensor",
        ),
    ),
    *in_file(
        "overflow/diagnose.py",
        (
            "overflow: a scale of one step less",
            "    return 2.0**low\n",
            "    return 2.0**high\n",
            "tests/overflow/test_parts.py::test_the_highest_scale_is_the_one_that_trying_all_finds",
            "the cure would overflow again",
        ),
    ),
    *in_file(
        "overflow/search.py",
        (
            "overflow: every origin is blamed at once",
            "            not origin.may_be_meant or any(end.numel() == 1 and not is_finite(end) for end in ends)\n",
            "            True\n",
            "tests/overflow/test_search.py::test_what_leads_nowhere_and_outputs_of_every_kind",
            "masked logits that stand beside the loss would be called an overflow",
        ),
        (
            "overflow: a scale below 1 cures float32",
            "is_cure = origin.dtype == torch.float16 or (lowered or 0) >= 1",
            "is_cure = True",
            "tests/overflow/test_search.py::test_a_gradient_that_grows_without_any_scale",
            "a gradient without bound would be hidden by a scale",
        ),
        (
            "overflow: a search leaves gradients behind",
            "with untouched(models), search.hooked():",
            "with search.hooked():",
            "tests/overflow/test_search.py::test_everything_is_as_it_was",
            "locating an overflow would change batch norm and the random numbers to come",
        ),
    ),
    *in_file(
        "overflow/watch.py",
        (
            "overflow: the last of several is blamed",
            "found = min(sources, key=lambda origin: origin.rank)",
            "found = max(sources, key=lambda origin: origin.rank)",
            "tests/overflow/test_parts.py::test_the_first_of_several_is_blamed",
            "a consequence would be reported for the cause",
        ),
        (
            "overflow: a masked row is the mask's fault",
            '                return self._add("masked", ran.kernel, ran.result, ran.read)\n',
            "                return found\n",
            "tests/overflow/test_causes.py::test_masks_and_what_the_code_writes",
            "NaN of a row that is wholly masked would be blamed on the code's -inf",
        ),
        (
            "overflow: what a kernel read is looked at after it has run",
            "        return measure.operands(kernel, args, kwargs)\n",
            "        return []\n",
            "tests/overflow/test_parts.py::test_a_number_has_one_origin_however_far_it_is_handed_on",
            "each kernel that hands an infinity on would be its origin",
        ),
    ),
    *in_file(
        "overflow/diagnose.py",
        (
            "overflow: the cure is the policy that runs",
            'kept = {name: value for name, value in kept.items() if value != policy.dtype and name != "loss_scale"}',
            'kept = {name: value for name, value in kept.items() if name != "loss_scale"}',
            "tests/overflow/test_causes.py::test_the_cure_of_a_forward_overflow",
            "who casts outputs to float16 would be told to go on with that",
        ),
        (
            "overflow: a rule for the reader alone",
            "modules = [origin.module, *(each.module for each in origin.readers if each.is_low or not context.autocasts)]",
            "modules = [origin.module]",
            "tests/overflow/test_causes.py::test_the_cure_of_a_forward_overflow",
            "the next layer would cast the number to float16 again",
        ),
        (
            "overflow: a number below the format's range is beyond it",
            "return f\"{what} {origin.needed:.6g}, {beyond}{'' if factor < 1.05 else f', by a factor of {factor:.3g}'}\"",
            'return f"{what} {origin.tensor.largest:.6g}, {beyond}"',
            "tests/overflow/test_causes.py::test_what_no_format_holds",
            "a report would say that 0.999975 is beyond 3.38953e+38",
        ),
        (
            "overflow: a floor does not stop a scale",
            'if scale is not None and scale.mode == "dynamic" and scale.floor > lowered:',
            "if False:",
            "tests/overflow/test_causes.py::test_a_scale_below_one",
            "a user would wait for a scale that never comes down so far",
        ),
    ),
    *in_file(
        "overflow/replay.py",
        (
            "replay: changed inputs are run all the same",
            "        return mark(self.tensor) != self.mark\n",
            "        return False\n",
            "tests/overflow/test_replay.py::test_inputs_changed_meanwhile_are_reported",
            "another step than the one that overflowed would be explained",
        ),
        (
            "replay: other random numbers are drawn",
            "        call.states.restore()\n",
            "",
            "tests/overflow/test_replay.py::test_the_same_random_numbers_are_drawn",
            "what dropout had made infinite would not be found again",
        ),
        (
            "replay: gradients that are cleared between the passes cost the step",
            "return not self.arrivals and self.graph is not None and self.graph() is not None",
            "return False",
            "tests/overflow/test_calls.py::test_a_forward_pass_that_waits_survives_clearing",
            "zero_grad between forward and backward would leave nothing to explain",
        ),
        (
            "replay: an evaluation piles up",
            "self.events = [event for event in self.events if event.call.arrivals or event.call.is_pending]",
            "self.events = list(self.events)",
            "tests/overflow/test_calls.py::test_nothing_piles_up_in_an_evaluation",
            "an evaluation without no_grad would fill the memory",
        ),
        (
            "replay: inputs live on after clearing",
            "        self.events = [event for event in self.events if event.call not in done]\n",
            "        self.events = list(self.events)\n",
            "tests/overflow/test_calls.py::test_inputs_and_output_gradients_live_until_cleared",
            "each step's batch would stay in memory",
        ),
    ),
)
