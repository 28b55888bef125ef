"""Faults of sessions: the engine's four verbs, windows, the writes of a step, closures, and loops of the user's own."""

from .fault import Fault, in_file

_WINDOW = in_file(
    "session/window.py",
    (
        "window: micro-batches are summed low",
        "_widen(there)",
        "pass",
        "tests/session/test_windows.py::test_low_gradients_are_summed_in_fp32_from_the_second_pass_on",
        "from the second micro-batch on small gradients would be swallowed",
    ),
    (
        "window: two scales in one sum",
        "        self.rescale(scale)\n        self.made_with = scale\n",
        "        self.scale = self.made_with = scale\n",
        "tests/session/test_windows.py::test_a_window_that_stays_open_while_the_scale_moves_is_rescaled_in_fp32",
        "after the scale has moved, earlier micro-batches would count double or half",
    ),
    (
        "window: rescaled by the new scale alone",
        "factor = back if to is None else to if back is None else to * back",
        "factor = back if to is None else to",
        "tests/session/test_windows.py::test_a_window_that_stays_open_while_the_scale_moves_is_rescaled_in_fp32",
        "gradients would carry two scales",
    ),
    (
        "window: an overflow is forgotten between two optimizers",
        "or not self.has_left_alone() else [self._skipped]",
        "or not self.has_left_alone() else []",
        "tests/session/test_attach_loops.py::"
        "test_optimizers_of_the_same_weights_that_step_by_turns_skip_what_was_found_alike",
        "the second optimizer of a loop would train on infinities that were clipped to numbers",
    ),
    (
        "window: an overflow is forgotten",
        "self.found = found if self.found is None else self.found | found",
        "self.found = found",
        "tests/session/test_attach_loops.py::test_what_one_pass_has_found_is_skipped_with_the_next_ones",
        "what one pass has found would be lost with the next one",
    ),
    (
        "window: cleared gradients leave theirs behind",
        "        if not there:\n            self.forget()\n",
        "        if False:\n            pass\n",
        "tests/session/test_windows.py::test_clearing_all_begins_a_new_window",
        "an overflow of a window that was given up would skip the next step",
    ),
    (
        "window: the last step's gradients are taken again",
        "if self.left else ([], [])",
        "if False else ([], [])",
        "tests/session/test_windows.py::test_what_a_step_has_left_is_refused_before_gradients_mix",
        "without zero_grad() each step would take all gradients so far",
    ),
)

