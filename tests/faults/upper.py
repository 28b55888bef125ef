"""Faults of the upper rooms: casting and evidence."""

from .fault import Fault, in_file

_ASKED = "tests/explanation/test_explain_asked.py"

_CAST = (
    *in_file(
        "cast/emulate.py",
        (
            "emulation: the gradient's product is low",
            "gradient = gradients[0].float()  # (..., n, m)",
            "gradient = gradients[0].float().bfloat16().float()",
            "tests/cast/test_emulate.py::test_results_and_gradients_are_within_the_fp32_accumulation_bound",
            "three bits of every FP16 gradient",
        ),
        (
            "emulation: the bias is rounded apart",
            "None if bias is None else bias.float()).to(x.dtype)",
            "None).to(x.dtype) + (0 if bias is None else bias)",
            "tests/cast/test_emulate.py::test_a_bias_is_added_before_the_one_rounding",
            "two roundings where a tensor core has one",
        ),
        (
            "emulation: dropout draws again",
            "state = torch.get_rng_state() if _draws(args, kwargs) else None",
            "state = None",
            "tests/cast/test_emulate.py::test_dropout_inside_attention_is_the_same_in_the_backward_pass",
            "the backward pass of attention would drop other elements",
        ),
    ),
    *in_file(
        "cast/weight_casts.py",
        (
            "casts: an edited weight is not seen",
            "found is None or found.mark != mark(param)",
            "found is None",
            "tests/cast/test_weight_casts.py::test_a_write_inside_a_region_is_seen",
            "P1: a weight that was written would be used as it was",
        ),
        (
            "casts: several uses add up low",
            "return cast(Tensor, _FurtherUse.apply(param, found)) if trains else found.cast",
            "return found.cast",
            "tests/cast/test_weight_casts.py::test_each_use_widens_its_own_gradient",
            "gradients of a weight that is used several times would be summed in sixteen bits",
        ),
    ),
    *in_file(
        "cast/mode.py",
        (
            "region: a mode is compiled by itself",
            "    dynamo.set_code_exec_strategy(function.__code__, strategy)\n",
            "",
            "tests/cast/test_compiled_regions.py::test_where_torch_leaves_a_function_to_python_it_computes_what_uncompiled_code_does",
            "compiled code would run another function's graph, and leave regions open: wrong tensors ever after",
        ),
        (
            "region: compiled code outlives hooks",
            "dynamo.reset_code_caches()",
            "pass",
            "tests/cast/test_compiled_regions.py::test_another_policy_of_a_compiled_model_is_seen",
            "a compiled model would go on without the rules of its new policy",
        ),
        (
            "casts: they outlive their region",
            "WeightCasts() if kept is None else kept",
            'acting.__dict__.setdefault("casts", WeightCasts())',
            "tests/cast/test_weight_casts.py::test_an_edit_between_two_passes_of_a_step_is_seen_by_the_second",
            "P1: weights swapped through .data would not be seen",
        ),
        (
            "region: regions around it act too",
            "mode.shadows += 1",
            "mode.shadows += 0",
            "tests/cast/test_region.py::test_regions_nest_and_the_inner_one_replaces_the_outer",
            "an inner region would not replace the outer one",
        ),
        (
            "region: torch's own autocast inside is ours",
            "and torch.get_autocast_dtype(kind) == here.dtype)",
            ")",
            "tests/cast/test_region.py::test_torchs_autocast_with_another_dtype_is_torchs_inside_a_region",
            "a BF16 region of torch's inside would compute in FP16",
        ),
        (
            "region: fp32_math returns FP32",
            "    return _cast(out, back[0].dtype) if back else out",
            "    return out",
            "tests/cast/test_region.py",
            "norms=fp32_math would keep its activations in FP32",
        ),
        (
            "region: a ruled buffer's next value is low",
            "out.shape == param.shape and not",
            "out.shape is None and not",
            "tests/cast/test_buffers.py::test_the_rule_that_the_warning_names_says_so_beforehand",
            "a counter that a rule keeps in FP32 would stop at 256",
        ),
    ),
    *in_file(
        "cast/differences.py",
        (
            "region: the CPU refuses mixed operands",
            'built_in = wanted == "promote" and',
            "built_in = False and",
            "tests/cast/test_region.py::test_both_low_formats_meet_in_fp32",
            "cat of FP32 and BF16 would fail on a CPU alone",
        ),
    ),
    *in_file(
        "cast/model/calls.py",
        (
            "calls: a module takes FP32 as it is",
            "given = (*args, *kwargs.values()) if kwargs else args",
            "given = (*kwargs.values(),)",
            "tests/cast/test_calls.py::test_any_method_and_any_part_may_be_called",
            "an FP32 time embedding would raise torch's dtype error",
        ),
        (
            "calls: parts by themselves have no rule",
            'is_own = self.is_own or (self.path != "" and not torch.compiler.is_compiling() and not self._is_there())',
            "is_own = self.is_own",
            "tests/cast/test_modules.py::test_parts_that_are_called_by_themselves_follow_the_rule_of_what_they_are_in",
            "the layers of a head in FP32 that a loop calls would compute in 16 bits",
        ),
        (
            "calls: a part that is called alone has no region",
            "        # Whichever tensors stand in the places of ruled ones now, the region is to know them.\n",
            "        if not self.is_own:\n            return True\n",
            "tests/cast/test_calls.py::test_recomputed_parts_run_in_the_region_again",
            "recomputation would give other gradients than the stored pass",
        ),
        (
            "calls: a cache comes back in FP32",
            "return low if version == _version(each) else each",
            "return each",
            "tests/cast/test_calls.py::test_what_a_model_gave_out_comes_back_as_it_was",
            "generate() would raise at its second token",
        ),
        (
            "calls: an edited cache is forgotten",
            "return low if version == _version(each) else each",
            "return low",
            "tests/cast/test_calls.py::test_what_a_model_gave_out_comes_back_as_it_was",
            "what a program writes into a cache would be lost without a word",
        ),
    ),
    *in_file(
        "cast/model/buffers.py",
        (
            "buffers: the first update is rounded",
            "        for memory in written - self._wide.keys():",
            "        written = set()\n        for memory in written:",
            "tests/cast/test_buffers.py::test_a_buffer_that_a_pass_writes_is_as_in_fp32",
            "a sum of 60000 and 60000 would be infinite in FP16 before it is widened",
        ),
        (
            "buffers: what is assigned anew is rounded",
            "twin = None if watch is None else watch.twins.get(now)",
            "twin = None",
            "tests/cast/test_buffers.py::test_a_buffer_that_a_pass_writes_is_as_in_fp32",
            "self.total = self.total + x would lose its first sum",
        ),
        (
            "buffers: later writes go unseen",
            "found = [t for t, before in self._marks.items() if mark(t) != before or not self._stands(t)]",
            "found = [t for t in self._marks if watch is not None and not self._stands(t)]",
            "tests/cast/test_buffers.py",
            "a counter that begins after a warm-up would stop at 256",
        ),
        (
            "buffers: any write is a pass's",
            "        if self._watch is None:\n            self._marks =",
            "        if self._watch is None and not self._marks:\n            self._marks =",
            "tests/cast/test_buffers.py::test_a_write_outside_a_pass_is_no_pass_s",
            "loading a state dict would make FP32 of every mask, and attention would fail",
        ),
    ),
    *in_file(
        "cast/model/refusals.py",
        (
            "refusals: TorchScript is taken",
            "if isinstance(m, ScriptModule)",
            "if False",
            ("tests/session/test_refusals.py", "tests/script/test_report.py"),
            "an error of mezzo's own, or a script that runs without casts and a word",
        ),
        (
            "parametrizations: made in low precision",
            "if rule is None and makes_weight(path, module):",
            "if False:",
            "tests/cast/test_calls.py::test_a_weight_is_made_in_fp32_and_used_low",
            "an orthogonal weight would be NaN for ever",
        ),
    ),
)

