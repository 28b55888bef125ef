"""Faults of the lower rooms: formats, files, policy, loss scale, step and optimizers."""

from .fault import Fault, in_file

_GROUND = (
    *in_file(
        "formats.py",
        (
            "formats: encode cuts off",
            "steps = round(math.ldexp(",
            "steps = int(math.ldexp(",
            "tests/test_formats.py",
            "the reference of all rounding would round towards zero",
        ),
        (
            "formats: the largest number overflows",
            "rounded.masked_fill_(rounded > self.max",
            "rounded.masked_fill_(rounded >= self.max",
            "tests/test_formats.py",
            "65504 would be infinite",
        ),
        (
            "formats: float64 is rounded twice",
            "once = source.dtype != torch.float64 or self.dtype == torch.float32",
            "once = True",
            "tests/test_formats.py",
            "torch casts float64 to FP16 through FP32",
        ),
        (
            "formats: zeros count as underflow",
            "(zero, gone & ~zero, small",
            "(zero, gone, small",
            "tests/test_formats.py",
            "coverage would blame the format for zeros",
        ),
    ),
    *in_file(
        "files.py",
        (
            "files: no sync before the rename",
            "        os.fsync(descriptor)\n",
            "",
            "tests/test_files.py",
            "R5: a crash would leave a checkpoint of zeros under the right name",
        ),
        (
            "files: a partial is readable by all",
            "0o666 if old is None else 0o600",
            "0o666",
            "tests/test_files.py",
            "R13: a private checkpoint would be readable while it is written",
        ),
        (
            "files: a device is replaced",
            "    if not stat.S_ISREG(mode):\n        why",
            "    if False:\n        why",
            "tests/test_files.py::test_what_is_no_file_is_not_replaced_by_one",
            "R6: saving to /dev/null as root would replace the device",
        ),
        (
            "files: anybody's folder is trusted",
            "        _require_ours(facts, place)\n",
            "",
            "tests/test_files.py",
            "R4: another user's machine code would be loaded",
        ),
        (
            "files: anybody's file is trusted",
            "        _require_ours(os.fstat(file.fileno()), path)\n",
            "",
            "tests/test_files.py",
            "R4: another user's machine code would be loaded",
        ),
    ),
)

_POLICY = (
    *in_file(
        "policy/policy.py",
        (
            "policy: the last rule wins",
            "rules=(*first, *kept)",
            "rules=(*kept, *first)",
            "tests/policy/test_policy.py",
            "a rule that is added would change nothing",
        ),
        (
            "policy: batch norm is never low",
            "if is_norm and self.keep_batchnorm_fp32:",
            "if is_norm:",
            ("tests/policy/test_policy.py", "tests/cast/test_modules.py"),
            "keep_batchnorm_fp32=false would do nothing",
        ),
        (
            "policy: norms are FP32 on accelerators",
            'return entry.cuda if norms == "fp32" else entry.portable',
            "return entry.cuda",
            "tests/policy/test_decide.py",
            "norms=fp32_math would be CUDA's lists",
        ),
        (
            "policy: in-place ops are cast",
            "if (form := written_form(op, name)) is not None:",
            "if False:",
            ("tests/policy/test_forms.py", "tests/policy/test_policy.py"),
            "P13: explain would promise a cast of exp_ that cannot be",
        ),
    ),
    *in_file(
        "policy/rules.py",
        (
            "policy: a rule on a block misses its layers",
            "for part in _ancestry(path))",
            "for part in (path,))",
            ("tests/policy/test_policy.py", "tests/cast/test_modules.py"),
            "keep_fp32(modules=['head']) would leave head.fc low",
        ),
        (
            "policy: a rule on a module holds everywhere",
            "module is not None and self.matches_module(module)",
            "module is None or self.matches_module(module)",
            ("tests/policy/test_policy.py", "tests/policy/test_decide.py"),
            "softmax@head would be every softmax outside a model",
        ),
    ),
    *in_file(
        "policy/ops/table.py",
        (
            "policy: experts stay FP32",
            '_Rows("low", "gemm", "grouped_mm"',
            '_Rows("native", "gemm", "grouped_mm"',
            "tests/policy/test_ops.py",
            "U3: most of a mixture's FLOPs would run in FP32",
        ),
    ),
    *in_file(
        "policy/fields.py",
        (
            "policy: FP16 is unscaled in FP16",
            "if param_dtype == torch.float16 and level",
            "if False and level",
            "tests/policy/test_policy.py",
            "O3 in FP16 under a scale would flush gradients",
        ),
    ),
    *in_file(
        "policy/text.py",
        (
            "policy: a file's reasons are lost",
            "parse_rules(words[0], words[2], reason)",
            "parse_rules(words[0], words[2])",
            "tests/policy/test_policy.py",
            "explain could not say why a rule of a file is there",
        ),
        (
            "policy: a wrong line has the number of the one before",
            "enumerate(_LINE_END.split(text), start=1)",
            "enumerate(_LINE_END.split(text))",
            "tests/policy/test_policy.py",
            "a user would look at the wrong line",
        ),
    ),
    *in_file(
        "policy/spelling.py",
        (
            "policy: cures in Python reverse their rules",
            "calls[:0] = [call] if call else []",
            "calls += [call] if call else []",
            "tests/policy/test_spelling.py",
            "the two spellings of a cure would be two policies",
        ),
    ),
)