_ENGINE = in_file(
    "session/engine.py",
    (
        "engine: a failed loss moves the scale",
        "self.tell(verdict.found_inf, hold=judged.failed)",
        "self.tell(verdict.found_inf)",
        "tests/session/test_skips.py::test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_scale",
        "a batch with a NaN would halve the scale, which cures nothing",
    ),
    (
        "engine: a failed loss is stepped with",
        "        failed = failed | not_finite(loss)\n",
        "        pass\n",
        "tests/session/test_skips.py::test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_scale",
        "a loss of inf would be an overflow of the scale's",
    ),
    (
        "engine: what unscaling found is not asked",
        "    for flag in (*inner, *flags):\n        found_inf = found_inf | flag\n",
        "",
        "tests/session/test_windows.py::test_an_overflow_that_unscaling_has_found_skips_whatever_is_done_after",
        "gradients cleaned of an infinity by nan_to_num would be stepped with",
    ),
    (
        "engine: an overflowed penalty keeps the scale",
        "        failed = failed & ~flag\n",
        "        pass\n",
        "tests/session/test_penalties.py::test_a_penalty_that_overflowed_lowers_the_scale_though_the_loss_is_infinite",
        "the scale would never fall, and no step would ever be taken",
    ),
    (
        "engine: penalties keep the scale in them",
        "wide = [g if g is None else g * moved(back, g.device) for g in wide]",
        "pass",
        "tests/session/test_penalties.py::test_double_backward_in_fp32_is_torch_s_bit_for_bit",
        "a penalty 65536 times too large",
    ),
    (
        "engine: penalties are unscaled in FP16",
        "g.to(torch.promote_types(g.dtype, torch.float32)) for g in found]",
        "g for g in found]",
        "tests/session/test_penalties.py::test_parameters_as_inputs_have_fp32_gradients",
        "small slopes would be flushed to zero",
    ),
    (
        "engine: a scale moves under another window",
        "not self.waits and not waiting:",
        "not self.waits:",
        "tests/session/test_windows.py::test_steps_that_one_pass_feeds_count_once_for_the_scale",
        "of optimizers that step by turns the second would count as a step of its own",
    ),
    (
        "engine: optimizer.step() passes unseen",
        "        if gradients and not changes_nothing(optimizer.param_groups, gradients):\n",
        "        if False:\n",
        "tests/session/test_windows.py::test_gradients_made_without_the_session_are_not_stepped_with_unseen",
        "gradients 65536 times too large would be stepped with",
    ),
    (
        "engine: shared parameters have two windows",
        "near = [window for window in windows if not mine.isdisjoint(map(id, window.leaves()))]",
        "near = list[Window]()",
        "tests/session/test_windows.py::test_optimizers_that_share_parameters_step_together_and_by_turns",
        "shared gradients would be unscaled twice",
    ),
    (
        "engine: edits of scaled gradients go unsaid",
        "if any(window.scale is not None and window.was_edited for window in windows):",
        "if False:",
        "tests/session/test_windows.py::test_an_edit_of_scaled_gradients_is_warned_of_once",
        "a user's clipping would compare with gradients 65536 times too large, without a word",
    ),
    (
        "engine: edits of scaled gradients go unsaid beside max_grad_norm",
        "        if self._has_warned:\n",
        "        if self._has_warned or self.max_grad_norm is not None:\n",
        "tests/session/test_windows.py::test_an_edit_of_scaled_gradients_is_warned_of_once",
        "noise or a clip of one's own would be 65536 times too small",
    ),
    (
        "engine: the step tells the next scale",
        "scale=now if made_with is None else made_with,",
        "scale=state.scale,",
        "tests/session/test_stats.py::test_stats_are_what_a_book_kept_by_hand_says",
        "what is logged as the scale of a step would be that of the next",
    ),
    (
        "engine: a NaN for a learning rate",
        "        check_numbers(stepping)\n",
        "",
        "tests/session/test_refusals.py::test_a_call_that_is_refused_leaves_everything_as_it_was",
        "R18: NaN in every weight with torch's fused optimizers",
    ),
    (
        "engine: plain gradients stay scaled",
        "            if self.plain:\n                self._unscale(losses)\n",
        "",
        "tests/session/test_attach_loops.py::test_gradients_are_fp32_unscaled_and_true_after_each_pass",
        "loops of the user's own would see gradients 65536 times too large",
    ),
)

_INTERRUPTS = in_file(
    "session/engine.py",
    (
        "engine: Ctrl-C ends a step half-way",
        "            with uninterrupted():\n                if self.ranks.size == 1:\n",
        "            if True:\n                if self.ranks.size == 1:\n",
        "tests/session/test_interrupts.py::test_a_signal_at_some_lines_leaves_a_whole_step",
        "some weights would be those of the next step, and some not",
    ),
)

