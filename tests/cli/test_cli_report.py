"""`mezzo report`: the verdict on stdout, the page where it is asked for, and a reason for what it cannot read."""

import pytest

from mezzo.recipes import compare, get

pytestmark = pytest.mark.usefixtures("emulating")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    compare(get("digits-cnn"), ["O0"], steps=2, out=path)
    return path


def test_it_says_what_the_run_came_to_and_writes_the_page(mezzo, run):
    code, out, err = mezzo("report", run)
    assert code == 0
    assert out.startswith("O0: test accuracy ")
    assert err == f"report: {run / 'report.html'}\n"
    assert "<h1>digits-cnn under O0</h1>" in (run / "report.html").read_text()


def test_out_names_another_file_and_what_mezzo_did_not_write_is_kept(mezzo, run, tmp_path):
    assert mezzo("report", run, "--out", tmp_path / "mine.html")[0] == 0
    (tmp_path / "mine.html").write_text("mine")
    code, out, err = mezzo("report", run, "--out", tmp_path / "mine.html")
    assert (code, out) == (2, "")
    assert err.startswith("mezzo: the report would replace a file that mezzo did not write\n")
    assert (tmp_path / "mine.html").read_text() == "mine"


def test_what_is_no_run_is_refused(mezzo, tmp_path):
    code, out, err = mezzo("report", tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert "  why    there is no such directory\n" in err
    (tmp_path / "summary.json").write_text("{}")  # a run, though a damaged one
    code, out, err = mezzo("report", tmp_path)
    assert (code, out) == (1, "")
    assert "  why    metrics.jsonl is missing\n" in err


def test_help_leads_with_an_example(mezzo):
    code, out, _ = mezzo("report", "--help")
    assert code == 0
    assert out.index("mezzo report runs/") < out.index("--out")
