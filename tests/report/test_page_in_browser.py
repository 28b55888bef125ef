"""The page in a browser: it opens by itself, and every switch draws what Python computes from the same evidence."""

import math
import shutil
from pathlib import Path

import pytest

from mezzo.formats import by_name
from mezzo.numerics import KINDS, evidence_file
from mezzo.report import page

from .conftest import SCALES, SIZES

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHOSEN = ((0, "float16"), (0, "bfloat16"), (1, "float8_e4m3fn"), (2, "float8_e5m2"), (2, "float16"))
LABELS = [kind.replace("_", " ") for kind in KINDS]


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def opened(chromium):
    """Open a file; whatever it says on the console, raises or asks the network for fails the test."""
    faults = []

    def open_page(path: Path, **options):
        tab = chromium.new_page(**{"viewport": {"width": 1280, "height": 900}} | options)
        tab.on("console", lambda message: faults.append(message.text))
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda request: None if request.url.startswith("file:") else faults.append(request.url))
        tab.goto(path.as_uri())
        return tab

    return open_page, faults


@pytest.fixture
def open_page(opened):
    open_page, faults = opened
    yield open_page
    assert faults == []


@pytest.fixture(scope="module")
def path(finished_run, evidence, tmp_path_factory):
    """The page of a run with evidence."""
    run = shutil.copytree(finished_run, tmp_path_factory.mktemp("browser") / "run")
    evidence_file.write(evidence, run / "evidence.jsonl")
    return page(run)


@pytest.fixture(scope="module")
def only_tab(opened, path):
    return opened[0](path)


@pytest.fixture
def tab(only_tab, opened):
    """One tab for all: each test sets the switches that it reads."""
    if only_tab.is_enabled("#own"):
        only_tab.click("#own")
    yield only_tab
    assert opened[1] == []


#: What the heat map draws: shares by row and exponent, and the three bars.
DRAWN = """() => {
  const [map, ...bars] = document.getElementById("heat").data;
  const named = (row) => row.map((share, at) => [map.x[at] - 0.5, share]);
  const shares = map.customdata.map((row) => named(row).filter(([, share]) => share));
  return { shares, bars: bars.map((bar) => Array.from(bar.x)) };
}"""
BANDS = (
    """() => document.getElementById("heat").layout.shapes.filter(({ type }) => type === "line").map(({ x0 }) => x0)"""
)


def choose(tab, **switches):
    for name, value in switches.items():
        if name in ("kind", "format"):
            tab.select_option(f"#{name}", label=value)
        else:
            tab.evaluate(
                f"(value) => {{ const input = document.getElementById('{name}'); input.value = value;"
                " input.dispatchEvent(new Event('input')); }",
                value,
            )


def expected(evidence, kind, step, target, scale):
    """From the evidence, with Python's coverage: shares by row, and flushed, subnormal and overflowing by row."""
    shares, bars = [], []
    for module in SIZES:
        found = [each for each in evidence.steps[step].tensors if (each.kind, each.module) == (kind, module)]
        if not found:
            shares.append([])
            bars.append([None] * 3)
            continue
        histogram = found[0].histogram
        counted = histogram.total - histogram.zeros - histogram.nans
        shares.append([[k, histogram.count(k) / counted] for k in range(-149, 128) if histogram.count(k)])
        covered = histogram.coverage(target, scale)
        bars.append([each / counted for each in (covered.underflow, covered.subnormal, covered.overflow)])
    return {"shares": shares, "bars": [list(column) for column in zip(*bars, strict=True)]}


def same(drawn, wanted):
    assert drawn["bars"] == wanted["bars"]
    assert drawn["shares"] == wanted["shares"]


def test_every_switch_draws_what_python_computes(tab, evidence):
    for number, (kind, label) in enumerate(zip(KINDS, LABELS, strict=True)):
        choose(tab, kind=label)
        scaled = kind in ("activation_gradients", "weight_gradients")
        for step, target in CHOSEN[number % 2 :: 2]:
            choose(tab, step=step, format=target)
            same(tab.evaluate(DRAWN), expected(evidence, kind, step, target, SCALES[step] if scaled else 1.0))


def test_the_scale_moves_the_band_and_what_is_lost(tab, evidence):
    choose(tab, kind="weight gradients", format="float16", step=0)
    for exponent in (-24, -3, 0, 7, 24):
        choose(tab, scale=exponent)
        same(tab.evaluate(DRAWN), expected(evidence, "weight_gradients", 0, "float16", 2.0**exponent))
        half = by_name("float16").max + 16
        limits = [-25 - exponent, -14 - exponent, math.log2(half) - exponent]
        drawn = tab.evaluate(BANDS)
        assert set(drawn) <= set(limits)
        assert {-25 - exponent, -14 - exponent} <= set(drawn)
        assert tab.text_content("#scale-text") == "2" + "".join(
            "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"[int(c) if c != "-" else 10] for c in f"{exponent}"
        )
    tab.click("#own")
    same(tab.evaluate(DRAWN), expected(evidence, "weight_gradients", 0, "float16", SCALES[0]))
    assert tab.is_disabled("#own")


def test_a_kind_without_a_record_at_a_step_says_so(tab):
    choose(tab, kind="updates", step=1)
    assert tab.text_content("#reading") == "No updates were recorded at step 51."


def test_the_reading_is_the_sum_of_the_rows(tab, evidence):
    choose(tab, kind="activation gradients", format="float16", step=2)
    tensors = [each.histogram for each in evidence.steps[2].tensors if each.kind == "activation_gradients"]
    lost = sum(each.coverage("float16", 1000.0).underflow for each in tensors)
    total = sum(each.total - each.zeros - each.nans for each in tensors)
    text = tab.text_content("#reading")
    assert text.startswith("In float16, of all activation gradients × 1000 at step 101 that are not zero, ")
    assert f"{float(f'{100 * lost / total:.3g}'):g} % are flushed to zero" in text


def test_the_worst_tensors_are_ranked_and_a_click_shows_one(tab):
    choose(tab, format="float16", kind="updates", step=2)
    rows = [row.split("\t") for row in tab.inner_text("#worst tbody").splitlines()]
    assert rows[0][0].startswith("blocks.1.down")
    assert not any(row[1] == "updates" for row in rows)  # no format has to hold them
    assert all(float(row[5].rstrip(" %") or 0) > 0 or row[6] != "0" for row in rows[:3])
    tab.click("#worst tbody tr")
    label = tab.evaluate("() => document.getElementById('kind').selectedOptions[0].text")
    assert (label, tab.text_content("#step-text")) == (rows[0][1], rows[0][2])


def test_a_page_of_a_comparison_draws_each_policy(open_page, finished_run, tmp_path):
    tab = open_page(page(finished_run, tmp_path / "page.html"))
    names = tab.evaluate(
        "() => document.getElementById('curves').data.filter((each) => each.showlegend).map((each) => each.name)"
    )
    assert names == ["O0", "O1,dtype=float16", "O2,dtype=bfloat16"]
    assert tab.query_selector("#heat") is None


def test_narrow_and_dark_windows_show_it_too(open_page, path):
    tab = open_page(path, viewport={"width": 800, "height": 600}, color_scheme="dark")
    assert tab.evaluate("() => document.documentElement.scrollWidth") <= 800
    dark = tab.evaluate("() => getComputedStyle(document.body).backgroundColor")
    tab.emulate_media(color_scheme="light")
    assert tab.evaluate("() => getComputedStyle(document.body).backgroundColor") != dark