_UPDATE = in_file(
    "session/update.py",
    (
        "update: an overflow reaches plain optimizers",
        "skips = len(on_device) < len(optimizers) and bool(verdict.found_inf)",
        "skips = False",
        "tests/session/test_skips.py::test_a_skipped_step_writes_nothing_and_the_loop_goes_on",
        "NaN in every weight after the first overflow",
    ),
    (
        "update: fused optimizers see the scale",
        "grad_scale = (divisor[0] if divisor else judged.scale) if multiplies else None",
        "grad_scale = None",
        "tests/session/test_loop.py::test_o0_is_the_plain_loop",
        "steps with gradients 65536 times too large",
    ),
    (
        "update: plain optimizers see the scale",
        "    if others and not verdict.is_one:\n",
        "    if False:\n",
        "tests/session/test_loop.py::test_o0_is_the_plain_loop",
        "steps with gradients 65536 times too large",
    ),
    (
        "update: other optimizers step unseen",
        "if not any(id(param) in known for param in params)",
        "if True",
        (
            "tests/session/test_refusals.py::test_a_call_that_is_refused_leaves_everything_as_it_was",
            "tests/session/test_loop.py::test_an_optimizer_that_the_session_does_not_know_is_refused_and_changes_nothing",
        ),
        "an optimizer made later would step without a check, and past the FP32 values",
    ),
    (
        "update: fused SGD starts from garbage",
        "    if not isinstance(optimizer, torch.optim.SGD):\n",
        "    if True:\n",
        ("tests/session/test_skips.py", "tests/compat/test_torch_grad_scaler.py"),
        "a first step that is skipped would leave momentum uninitialised",
    ),
)

_CLOSURES = in_file(
    "session/closures.py",
    (
        "closures: state is not put back",
        "                for restore in restores:\n                    restore()\n",
        "",
        "tests/session/test_closures.py::test_an_overflow_puts_everything_back_and_halves_the_scale_once",
        "moments of a step that was undone would stay",
    ),
)