_SCALE = (
    *in_file(
        "scale/rules.py",
        (
            "scale: it grows a step late",
            "grows = clean_steps >= config.interval",
            "grows = clean_steps > config.interval",
            "tests/scale/test_rules.py",
            "not torch's rule",
        ),
        (
            "scale: it backs off with budget left",
            "backs_off = found & (budget == 0)",
            "backs_off = found & (budget <= 1)",
            "tests/scale/test_rules.py",
            "hysteresis would be one less",
        ),
        (
            "scale: no offset after an overflow",
            "_chosen(found, -config.growth_offset, clean_steps + 1)",
            "_chosen(found, 0, clean_steps + 1)",
            "tests/scale/test_rules.py",
            "DeepSpeed's rule would grow a step early",
        ),
        (
            "scale: an overflow keeps its clean steps",
            "_chosen(found, -config.growth_offset, clean_steps + 1)",
            "clean_steps + 1",
            "tests/scale/test_rules.py",
            "the scale would grow right after it backed off",
        ),
        (
            "scale: no ceiling",
            "higher = _at_most(higher, config.ceiling)",
            "pass",
            "tests/scale/test_rules.py",
            "the scale would grow until gradients overflow",
        ),
        (
            "scale: patience counts above the floor",
            "stuck = found & (scale <= as_float32(config.floor))",
            "stuck = found",
            "tests/scale/test_rules.py",
            "ScaleCollapsed would end healthy runs",
        ),
    ),
    *in_file(
        "scale/scaler.py",
        (
            "scale: a held step moves it",
            "after = before if held else next_scale_on_host(before, overflowed, self.config)",
            "after = next_scale_on_host(before, overflowed, self.config)",
            "tests/scale/test_scaler.py",
            "a batch of NaN would count as a clean step",
        ),
        (
            "scale: all optimizers have to overflow",
            "return reduce(or_, map(and_, flags, map(counts, holds))), reduce(and_, holds)",
            "return reduce(and_, map(and_, flags, map(counts, holds))), reduce(and_, holds)",
            "tests/scale/test_scaler.py",
            "of two optimizers one could overflow for ever",
        ),
        (
            "scale: a loss overflows as it is scaled",
            "wide = loss.float() if loss.dtype in LOW else loss",
            "wide = loss",
            "tests/scale/test_scaler.py",
            "an FP16 loss times 65536 is infinite: no step would ever be taken",
        ),
    ),
    *in_file(
        "scale/config.py",
        (
            "scale: statistics at the limit",
            ">= limit:",
            "> limit:",
            "tests/scale/test_loss_scale.py",
            "the largest gradient would be infinite",
        ),
    ),
)

