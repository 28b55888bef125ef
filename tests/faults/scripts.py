"""Faults in what runs an unmodified script."""

from __future__ import annotations

from .fault import Fault, in_file

GATHERING = "tests/script/test_gathering.py"

FAULTS: tuple[Fault, ...] = (
    *in_file(
        "script/gathering.py",
        (
            "script: the loss scale begins anew where parameters thaw",
            "                self.amp.engine.scaler.load_state_dict(self._scale)\n",
            "                pass\n",
            f"{GATHERING}::test_the_loss_scale_goes_on_where_parameters_thaw_and_begins_anew_with_a_new_model",
            "a run that thaws its layers skips steps until the scale has come down again",
        ),
        (
            "script: gradients are dropped where a session begins anew",
            "            param.grad = gradient.to(param.dtype)\n",
            "            pass\n",
            f"{GATHERING}::test_a_late_optimizer_joins_with_the_gradients_that_others_have",
            "a new optimizer would cost the accumulation window of the others",
        ),
        (
            "script: a session begins in an evaluation",
            " and torch.is_grad_enabled()\n",
            "\n",
            f"{GATHERING}::test_a_forward_pass_without_gradients_begins_nothing",
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
    *in_file(
        "session/engine.py",
        (
            "session: a gathered parameter is a leaf of others",
            "not (leaf in parts and id(parts[leaf]) in known)",
            "True",
            "tests/distributed/test_sharded_sessions.py"
            "::test_gathered_parameters_are_no_leaves_of_others_and_are_unscaled_once",
            "gradients of fully_shard's models would be divided by the loss scale twice",
        ),
    ),
)