_ATTACH = (
    *in_file(
        "session/calls.py",
        (
            "attach: names of torch's stay bound where the first session ends first",
            "return found if isinstance(found, cls) and found.bound is now else cls(place, name)",
            "return cls(place, name)",
            "tests/session/test_attach.py::test_names_are_given_back_in_whatever_order_sessions_end",
            "each session would leave a frame in every later call, until Python's recursion ends",
        ),
    ),
    *in_file(
        "session/passes.py",
        (
            "attach: a power of the scale in penalties",
            "    if creates_graph:\n",
            "    if False:\n",
            "tests/session/test_refusals.py::test_a_call_that_is_refused_leaves_everything_as_it_was",
            "gradients of .grad would carry the scale squared",
        ),
        (
            "attach: inputs get scaled gradients",
            "return (gradient.float() * factor).to(gradient.dtype) if gradient.dtype in LOW else gradient * factor",
            "return gradient",
            "tests/session/test_attach_loops.py::test_leaves_that_no_optimizer_has_get_gradients_without_the_scale",
            "adversarial examples and saliency maps 65536 times too large",
        ),
        (
            "attach: inputs are unscaled in FP16",
            "(gradient.float() * factor).to(gradient.dtype) if gradient.dtype in LOW else gradient * factor",
            "gradient * factor.to(gradient.dtype)",
            "tests/session/test_attach_loops.py::test_low_leaves_that_no_optimizer_has_are_unscaled_in_fp32",
            "each gradient would have the error of 1/scale in sixteen bits",
        ),
        (
            "engine: a pass that has failed goes on",
            "self._engine.begin(new, self._scale, ref(self))",
            "self.kept = [self]\n            self._engine.begin(new, self._scale, ref(self))",
            "tests/compat/test_apex_losses.py::test_a_pass_that_fails_is_over_and_leaves_plain_gradients",
            "apex, Accelerate and Lightning would step with gradients that carry the scale",
        ),
        (
            "engine: gradients of apex's passes are differentiated again",
            "refuse_scaled((), (), creates_graph=is_grad_enabled())",
            "pass",
            "tests/compat/test_apex_losses.py::test_gradients_that_would_be_differentiated_again_are_refused",
            "a penalty on .grad would be the scale's square too large",
        ),
        (
            "engine: a pass that ends inside of its graph leaves the scale there",
            "            _refuse_stops(walk)\n",
            "            pass\n",
            "tests/compat/test_apex_losses.py::test_a_pass_that_is_told_to_end_inside_of_its_graph_is_refused",
            "the gradient of an activation would be 65536 times too large under apex, Accelerate and Fabric",
        ),
        (
            "engine: a loss counts for all optimizers",
            "windows = self._engine.reached(walk)",
            "windows = list(self._engine.windows)",
            "tests/compat/test_apex_losses.py::test_a_loss_that_is_not_finite_skips_the_models_that_it_reaches",
            "a generator would miss each step in which the critic's loss is infinite",
        ),
    ),
    *in_file(
        "session/session.py",
        (
            "five lines: inputs that backward is told get scaled gradients",
            "others = engine.others(walked([loss]).leaves if given is None else given)",
            "others = engine.others(walked([loss]).leaves) if given is None else []",
            "tests/session/test_windows.py::test_inputs_that_a_pass_is_told_get_gradients_without_the_scale",
            "adversarial examples 65536 times too large",
        ),
    ),
    *in_file(
        "session/calls.py",
        (
            "attach: methods but forward run in FP32",
            'and (name == "forward" or not hasattr(nn.Module, name))',
            'and name == "forward"',
            "tests/session/test_attached_methods.py::test_products_of_a_method_itself_run_low",
            "model.loss(x) would run nothing low, without a word",
        ),
        (
            "attach: what runs inside ends the region",
            "self._is_over or self._is_part(plain)",
            "self._is_over",
            "tests/session/test_attached_methods.py::test_what_comes_out_of_the_model_is_fp32_and_what_goes_on_inside_is_not",
            "activations between layers would be FP32",
        ),
        (
            "attach: where a graph breaks parts are called from outside",
            "            try:\n                with self._region():\n"
            "                    output = plain(*args, **kwargs)\n"
            "            finally:\n                self._here.inside = False\n",
            "            self._here.inside = False\n"
            "            with self._region():\n                output = plain(*args, **kwargs)\n",
            "tests/session/test_attached_methods.py::"
            "test_parts_of_what_is_compiled_anew_between_two_passes_of_a_step_are_parts",
            "a compiled model would compute other numbers than the same one uncompiled",
        ),
    ),
    *in_file(
        "session/attach.py",
        (
            "attach: schedulers run ahead",
            "return not begins and now[0] > total and now[1] == taken",
            "return False",
            "tests/session/test_attach_loops.py::test_schedulers_wait_where_a_step_was_skipped",
            "a warm-up would end early by each skipped step",
        ),
        (
            "attach: a GradScaler scales besides",
            "    if is_known and scaler.is_enabled() and not isinstance(scaler, SessionScaler)",
            "    if False and not isinstance(scaler, SessionScaler)",
            "tests/session/test_refusals.py::test_a_call_that_is_refused_leaves_everything_as_it_was",
            "gradients would carry two scales",
        ),
    ),
)

_STATE = (
    *in_file(
        "session/stats.py",
        (
            "stats: the lowest scale is the latest",
            "lowest_scale=min(scale, old.lowest_scale),",
            "lowest_scale=scale,",
            "tests/session/test_stats.py::test_stats_are_what_a_book_kept_by_hand_says",
            "a run whose scale fell and rose again would look healthy",
        ),
        (
            "stats: a session begins without its past",
            '        self._recent.extend(mark == "X" for mark in state["recent"])\n',
            "",
            "tests/session/test_stats.py::test_stats_are_what_a_book_kept_by_hand_says",
            "the share of skipped steps would be that since the last checkpoint",
        ),
        (
            "stats: a failed loss ends the run at once",
            "self._failures = self._failures + 1 if failed and not any(absent) else 0",
            "self._failures += bool(failed and not any(absent))",
            "tests/session/test_skips.py::test_losses_that_fail_in_a_row_end_the_run_and_single_ones_do_not",
            "failed losses would add up over a whole run",
        ),
    ),
)