_STEP = (
    *in_file(
        "step/split.py",
        (
            "halves: BF16 is cut off",
            "rounded = (bits + 0x8000) & -0x10000",
            "rounded = bits & -0x10000",
            "tests/step/test_split.py",
            "the weight that the model sees would not be the nearest",
        ),
        (
            "halves: FP16 just below 2^-14",
            "remainder.clamp(-0x2000, 0x1000)",
            "remainder.clamp(-0x1000, 0x1000)",
            "tests/step/test_split.py",
            "1d8c9d8: 6.1008e-05 would come back as 6.1020e-05",
        ),
        (
            "halves: a zero weight becomes NaN",
            "remainder.clamp(0, 0x7FFF))",
            "remainder)",
            "tests/step/test_split.py",
            "a weight that was set to zero would be NaN in the next step",
        ),
        (
            "halves: infinity has a remainder",
            "own = torch.where(size <= _LARGEST[dtype], nearby, 0)",
            "own = nearby",
            "tests/step/test_split.py",
            "an infinity beside the remainder of another weight would be a NaN",
        ),
        (
            "halves: minus zero loses its sign",
            "high - (-remainder.clamp(-0x4000, 0x4000)).to(torch.float32) * 2.0**-39",
            "high + remainder.clamp(-0x4000, 0x4000).to(torch.float32) * 2.0**-39",
            "tests/step/test_split.py",
            "not the bits that were stored",
        ),
        (
            "halves: too large is not refused",
            "((size > limit) & (size < torch.inf)).sum()",
            "(size > torch.inf).sum()",
            "tests/step/test_split.py",
            "a weight beyond 65504 would become infinite",
        ),
    ),
    *in_file(
        "step/rounding.py",
        (
            "rounding: ties go up",
            "(bits + 0x7FFF + ((bits >> 16) & 1))",
            "(bits + 0x8000)",
            "tests/step/test_rounding.py",
            "a drift upwards",
        ),
        (
            "rounding: chance is halved",
            "(pattern + (bits & 0xFFFF))",
            "(pattern + (bits & 0x7FFF))",
            "tests/step/test_rounding.py",
            "stochastic rounding would be biased",
        ),
        (
            "rounding: all states draw alike",
            "mixed = index + (key + _wrapped(slot * _GOLDEN))",
            "mixed = index + key",
            "tests/step/test_rounding.py::test_noise_is_even_and_uncorrelated_between_neighbours_slots_and_steps",
            "moments of one weight would be rounded alike",
        ),
    ),
    *in_file(
        "step/update.py",
        (
            "adam: epsilon is corrected too",
            'largest.sqrt() * numbers["correction2"] + numbers["eps"]',
            '(largest.sqrt() + numbers["eps"]) * numbers["correction2"]',
            "tests/step/test_update.py",
            "first steps of another size than torch's",
        ),
        (
            "adam: no correction of the mean",
            "lr / (1 - beta1**step)",
            "lr / (1 - beta1)",
            "tests/step/test_update.py",
            "steps ten times too large after the first",
        ),
        (
            "adamw: weights grow",
            '1 - lr * hypers["weight_decay"] if decoupled',
            '1 + lr * hypers["weight_decay"] if decoupled',
            "tests/step/test_update.py",
            "weight decay with the wrong sign",
        ),
        (
            "amsgrad: the latest, not the largest",
            "torch.maximum(states[2], square) if amsgrad",
            "square if amsgrad",
            "tests/step/test_update.py",
            "amsgrad would be Adam",
        ),
        (
            "sgd: dampening in the first step",
            '1 - hypers["dampening"] * (1 - first)',
            '1 - hypers["dampening"]',
            "tests/step/test_update.py",
            "not torch's first step",
        ),
        (
            "sgd: nesterov looks back",
            'gradient + buffer * numbers["momentum"] if nesterov',
            'buffer + gradient * numbers["momentum"] if nesterov',
            "tests/step/test_update.py",
            "another optimizer",
        ),
        (
            "lion: one beta for both",
            'return weight, (momentum * numbers["beta2"] + numbers["gain2"] * gradient,)',
            "return weight, (mixed,)",
            "tests/step/test_update.py",
            "another optimizer",
        ),
        (
            "optimizers: maximize minimizes",
            'gradient = -gradient if "maximize" in self.options else gradient',
            "pass",
            "tests/step/test_update.py",
            "the run would go the other way",
        ),
    ),
    *in_file(
        "step/passes.py",
        (
            "verdict: clipping stretches",
            "((grad_norm + 1e-6).reciprocal() * max_norm).clamp_max(1.0)",
            "((grad_norm + 1e-6).reciprocal() * max_norm)",
            "tests/step/test_passes.py",
            "small gradients would be blown up to max_grad_norm",
        ),
        (
            "verdict: the norm stays scaled",
            "grad_norm = grad_norm * inverse_scale",
            "pass",
            "tests/step/test_passes.py",
            "65536 times the norm, and clipping to nothing",
        ),
        (
            "verdict: unscaling may overflow",
            "found_inf=not_finite(grad_norm)",
            "found_inf=not_finite(torch.linalg.vector_norm(norms))",
            "tests/step/test_passes.py",
            "under a scale below 1 infinite gradients would be applied",
        ),
        (
            "verdict: clipping forgets the scale",
            "multiplier = clip if inverse_scale is None else inverse_scale * clip",
            "multiplier = clip",
            "tests/step/test_passes.py",
            "a clipped step would be 65536 times too large",
        ),
        (
            "update: gradients are unscaled in FP16",
            "gradient.to(torch.float32) * multiplier",
            "(gradient * multiplier.to(gradient.dtype)).to(torch.float32)",
            "tests/step/test_passes.py::test_the_pure_function_multiplies_in_fp32_and_touches_nothing",
            "small gradients would be flushed to zero",
        ),
        (
            "update: a skipped step counts",
            "tuple(step + ~found_inf for step in steps)",
            "tuple(step + 1 for step in steps)",
            "tests/step/test_passes.py::test_the_step_counts_updates_and_not_skips",
            "bias corrections would run ahead of the moments",
        ),
    ),
    *in_file(
        "step/executors/portable.py",
        (
            "update: an overflow is written",
            "torch.where(verdict.found_inf, target, value) if predicated else value",
            "value",
            "tests/step/executors/test_contract.py::test_where_the_flag_stays_on_the_device_the_old_bits_are_written_again",
            "NaN in every weight after the first overflow",
        ),
        (
            "update: blocks draw alike",
            "key = seeds[index] + start if bucket.random else seeds",
            "key = seeds[index] if bucket.random else seeds",
            "tests/step/executors/test_contract.py::test_random_bits_depend_on_place_and_step_alone",
            "executors would disagree on large tensors",
        ),
    ),
    *in_file(
        "step/gradients.py",
        (
            "norms: summed in their own dtype",
            "torch._foreach_norm(values, 2, dtype=torch.float32)",
            "torch._foreach_norm(values, 2)",
            "tests/step/test_gradients.py",
            "a norm of FP16 gradients would overflow",
        ),
    ),
)

