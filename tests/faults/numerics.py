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
)