_REFUSALS = in_file(
    "session/refusals.py",
    (
        "refusals: DataParallel is taken",
        "if any(isinstance(m, nn.DataParallel) for",
        "if any(False for",
        "tests/session/test_refusals.py",
        "replicas would run without casts, and the step would miss their gradients",
    ),
    (
        "refusals: state that would be rounded is taken",
        "if not held:\n",
        "if True:\n",
        "tests/session/test_refusals.py",
        "moments in FP32 would be rounded to the weights' dtype without a word",
    ),
    (
        "refusals: a session takes another's optimizer",
        'getattr(owner_of(hook), "guards", True)',
        "False",
        "tests/session/test_refusals.py",
        "two sessions would scale, check and clip the same gradients",
    ),
)

_CAPTURE = in_file(
    "session/capture.py",
    (
        "capture: a replay reads what the session has left",
        "            _refuse_changes(self._recorded.holds, _held(engine))\n",
        "",
        "tests/session/capture/test_replays.py::test_what_a_replay_would_not_follow_is_refused",
        "freed memory would be trained, or an old learning rate, without a word",
    ),
    (
        "capture: a step inside changes the learning rate",
        "        if changed := _changes(before, _options(engine.weights.optimizers, counts_writes=True)):\n",
        "        if changed := []:\n",
        "tests/session/capture/test_capture_refusals.py::test_what_a_train_step_may_not_do_is_refused_by_its_first_call",
        "a scheduler inside of the train step would never step again",
    ),
)

_FILES = in_file(
    "session/files.py",
    (
        "load: damaged records are handed out",
        "damaged = archive.testzip() or next(folders, None)",
        "damaged = next(folders, None)",
        "tests/session/test_files_read.py::test_every_flipped_bit_is_told_or_changes_nothing",
        "R18: a flipped bit in a weight would be another number",
    ),
    (
        "load: memory is handed out for a record",
        "damaged = archive.testzip() or next(folders, None)",
        "damaged = archive.testzip()",
        "tests/session/test_files_read.py::test_a_record_that_one_bit_calls_a_folder_is_damaged",
        "one flipped bit in a list of records, and torch returns whatever memory holds",
    ),
    (
        "save: no checksums where others want none",
        "    set_crc32_options(True)",
        "    pass",
        "tests/session/test_files_read.py::test_checksums_are_written_whatever_other_files_have",
        "damage would not be seen",
    ),
    (
        "load: programs are run",
        "weights_only=weights_only, mmap=False",
        "weights_only=False, mmap=False",
        "tests/session/test_files_read.py::test_what_is_no_weight_is_refused_unless_it_is_asked_for",
        "a checkpoint from elsewhere would run what it likes",
    ),
)

_RANKS = in_file(
    "distributed/exchange.py",
    (
        "ranks: norms of shards are added, not their squares",
        "norms.index_select(0, at).double().square())",
        "norms.index_select(0, at).double())",
        "tests/distributed/test_exchange.py::test_norms_of_shards_become_those_of_whole_gradients",
        "clipping would depend on the number of ranks",
    ),
    (
        "ranks: a rank that is absent is not waited for",
        'if numbers.device.type == "cpu" and (error',
        "if False and (error",
        "tests/distributed/test_exchange.py",
        "ranks would drift apart after an error on one of them",
    ),
    (
        "ranks: sums beyond FP32 stay finite",
        "whole = squares.masked_fill(squares > _LARGEST, torch.inf).sqrt().float()",
        "whole = squares.sqrt().float()",
        "tests/distributed/test_exchange.py::test_what_one_rank_finds_holds_on_all_and_an_absent_rank_ends_the_step_of_all",
        "several ranks would take a step that one skips",
    ),
)

FAULTS: tuple[Fault, ...] = (
    *_WINDOW,
    *_ENGINE,
    *_INTERRUPTS,
    *_UPDATE,
    *_CLOSURES,
    *_ATTACH,
    *_STATE,
    *_REFUSALS,
    *_CAPTURE,
    *_FILES,
    *_RANKS,
)
