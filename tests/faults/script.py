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
            "script: half of a copy ends the run",
            'if id(module) not in parents and "_modules" in vars(module):',
            "if id(module) not in parents:",
            "tests/script/test_gathering.py::test_when_a_session_begins_and_ends",
            "a script that has tried to copy its model would end in an AttributeError of mezzo's",
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
    *in_file(
        "script/comparison.py",
        (
            "compare: FP32 that failed once is kept",
            'return code == 0 or (code != _INTERRUPTED and not is_base and bool(summary.get("steps")))',
            "return True",
            "tests/script/test_comparison.py::"
            "test_a_run_that_was_killed_or_into_which_two_have_written_is_repeated_alone",
            "a run that was killed would stand in the table as it is",
        ),
        (
            "compare: a changed script goes on in its folder",
            "            if different := [name for name in mine if mine[name] != theirs.get(name)]:\n",
            '            if different := [name for name in mine if name == "script" and mine[name] != theirs.get(name)]:\n',
            "tests/script/test_comparison.py::test_a_folder_of_another_script_is_refused_and_kept",
            "runs of two scripts would be compared with each other",
        ),
        (
            "compare: two comparisons have one folder",
            "                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
            "                pass\n",
            "tests/script/test_comparison.py::test_a_folder_belongs_to_one_comparison_at_a_time",
            "each would write over the other's runs",
        ),
        (
            "compare: what mezzo alarms at has failed",
            'code = summary.get("exit_code", code)',
            "code = code",
            "tests/script/test_comparison.py::test_a_policy_at_which_mezzo_alarms_has_not_failed",
            "a policy under which nothing ran low would be said to crash the script",
        ),
        (
            "compare: seeds that change nothing prove something",
            "if len(runs) > 1 and runs[-1].losses == runs[0].losses:",
            "if False:",
            "tests/script/test_comparison.py::test_a_script_that_cannot_be_compared_is_refused_in_one_sentence",
            "an interval would be zero wide, and every policy equal",
        ),
    ),
    *in_file(
        "script/metric.py",
        (
            "compare: the first number of a line is the metric",
            "    for found in _NUMBER.finditer(line):\n        if _END",
            "    for found in _NUMBER.finditer(line):\n        if True or _END",
            "tests/script/test_metric.py::test_a_last_line_is_read_as_a_reader_reads_it",
            "the number of the epoch would be compared",
        ),
        (
            "compare: a time is a metric",
            'line = _TIME.sub("", last_line(text))',
            "line = last_line(text)",
            "tests/script/test_metric.py::test_other_last_lines_are_no_metric",
            "policies would be judged by the seconds they took",
        ),
    ),
    *in_file(
        "script/program.py",
        (
            "script: names of torch stay replaced",
            "        self.callback(setattr, place, name, vars(place)[name])\n",
            "",
            "tests/script/test_program.py::test_every_name_is_the_original_object_again",
            "what runs after a script in one process would run under its policy",
        ),
        (
            "script: sys.path stays the script's",
            'sys.argv, sys.path[:], sys.modules["__main__"] = words, path, main',
            'sys.argv, sys.modules["__main__"] = words, main',
            "tests/script/test_program.py::test_every_name_is_the_original_object_again",
            "imports after a script would find its neighbours",
        ),
    ),
    *in_file(
        "script/run.py",
        (
            "script: tracebacks begin in mezzo",
            "error = raised.with_traceback(own_traceback(raised))",
            "error = raised",
            "tests/script/test_program.py::test_what_a_script_raises_has_the_traceback_of_the_script_alone",
            "a script's own error would look like one of mezzo's",
        ),
    ),
    *in_file(
        "script/own_amp.py",
        (
            "script: a region that is switched off is on",
            'if is_script() and given.get("enabled", True):',
            "if is_script():",
            "tests/script/test_gathering.py::test_regions_of_the_script",
            "an island in FP32 would run low without a word",
        ),
        (
            "script: the script's scaler scales too",
            "            return outputs\n",
            "            return super().scale(outputs)\n",
            "tests/script/test_gathering.py::test_a_scaler_tells_the_sessions_scale_and_unscales_by_it",
            "gradients would carry the script's scale, and no step take it out",
        ),
        (
            "script: a checkpoint's scale is not taken",
            "                gathering.resume(state_dict)\n",
            "                pass\n",
            "tests/script/test_gathering.py::"
            "test_a_script_that_resumes_goes_on_bit_for_bit_with_the_scale_and_its_clean_steps",
            "a resumed script begins with a scale that overflows",
        ),
    ),
    *in_file(
        "script/report.py",
        (
            "script: most steps skipped is no alarm",
            "        if 2 * self.skipped > self.steps:\n",
            "        if self.skipped < 0:\n",
            "tests/script/test_report.py::test_a_run_that_skips_most_of_its_steps_is_an_alarm",
            "a run that hardly trained would end with 0",
        ),
        (
            "script: a script does not end after its steps",
            "        if self._report.steps == self._most:\n",
            "        if False:\n",
            "tests/script/test_comparison.py::test_without_a_metric_line_it_is_the_training_loss",
            "--steps would be ignored",
        ),
        (
            "script: the loss of a step is that of the last one",
            "        self._loss, self._began = None, now\n",
            "        self._began = now\n",
            "tests/script/test_comparison.py::test_runs_are_those_of_the_script_and_numbers_those_of_its_files",
            "a run's curve would be a straight line",
        ),
    ),
)
