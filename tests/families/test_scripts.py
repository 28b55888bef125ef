"""What each family's script promises: a metric line, one result for one seed, and no line of mezzo."""

import ast
import re

import pytest

from .conftest import FOLDER

METRICS = {
    "digits_cnn": r"test accuracy \d+\.\d\d %",
    "docs_lm": r"test loss \d+\.\d{4} bits/byte",
    "digits_ctc": r"test character error rate \d+\.\d\d %",
    "digits_ssd": r"test mAP \d+\.\d\d %",
    "numbers_mt": r"exact matches \d+\.\d\d %",
    "digits_gan": r"Fréchet distance \d+\.\d\d",
}


@pytest.mark.parametrize(
    "name, options",
    [
        ("digits_cnn", ["--steps", "50"]),
        ("digits_ctc", ["--steps", "50"]),
        ("digits_gan", ["--steps", "20", "--gp"]),
        ("digits_ssd", ["--steps", "50"]),
        ("numbers_mt", ["--steps", "50"]),
        ("docs_lm", ["--steps", "3"]),
        ("docs_lm", ["--steps", "3", "--lstm"]),
    ],
)
@pytest.mark.slow
def test_a_seed_repeats_its_run_and_another_gives_another(run_family, name, options):
    first, again, other = (run_family(name, *options, "--seed", seed) for seed in ("0", "0", "1"))
    assert re.fullmatch(METRICS[name], first[-1])
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", METRICS)
def test_a_run_ends_with_its_metric(run_family, name):
    assert re.fullmatch(METRICS[name], run_family(name, "--steps", "1")[-1])


@pytest.mark.parametrize("name", METRICS)
def test_a_script_has_no_line_of_mezzo_and_states_its_margin(name):
    source = (FOLDER / f"{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(source), clean=False)
    assert "mezzo" not in source.replace(docstring, "")
    margin = re.search(r"^Margin: ([\d.]+) (points|bits/byte|units), since \w", docstring, re.MULTILINE)
    assert margin
    assert f"--margin {margin[1]} examples/families/{name}.py" in docstring
