"""The page of a comparison: the same cells, nothing from a network, no script of ours, and what a browser shows."""

import html
import math
import re
import shutil

import pytest

from mezzo.report import verdict, write_page
from mezzo.report.verdict import cells, operand_cells

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def comparison(compared, run_of):
    losses = (2.0, 1.0, math.nan, 0.1)
    return compared(O0=[99.0, 99.2], O1=[99.1, run_of(99.0, losses=losses)], name="accuracy <b>&</b>")


@pytest.fixture
def page(comparison, tmp_path):
    write_page(comparison, tmp_path / "report.html")
    return tmp_path / "report.html"


def test_the_page_has_the_verdict_and_the_rows_escaped(comparison, page):
    text = page.read_text()
    assert "<b>&</b>" not in text
    heads, rows = cells(comparison, full=True)
    assert [html.unescape(head) for head in re.findall(r"<th>(.*?)</th>", text)] == heads
    assert [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", text)] == [
        cell for row in rows for cell in row
    ]
    assert [html.unescape(line) for line in re.findall(r"<p>(.*?)</p>", text)] == verdict(comparison)


def test_the_page_asks_no_network_and_has_no_script_besides_plotlys(page):
    text = page.read_text()
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[^>]*>", text) == []
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) >= 3  # plotly itself, and a figure each
    assert all("Plotly" in script or "plotly" in script for script in scripts if script.strip())


def test_a_browser_draws_a_line_for_each_run(page):
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    faults = []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda asked: None if asked.url.startswith("file:") else faults.append(asked.url))
        tab.goto(page.as_uri())
        drawn = tab.evaluate("() => [...document.querySelectorAll('.js-plotly-plot')].map((each) => each.data.length)")
        browser.close()
    assert drawn == [4, 4, 4]
    assert faults == []


def test_the_page_has_operands_where_products_were_below_sixteen_bits(compared, run_of, page, tmp_path):
    assert page.read_text().count("<table>") == 1
    operand = {
        "module": "up", "name": "weight", "role": "weight", "format": "nvfp4", "saturated": 0.5, "flushed": 0.25,
        "below_noise": None, "noise": None,
    }  # fmt: skip
    low = compared(O0=[99.0], O1=[run_of(99.0, operands=(operand,))])
    write_page(low, tmp_path / "low.html")
    _, rows = operand_cells(low)
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", (tmp_path / "low.html").read_text())]
    assert cells[-len(rows[0]) :] == rows[0]
    assert rows[0][4:6] == ["50 %", "25 %"]
