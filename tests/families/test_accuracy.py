"""What the families learn, at full length: minutes."""

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options, lowest, highest",
    [
        ("digits_cnn", [], 98.0, 100.0),
        ("digits_ctc", [], 0.0, 10.0),
        ("digits_ssd", [], 80.0, 100.0),
        ("numbers_mt", [], 97.0, 100.0),
        ("docs_lm", [], 0.0, 3.9),  # the bytes' own frequencies take 4.75 bits
        ("docs_lm", ["--lstm"], 0.0, 3.4),
    ],
)
def test_a_full_run_learns(run_family, name, options, lowest, highest):
    assert lowest <= float(run_family(name, *options)[-1].split()[-2]) <= highest
