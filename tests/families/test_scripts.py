"""What each family's script promises: a metric line, one result for one seed, no line of mezzo; what it learns."""

import ast
import re
from types import SimpleNamespace

import pytest
import torch

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
        ("digits_gan", ["--steps", "20", "--gp"]),
        ("numbers_mt", ["--steps", "50"]),
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
def test_a_run_ends_with_its_metric(load_family, name, monkeypatch, capsys, request):
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--steps", "1"])
    script = load_family(name)
    monkeypatch.setattr(script, "NUM_TEST_STRIPS", 20, raising=False)
    if name == "digits_gan":
        classifier = request.getfixturevalue("classifier")  # which the script's own class fits
        trained = SimpleNamespace(fit=lambda *_: classifier)
        monkeypatch.setattr(script, "MLPClassifier", lambda *_, **__: trained)
    if name == "digits_ssd":
        draw = script.draw
        monkeypatch.setattr(script, "draw", lambda number, *args, **kwargs: draw(min(number, 64), *args, **kwargs))
    script.main()
    assert re.fullmatch(METRICS[name], capsys.readouterr().out.splitlines()[-1])


def test_a_script_has_no_line_of_mezzo_and_states_its_margin():
    for name in METRICS:
        source = (FOLDER / f"{name}.py").read_text()
        docstring = ast.get_docstring(ast.parse(source), clean=False)
        assert "mezzo" not in source.replace(docstring, ""), name
        margin = re.search(r"^Margin: ([\d.]+) (points|bits/byte|units), since \w", docstring, re.MULTILINE)
        assert margin, name
        assert f"--margin {margin[1]} examples/families/{name}.py" in docstring


def test_no_held_out_image_is_trained_on_whatever_the_seed(load_family):
    for name in ("digits_cnn", "digits_ctc", "digits_gan"):
        script, sides = load_family(name), []
        for seed in (0, 1):
            torch.manual_seed(seed)
            sides.append(script.load())
        assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True)), name
        train, train_labels, held_out, labels = sides[0]
        assert (len(train), len(train_labels), len(held_out), len(labels)) == (1200, 1200, 597, 597), name
        trained = {tuple(image.flatten().tolist()) for image in train}
        assert not any(tuple(image.flatten().tolist()) in trained for image in held_out), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options, lowest, highest",
    [
        ("digits_cnn", [], 98.0, 100.0),
        ("numbers_mt", [], 97.0, 100.0),
        ("docs_lm", [], 0.0, 3.9),  # the bytes' own frequencies take 4.75 bits
    ],
)
def test_a_full_run_learns(run_family, name, options, lowest, highest):
    assert lowest <= float(run_family(name, *options)[-1].split()[-2]) <= highest
