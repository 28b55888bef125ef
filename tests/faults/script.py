"""Faults of ``script/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "script/dry.py",
        (
            "explain: the loss of a script is not heard of",
            '        seams.replace(nn.functional, "cross_entropy", cross_entropy)\n',
            "",
            "tests/cli/test_cli_explain.py::test_findings_of_a_script_and_of_the_loss_outside_its_model",
            "the cast of the logits would never be named for a script",
        ),
    ),
    *in_file(
        "script/gathering.py",
        (
            "script: the loss scale begins anew where parameters thaw",
            "                self.amp.engine.scaler.load_state_dict(self._scale)\n",
            "                pass\n",
            "tests/script/test_gathering.py::test_the_loss_scale_goes_on_where_parameters_thaw_and_begins_anew_with_a_new_model",
            "a run that thaws its layers skips steps until the scale has come down again",
        ),
        (
            "script: gradients are dropped where a session begins anew",
            "            param.grad = gradient.to(param.dtype)\n",
            "            pass\n",
            "tests/script/test_gathering.py::test_a_late_optimizer_joins_with_the_gradients_that_others_have",
            "a new optimizer would cost the accumulation window of the others",
        ),
        (
            "script: a session begins in an evaluation",
            " and torch.is_grad_enabled()\n",
            "\n",
            "tests/script/test_gathering.py::test_when_a_session_begins_and_ends",
            "weights would be stored low before the script has loaded its checkpoint",
        ),
    ),
    *in_file(
        "script/report.py",
        (
            "script: O0 is an alarm",
            "        if self.low_share or not self._asks_for_low:\n",
            "        if self.low_share:\n",
            "tests/script/test_report.py::test_a_run_in_fp32_that_was_asked_for_is_no_alarm",
            "a run in FP32 that was asked for would end with 4",
        ),
    ),
)
