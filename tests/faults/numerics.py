"""Faults of ``numerics/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "numerics/histogram.py",
        (
            "histogram: the best scale overflows",
            "return scale if scale * largest < target.max else scale / 2",
            "return scale",
            "tests/numerics/test_histogram.py::test_the_best_scale_is_the_largest_power_of_two_below_the_limit",
            "the scale that it proposes would make the largest value infinite",
        ),
        (
            "histogram: the largest is added up",
            "            total[LARGEST] = largest\n",
            "",
            "tests/numerics/test_histogram.py::test_what_a_histogram_tells",
            "sums of histograms would have another largest value",
        ),
    ),
    *in_file(
        "numerics/counting.py",
        (
            "histogram: a power of two in the bin below",
            "return torch.sub(bits >> 23, up)",
            "return torch.sub(bits >> 23, up - (bits == 1 << 30).int())",
            "tests/numerics/test_histogram.py::test_every_value_is_counted_in_its_bin",
            "a number that is exactly 2 would be counted as one above it",
        ),
        (
            "histogram: subnormals a binade too high",
            "(FIRST if is_subnormal else 0)",
            "(FIRST + 1 if is_subnormal else 0)",
            "tests/numerics/test_histogram.py::test_every_value_is_counted_in_its_bin",
            "what BF16 flushes would be counted as kept",
        ),
        (
            "histogram: the largest may be infinite",
            "    if not is_on_cpu or counts[2 * 255 :].any():\n",
            "    if not is_on_cpu:\n",
            "tests/numerics/test_histogram.py::test_every_value_is_counted_in_its_bin",
            "the best scale would be that of an infinity",
        ),
    ),
    *in_file(
        "numerics/evidence_file.py",
        (
            "evidence: half a line is read",
            'if line.endswith("\\n"):',
            "if line:",
            "tests/numerics/test_evidence.py::test_a_file_gives_back_what_was_written_and_of_a_killed_run_all_whole_lines",
            "the evidence of a killed run would be refused",
        ),
    ),
    *in_file(
        "numerics/recording/step.py",
        (
            "recorder: gradients of a session stay scaled",
            "factor = None if judged.scale is None else inverse(judged.scale)",
            "factor = None",
            "tests/numerics/test_recorder.py::test_a_session_tells_of_its_steps_by_itself",
            "what formats lose would be asked of gradients times 65536",
        ),
    ),
    *in_file(
        "numerics/recording/subject.py",
        (
            "recorder: a compiled model is taken for one in eager mode",
            "if compiled or self.is_compiled:",
            "if compiled:",
            "tests/numerics/test_refusals.py::test_compiled_modules_where_activations_alone_are_wanted",
            "hooks would be put into compiled code, and nothing said",
        ),
    ),
    *in_file(
        "numerics/diagnosis.py",
        (
            "diagnosis: FP16 is judged without a scale",
            "unscaled, scaled = (_Kept.of(whole, each) for each in (1.0, scale))",
            "unscaled, scaled = (_Kept.of(whole, each) for each in (1.0, 1.0))",
            "tests/numerics/test_diagnosis.py::test_small_gradients_need_the_highest_scale_that_fits",
            "FP16 would be called unsafe where a loss scale makes it safe",
        ),
    ),
    *in_file(
        "numerics/moves.py",
        (
            "swallowed: a tie always stays",
            "stays = (twice < gap) | ((twice == gap) & (target.round(total) == stored))",
            "stays = twice <= gap",
            "tests/numerics/test_histogram.py::test_swallowed_updates_are_those_of_the_definition",
            "updates that count would be counted as lost",
        ),
    ),
    *in_file(
        "numerics/tuning/shadow.py",
        (
            "tune: rounding noise is judged",
            "if size > _NOISE * max(",
            "if size > 0.0 * max(",
            "tests/numerics/test_tune.py::test_what_fp32_itself_rounds_away_is_not_judged",
            "a bias before a softmax would be pinned for its noise",
        ),
        (
            "tune: trials drop",
            'return args[0] if args else kwargs["input"]',
            "return func(*args, **kwargs)",
            "tests/numerics/test_tuning_search.py::test_dropout_drops_nothing_in_trials",
            "on a GPU two precisions would drop other elements",
        ),
    ),
    *in_file(
        "numerics/recording/watches.py",
        (
            "recorder: gradients of activations stay scaled",
            "row = self._tally.count(gradient, self._factor())",
            "row = self._tally.count(gradient)",
            "tests/numerics/test_recorder.py::test_a_loop_of_torchs_scaler_is_recorded_unscaled",
            "what FP16 would lose is asked of gradients that carry the scale",
        ),
        (
            "recorder: evaluation is counted",
            "counts = self._model.training and torch._C._current_graph_task_id() == -1",
            "counts = torch._C._current_graph_task_id() == -1",
            "tests/numerics/test_recorder.py::test_evaluation_is_not_counted_whether_gradients_are_off_or_not",
            "activations of an evaluation would be added to those of training",
        ),
        (
            "recorder: what a checkpoint runs again is counted twice",
            "counts = self._model.training and torch._C._current_graph_task_id() == -1",
            "counts = self._model.training",
            "tests/numerics/test_recorder.py::test_what_checkpointing_runs_again_is_counted_once",
            "each activation of a checkpointed block would count twice",
        ),
        (
            "recorder: weights are their low halves",
            "yield param, param.detach() if owner is None else owner.read(param)",
            "yield param, param.detach()",
            "tests/numerics/test_recorder.py::test_weights_in_halves_have_updates_in_fp32_without_a_session",
            "small updates would be told as swallowed though their FP32 value moved",
        ),
    ),
    *in_file(
        "numerics/recording/step.py",
        (
            "recorder: a skipped step has updates",
            'if not (is_skipped and place[0] == "updates")',
            "",
            "tests/numerics/test_recorder.py::test_a_skipped_step_has_no_updates_and_counts_what_is_not_finite",
            "updates of zero would dilute the share that is swallowed",
        ),
        (
            "recorder: a closure's first evaluation begins no step",
            "        if is_first:\n            recording.weights.before(self._moved)\n",
            "        recording.weights.before(self._moved)\n",
            "tests/numerics/test_recorder.py::test_closures_count_their_last_evaluation_and_the_whole_update",
            "of LBFGS only the last piece of its update would be recorded",
        ),
    ),
    *in_file(
        "numerics/recording/recorder.py",
        (
            "recorder: each step is recorded",
            "if self._taken % self._choices.every == 0:",
            "if self._taken:",
            "tests/numerics/test_recorder.py::test_hooks_are_there_in_recorded_steps_only_and_nothing_outlives_the_block",
            "a recorder that is asked for every fiftieth step would cost fifty times as much",
        ),
    ),
    *in_file(
        "numerics/evidence.py",
        (
            "evidence: a tied weight is not found",
            "                    places.add((owner, name))\n",
            "                    pass\n",
            "tests/numerics/test_evidence.py::test_histograms_are_summed_over_modules_steps_and_kinds",
            "nothing would be known of a head that shares its weight with the embedding",
        ),
        (
            "evidence: the newest step is all of them",
            'if found and step == "newest":',
            'if found and step == "last":',
            "tests/numerics/test_evidence.py::test_histograms_are_summed_over_modules_steps_and_kinds",
            "a run's beginning would hide what its end is like",
        ),
    ),
    *in_file(
        "numerics/histogram.py",
        (
            "histogram: whether anything overflows is interpolated",
            "overflow = max(finite - below[2], 1) if beyond else 0",
            "overflow = finite - below[2]",
            "tests/numerics/test_histogram.py::test_coverage_is_that_of_the_tensor_or_says_that_it_is_interpolated",
            "a single number beyond FP16 would be rounded to none",
        ),
        (
            "histogram: a coverage claims to be exact",
            "return count + powers[place] + round(between[place] * (2.0 * fraction - 1.0)), not between[place]",
            "return count + powers[place] + round(between[place] * (2.0 * fraction - 1.0)), True",
            "tests/numerics/test_histogram.py::test_coverage_is_that_of_the_tensor_or_says_that_it_is_interpolated",
            "an estimate would be taken for a count",
        ),
    ),
    *in_file(
        "numerics/faults.py",
        (
            "diagnosis: a mask is a fault",
            "return any(each.histogram.nans or name_of(each) not in masks for each in found)",
            "return bool(found)",
            "tests/numerics/test_diagnosis.py::test_masks_are_no_fault_and_nans_are",
            "each attention mask would end with 4",
        ),
        (
            "diagnosis: a mask hides NaN weights",
            'return found[0].kind == "weights" or _spoils_weights(step)',
            "return _spoils_weights(step)",
            "tests/numerics/test_diagnosis.py::test_a_mask_in_an_early_step_does_not_hide_what_spoils_a_later_one",
            "weights that are NaN would be said to be fine",
        ),
    ),
    *in_file(
        "numerics/diagnosis.py",
        (
            "diagnosis: modules around the culprit are blamed",
            'own = [name for name in beyond if not any(other.startswith(f"{name}.") for other in beyond)]',
            "own = list(beyond)",
            "tests/numerics/test_diagnosis.py::test_what_overflows_without_a_loss_scale_is_named_and_bf16_is_what_to_write",
            "the whole model would be named for one layer's overflow",
        ),
        (
            "diagnosis: what training does not need makes FP16 unsafe",
            "needed = _NEEDED if whole.max_abs >= 2.0**_SMALLEST else FIRST",
            "needed = FIRST",
            "tests/numerics/test_diagnosis.py::test_what_lies_below_all_that_training_needs_makes_no_format_unsafe",
            "nearly every network would be told that FP16 is not safe",
        ),
        (
            "diagnosis: gradients of skipped steps count",
            "if not (step.skipped and each.kind in GRADIENTS):",
            "if True:",
            "tests/numerics/test_diagnosis.py::test_gradients_that_fit_need_no_loss_scale",
            "an infinity that a scale has skipped would be taken for the run's own",
        ),
    ),
    *in_file(
        "numerics/footprint.py",
        (
            "footprint: views count again",
            "if storage.nbytes() and storage.data_ptr() not in seen:",
            "if storage.nbytes():",
            "tests/numerics/test_footprint.py::test_saved_bytes_are_those_of_activations_each_storage_once",
            "a policy would seem to keep more bytes than it does",
        ),
    ),
    *in_file(
        "numerics/tuning/shadow.py",
        (
            "tune: a batch is written to",
            "        return copy.deepcopy(batch)\n",
            "        return batch\n",
            "tests/numerics/test_tune.py::test_what_else_a_loss_is_made_of_and_batches_are_left_as_they_were",
            "each trial would meet what the one before has left",
        ),
        (
            "tune: gradients stay scaled",
            "param.grad.to_dense().detach().float() / scale",
            "param.grad.to_dense().detach().float()",
            "tests/numerics/test_tune.py::test_a_healthy_network_needs_nothing",
            "every policy with a loss scale would seem to be far from FP32",
        ),
    ),
    *in_file(
        "numerics/tuning/selection.py",
        (
            "tune: a rule's reason is not kept",
            "said = (dataclasses.replace(rule, reason=why)",
            'said = (dataclasses.replace(rule, reason="")',
            "tests/numerics/test_tune.py::"
            "test_the_result_prints_the_answer_first_goes_to_files_and_back_and_the_model_is_left_as_it_was",
            "a policy file would not say why",
        ),
        (
            "tune: the loss scale begins where it always does",
            "        if policy.loss_scale != plain or scale == DEFAULT_SCALE:\n",
            "        if True:\n",
            "tests/numerics/test_tune.py::test_where_a_loss_scale_is_enough_it_is_the_answer",
            "the first steps under the policy would be skipped",
        ),
        (
            "tune: pins are written for all modules",
            "        rules.insert(0, Rule(treatment, op=op, module=_glob(module)))\n",
            "        rules.insert(0, Rule(treatment, op=op))\n",
            "tests/numerics/test_tuning_search.py::test_pins_mean_exactly_what_is_chosen",
            "ops would be kept in FP32 that lose nothing",
        ),
    ),
    *in_file(
        "numerics/tuning/trial.py",
        (
            "tune: an update of noise is no fault",
            "return self.sqnr_db < FAULT_DB or (self.updates_db is not None and self.updates_db < _UPDATES_DB)",
            "return False",
            "tests/numerics/test_tune.py::test_planted_faults_are_pinned_exactly",
            "no op would ever be pinned",
        ),
    ),
)
