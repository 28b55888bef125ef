"""Faults of ``report/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "report/verdict.py",
        (
            "report: equal is inside twice the margin",
            "    if -margin <= low and high <= margin:\n",
            "    if -margin <= low or high <= margin:\n",
            "tests/report/test_verdict.py::test_a_verdict_follows_from_interval_and_margin",
            "a policy that may be far worse would be called equal",
        ),
        (
            "report: lower is better everywhere",
            'low, high = interval if better == "higher" else (-interval[1], -interval[0])',
            "low, high = interval",
            "tests/report/test_verdict.py::test_a_verdict_follows_from_interval_and_margin",
            "a loss that has doubled would be called better",
        ),
        (
            "report: one seed decides",
            "if len(differences) < 2 or not all(map(math.isfinite, differences)):",
            "if not all(map(math.isfinite, differences)):",
            "tests/report/test_verdict.py::test_a_verdict_follows_from_interval_and_margin",
            "one pair of runs would prove something",
        ),
        (
            "report: an interval of twice the confidence",
            "t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)",
            "t.ppf(CONFIDENCE, len(differences) - 1)",
            "tests/report/test_verdict.py::test_difference_and_interval_are_those_of_a_paired_t_test",
            "what is called 95 % would be 90 %",
        ),
        (
            "report: FP32 that diverged judges others",
            "_judged(runs, interval if is_judged else None, margin, comparison.metric.better)",
            "_judged(runs, interval, margin, comparison.metric.better)",
            "tests/report/test_verdict.py::test_fp32_that_diverges_judges_nobody",
            "a policy would be called equal to a run that came to nothing",
        ),
        (
            "report: what FP32 left alone too is told of a policy",
            '            if not any(what in each.left_alone for each in comparison.of("O0"))\n',
            "",
            "tests/report/test_verdict.py::test_what_a_policy_did_not_reach_stands_beside_its_verdict",
            "a frozen layer would seem to be the policy's doing",
        ),
        (
            "report: most steps skipped is no divergence",
            "or 2 * run.skipped > run.steps > 0",
            "",
            "tests/report/test_verdict.py::test_a_run_that_goes_wrong_decides_its_row",
            "a run that hardly stepped would be judged by its metric",
        ),
    ),
    *in_file(
        "report/picture.py",
        (
            "report: a line goes on through NaN",
            "            smoothed.append(math.nan)\n            continue\n",
            "            continue\n",
            "tests/report/test_picture.py::test_a_line_breaks_where_its_loss_is_not_finite",
            "a run that diverged for a while would look as if it had not",
        ),
        (
            "report: a run stands beside FP32 of another seed",
            'next((each for each in comparison.of("O0") if each.seed == run.seed), None)',
            'next(iter(comparison.of("O0")), None)',
            "tests/report/test_picture.py::test_each_run_stands_beside_fp32_with_its_seed_as_far_as_both_go",
            "the noise of seeds would be drawn as the policy's",
        ),
    ),
    *in_file(
        "report/page.py",
        (
            "report: names of a script are markup",
            "jinja2.Environment(autoescape=True)",
            "jinja2.Environment()",
            "tests/report/test_page.py::test_the_page_has_the_verdict_and_the_rows_escaped",
            "a metric's name could run in a reader's browser",
        ),
    ),
    *in_file(
        "report/table.py",
        (
            "report: ratios are upside down",
            'ratio = f"{num_bytes / base:.2f}×" if base else ""',
            'ratio = f"{base / num_bytes:.2f}×" if base else ""',
            "tests/report/test_table.py::test_cells_are_the_rows_in_words",
            "a policy that takes twice the memory would seem to take half",
        ),
    ),
    *in_file(
        "report/histograms.py",
        (
            "report: shares leave zeros out",
            "return {exponent: count / histogram.total for",
            "return {exponent: count / sum(counts.values()) for",
            "tests/report/test_picture.py::test_shares_are_of_all_values",
            "a tensor that is almost all zero would look full",
        ),
    ),
)
