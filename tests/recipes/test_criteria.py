"""What the project promises about accuracy, at full length: minutes."""

import statistics

import pytest

from mezzo.recipes import compare, get
from mezzo.recipes.comparison import default_policies

SEEDS = (0, 1, 2)


@pytest.mark.slow
def test_digits_accuracy_over_three_seeds_is_within_seven_tenths_of_a_point_of_fp32():
    rows = [row for seed in SEEDS for row in compare(get("digits-cnn"), seed=seed).rows]
    means = {
        policy: statistics.mean(row.final_metric for row in rows if row.policy == policy)
        for policy in default_policies()
    }
    assert means["O0"] >= 97.0
    for policy, mean in means.items():
        if not policy.startswith("O3"):  # O3 is shown as it is
            assert abs(mean - means["O0"]) <= 0.7, (policy, means)


@pytest.mark.slow
def test_docs_lm_beats_bigrams_and_low_precision_is_within_one_percent_of_fp32():
    policies = [policy for policy in default_policies() if not policy.startswith("O3")]
    result = compare(get("docs-lm"), policies)
    fp32, *others = result.rows
    (bigrams,) = result.references.values()
    assert fp32.final_metric < bigrams
    for row in others:
        assert abs(row.final_metric / fp32.final_metric - 1.0) <= 0.01, (row.policy, row.final_metric)
