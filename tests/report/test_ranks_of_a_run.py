"""Ranks side by side: sums by hand, who is slow, who overflowed, and files that are broken."""

import io
import json
import shutil

import pytest
from rich.console import Console

from mezzo.errors import StateError
from mezzo.report import judge, rank_tables, read
from mezzo.report.content import content
from mezzo.report.ranks import rank_columns, rank_lines, rank_rows


def line(step, **changes):
    return {
        "policy": "O0", "step": step, "ms": 20.0, "samples_per_s": 400.0, "waiting_ms": 0.0, "wire_bytes": 2048,
        "overflowed": False, "peak_bytes": 2**20 * step,
    } | changes  # fmt: skip


@pytest.fixture
def run_of(finished_run, tmp_path):
    """Return what reads a run whose ranks wrote these lines."""

    def make(*ranks):
        folder = shutil.copytree(finished_run, tmp_path / "run", dirs_exist_ok=True)
        for rank, lines in enumerate(ranks):
            (folder / f"metrics.rank{rank}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        return read(folder)

    return make


def cells(run):
    rows = rank_rows(run)
    return [{" ".join(column.head): column.cell(row) for column in rank_columns(rows)} for row in rows]


def test_a_run_in_one_process_has_no_ranks(finished_run):
    run = read(finished_run)
    assert (rank_tables(run, 80), [*rank_lines(run)], content(run)["ranks"]) == ([], [], None)


def test_each_number_is_where_a_reader_looks_for_it(run_of):
    waiting = [line(step, waiting_ms=5.0 if step > 6 else 0.0, overflowed=step == 7) for step in range(1, 9)]
    run = run_of([line(step, ms=99.0 if step < 6 else 20.0) for step in range(1, 9)], waiting)
    assert cells(run) == [
        {
            "rank": "0", "ms per step, median": "20.0", "its own work, mean ms": "20.0",
            "waiting for other ranks": "0 %", "samples per second": "400", "sent per step": "2.00 KiB",
            "losses not finite here": "0", "peak memory": "8.00 MiB",
        },
        {
            "rank": "1", "ms per step, median": "20.0", "its own work, mean ms": "16.7",
            "waiting for other ranks": "16.7 %", "samples per second": "400", "sent per step": "2.00 KiB",
            "losses not finite here": "1", "peak memory": "8.00 MiB",
        },
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    for table in rank_tables(run, 80):
        console.print(table)
    assert "16.7 %" in console.file.getvalue()
    assert content(run)["ranks"]["rows"][1][-1] == "8.00 MiB"


def test_the_slowest_rank_is_the_one_that_never_waits(run_of):
    run = run_of([line(step, waiting_ms=5.0) for step in range(1, 9)], [line(step) for step in range(1, 9)])
    (told,) = rank_lines(run)
    assert told == (
        "2 ranks: rank 1 is the slowest, 20 ms of a step are its own work; rank 0 is the fastest with 15 ms, and waits "
        "25 % of the time."
    )
    assert told in judge(run).lines


def test_ranks_alike_and_runs_too_short_to_time(run_of):
    run = run_of(*([line(step) for step in range(1, 9)] for _ in range(3)))
    assert [*rank_lines(run)] == ["3 ranks, equally fast: 20 ms of a step are a rank's own work."]
    run = run_of(*([line(step) for step in range(1, 5)] for _ in range(2)), [])
    assert [*rank_lines(run)] == []
    assert cells(run)[0]["ms per step, median"] == "–"


def test_several_policies_have_a_row_each(run_of):
    both = [line(step, policy=policy) for policy in ("O0", "O1,dtype=float16") for step in range(1, 9)]
    run = run_of(both, both)
    assert [row["rank, policy"] for row in cells(run)] == [
        "0, O0",
        "1, O0",
        "0, O1,dtype=float16",
        "1, O1,dtype=float16",
    ]


def test_a_rank_that_overflows_alone_is_an_alert_and_ranks_that_all_do_are_none(run_of):
    bad = [line(step, overflowed=step % 2 == 0) for step in range(1, 9)]
    well = [line(step) for step in range(1, 9)]

    def alerts(*ranks):
        return [str(each.what) for each in judge(run_of(*ranks)).alerts if "rank" in each.what]

    assert alerts(well, bad) == ["Only rank 1 overflowed, in 4 steps of 8."]
    assert alerts(bad, bad) == []
    assert alerts(well, [*well[:-1], line(8, overflowed=True)]) == []  # once is what a dynamic scale does


def test_a_broken_line_is_refused_with_its_file_and_place(run_of):
    with pytest.raises(StateError, match=r"metrics\.rank1\.jsonl, line 2, ms is 'soon', not a number"):
        run_of([line(1), line(2)], [line(1), line(2, ms="soon")])


def test_a_killed_rank_leaves_whole_lines(finished_run, tmp_path):
    folder = shutil.copytree(finished_run, tmp_path / "run")
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).rename(folder / f"{name}.partial")
    (folder / "metrics.rank1.jsonl.partial").write_text(f"{json.dumps(line(1))}\n{json.dumps(line(2))[:20]}")
    assert [*read(folder, killed=True).ranks] == [1]
    assert len(read(folder, killed=True).ranks[1]) == 1