_OPTIM = (
    *in_file(
        "optim/checks.py",
        (
            "optimizers: a learning rate of NaN",
            "return math.isfinite(number) and least <= number < end",
            "return not least > number and not number >= end",
            "tests/optim/test_refusals.py::test_what_a_group_must_not_say_is_refused_wherever_it_is_said",
            "R18: NaN in all weights",
        ),
        (
            "optimizers: parameters in a set",
            "if isinstance(params, (set, frozenset)):",
            "if False:",
            "tests/optim/test_saving.py::test_a_set_has_no_order_that_a_state_could_belong_to",
            "P9: moments would land on other weights after a restart",
        ),
    ),
    *in_file(
        "optim/optimizer.py",
        (
            "optimizers: a step writes low halves of the past",
            " and self.replaced == other.replaced",
            "",
            "tests/optim/test_continued.py::test_a_swapped_weight_is_what_a_step_updates",
            "a weight swapped for an average would stand beside the low half of another",
        ),
        (
            "optimizers: a swapped weight is not stored low again",
            "            halves.settle()",
            "            pass",
            "tests/optim/test_continued.py::test_weights_swapped_for_an_evaluation_and_back_train_as_if_nothing_had_been",
            "the model would go on in two dtypes",
        ),
        (
            "optimizers: low weights of no model",
            "        self._require_owners(",
            "        0 and self._require_owners(",
            "tests/optim/test_refusals.py::test_low_weights_of_no_model_are_refused_before_anything_is_made",
            "small updates of low weights would be lost without a word",
        ),
        (
            "optimizers: weights with and without a low half together",
            "param.dtype, rest is None, id(",
            "param.dtype, id(",
            "tests/optim/test_optim.py::test_models_with_and_without_low_halves_share_an_optimizer",
            "the second model's FP32 values would be lost",
        ),
    ),
    *in_file(
        "optim/state.py",
        (
            "state: a note is a history",
            "any(name in state for name in moments):",
            "state:",
            "tests/optim/test_saving.py::test_a_note_alone_is_no_history",
            "U1: the first AdamW step would have the size of the second",
        ),
        (
            "state: counts in float32",
            "torch.as_tensor(value).to(param.device, torch.int64)",
            "torch.as_tensor(value).to(param.device, torch.float32).to(torch.int64)",
            "tests/optim/test_saving.py::test_a_count_is_saved_exactly",
            "R16: 16777217 steps would be 16777216",
        ),
    ),
)


FAULTS: tuple[Fault, ...] = (*_GROUND, *_POLICY, *_SCALE, *_STEP, *_OPTIM)