_EVIDENCE = (
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
            "tests/numerics/test_histogram.py::test_histograms_of_parts_are_together_that_of_the_whole",
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
            "tests/numerics/test_recorder.py::test_compiled_modules_are_refused_where_activations_alone_are_wanted",
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
            "tests/numerics/test_moves.py",
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
    *in_file(
        "trace/measure.py",
        (
            "explain: integers up to the bound count as lost",
            "    lowest = 2 / torch.finfo(dtype).eps ",
            "    lowest = 4 / torch.finfo(dtype).eps ",
            f"{_ASKED}::test_the_bound_is_two_to_the_significand",
            "positions from 257 to 512 would be rounded in BF16, and nothing be said",
        ),
        (
            "explain: fractions count as integers",
            " or bool((values != values.trunc()).any()):\n",
            ":\n",
            f"{_ASKED}::test_near_misses_are_no_finding",
            "every large activation would be called an index",
        ),
        (
            "explain: integers that the format holds count as lost",
            "    if not num_changed:\n        return None\n",
            "",
            f"{_ASKED}::test_near_misses_are_no_finding",
            "multiples of 16 would be called lost",
        ),
    ),
    *in_file(
        "trace/kernels.py",
        (
            "explain: a bias counts as a factor",
            "args[1:3] if name in _ADDING else args[:last]",
            "args[:last]",
            f"{_ASKED}::test_one_hot_masks_and_biases_are_no_finding",
            "a false alarm for a term that is added",
        ),
    ),
    *in_file(
        "trace/trace.py",
        (
            "explain: what is joined is no longer followed",
            "            _carry(self._rounded, args, results)\n",
            "",
            f"{_ASKED}::test_integers_that_the_model_itself_casts_are_followed_through_cat",
            "a position beside other features would go unnoticed",
        ),
        (
            "explain: what is overwritten is still followed",
            "        if kernel._schema.is_mutable:\n            self._rounded.put(results, None)\n",
            "",
            f"{_ASKED}::test_what_is_changed_in_place_after_its_cast_is_something_else",
            "a false alarm for memory that is used again",
        ),
        (
            "explain: scores of attention count as logits",
            'is_product or name == "aten::_log_softmax"',
            "True",
            f"{_ASKED}::test_what_is_no_cast_of_logits_or_a_small_one",
            "each attention would be told to use linear_cross_entropy",
        ),
    ),
    *in_file(
        "explanation/findings.py",
        (
            "explain: the cast of the logits is named whatever its share",
            "    if not size or size < _LARGE_SHARE * total or size < _WORTH_A_WORD * seen.moved_bytes:\n",
            "    if not size:\n",
            f"{_ASKED}::test_what_is_no_cast_of_logits_or_a_small_one",
            "four classes would be called a large vocabulary",
        ),
        (
            "explain: a rule on another module counts for a tied weight",
            '            or (rule.op is None and rule.treatment in ("low", "fp32") and rule.matches_module(module))\n',
            "",
            f"{_ASKED}::test_one_tensor_under_two_treatments",
            "a rule on a head would widen the embedding without a word",
        ),
    ),
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


FAULTS: tuple[Fault, ...] = (*_CAST, *_EVIDENCE)
