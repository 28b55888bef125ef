"""The table of a comparison: every number where a reader looks for it."""

import io
import json

import pytest
from rich.console import Console

from mezzo.report import facts, results_tables, to_markdown
from mezzo.report.table import columns


def text_of(summary, width):
    console = Console(width=width)
    with console.capture() as capture:
        for table in results_tables(summary, width):
            console.print(table)
    return capture.get()


def cells(summary, policy):
    row = next(row for row in summary["rows"] if row["policy"] == policy)
    return {" ".join(column.head): column.cell(row) for column in columns(summary)}


def test_the_cells_of_the_reference(summary):
    assert cells(summary, "O0") == {
        "policy": "O0",
        "arithmetic": "native",
        "test accuracy final, %": "99.00",
        "best, %": "99.33",
        "final − O0, points": "–",
        "ms per step, median (10–90 %)": "11.3 (10.3–13.0)",
        "weights + gradients + optimizer": "2.00 MiB",
        "saved for backward": "4.00 MiB",
        "steps skipped": "0",
        "final scale": "1",
        "non-finite losses": "0",
    }


def test_the_cells_of_another_policy_compare_with_the_reference(summary):
    found = cells(summary, "O2,dtype=float16")
    assert found["arithmetic"] == "emulated"
    assert found["final − O0, points"] == "+0.17"
    assert found["saved for backward"] == "2.00 MiB (0.50×)"
    assert found["weights + gradients + optimizer"] == "2.00 MiB (1.00×)"
    assert found["final scale"] == "2^16"
    assert found["steps skipped"] == "2"


def test_a_difference_that_rounds_to_zero_has_no_minus(summary):
    row = next(row for row in summary["rows"] if row["policy"] == "O2,dtype=float16")
    row["difference"] = -1e-9
    assert cells(summary, "O2,dtype=float16")["final − O0, points"] == "+0.00"


def test_an_interrupted_policy_says_so_and_shows_what_is_unknown_as_a_dash(summary):
    found = cells(summary, "O3,dtype=float16")
    assert found["policy"] == "O3,dtype=float16\n(interrupted at step 120)"
    assert found["test accuracy final, %"] == "nan"
    assert found["final − O0, points"] == "nan"
    assert found["non-finite losses"] == "17"
    unknown = [name for name, cell in found.items() if cell == "–"]
    assert unknown == [
        "ms per step, median (10–90 %)",
        "weights + gradients + optimizer",
        "saved for backward",
        "final scale",
    ]


def test_peak_memory_appears_only_where_it_was_measured(summary):
    assert "peak allocated" not in cells(summary, "O0")
    for row, peak in zip(summary["rows"], (8 * 2**30, 2 * 2**30, None), strict=True):
        row["peak_bytes"] = peak
    assert cells(summary, "O0")["peak allocated"] == "8.00 GiB"
    assert cells(summary, "O2,dtype=float16")["peak allocated"] == "2.00 GiB (0.25×)"
    assert cells(summary, "O3,dtype=float16")["peak allocated"] == "–"


def test_without_a_reference_row_nothing_is_compared(summary):
    del summary["rows"][0]
    assert cells(summary, "O2,dtype=float16")["saved for backward"] == "2.00 MiB"


def test_each_policy_is_one_line_in_a_wide_terminal(summary):
    lines = text_of(summary, 200).splitlines()
    for policy in ("O0 ", "O2,dtype=float16", "O3,dtype=float16"):
        (line,) = [line for line in lines if line.strip().startswith(policy)]
        assert len(line.split()) >= 10
    assert max(map(len, lines)) <= 200


@pytest.mark.parametrize("width", [*range(45, 165), 80, 100, 120, 180, 200])
def test_a_narrow_terminal_shows_every_number_whole_under_its_policy(summary, width):
    """At every width: a part that is wider than was reckoned by one character cuts the policies."""
    text = text_of(summary, width)
    assert text.count("O2,dtype=float16") == len(results_tables(summary, width))
    for head in ("accuracy", "best,", "saved for", "weights + gradients", "ms per step,", "non-finite"):
        assert text.count(head) == 1
    for number in ("99.00", "99.33", "+0.17", "11.3 (10.3–13.0)", "2.00 MiB (0.50×)", "2^16"):
        assert number in text, number
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_long_policy_is_folded_at_commas(summary, width):
    long = "O2,dtype=float16,loss_scale=dynamic(init=2^12),fp32=softmax:layer_norm,fp32_module=blocks.*.norm,lists=wire"
    summary["rows"][1] = summary["rows"][1] | {"policy": long}
    text = text_of(summary, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert len(results_tables(summary, width)) <= 4
    names = [line.split(" ")[0] for line in text.splitlines()]
    pieces = [name for name in names if name and name in long]
    assert long in "".join(pieces)
    assert all(piece.endswith((",", "wire")) for piece in pieces)


def test_a_wide_terminal_gets_one_table_and_an_absurd_one_a_column_each(summary):
    assert len(results_tables(summary, 200)) == 1
    assert len(results_tables(summary, 1)) == len(columns(summary)) - 1


def test_markdown_has_a_line_for_each_policy_and_the_facts(summary):
    table, _, rest = to_markdown(summary).partition("\n\n")
    head, rule, *rows = table.splitlines()
    assert head.startswith("| policy | arithmetic | test accuracy final, % |")
    assert rule == "| --- | --- |" + " ---: |" * 9
    assert len(rows) == 3
    assert all(line.count("|") == head.count("|") for line in rows)
    assert rows[1].startswith("| O2,dtype=float16 | emulated | 99.16 | 99.33 | +0.17 |")
    assert rest == "\\\n".join(facts(summary)) + "\n"


def test_markdown_escapes_bars(summary):
    summary["rows"][0]["policy"] = "O0|x"
    assert "| O0\\|x |" in to_markdown(summary)


def test_the_facts_name_task_machine_date_reference_layout_and_emulation(summary):
    assert facts(summary) == [
        "digits-cnn: a network on digits; 300 steps, seed 0",
        "AMD EPYC, 2 threads; torch 2.13.0; mezzo 0.1.0; 2026-11-21",
        "for reference: chance 11.22 %",
        "layout: channels-last (NHWC) in every policy but O0, which is contiguous (NCHW)",
        "emulated: products computed in FP32 from rounded operands, as this device lacks fast ones; "
        "their time says nothing about the format",
        "interrupted before O1,dtype=bfloat16",
    ]


def test_the_facts_count_one_thread_as_one(summary):
    summary["machine"] |= {"threads": 1}
    assert facts(summary)[1].startswith("AMD EPYC, 1 thread; ")


def test_the_facts_say_nothing_that_does_not_apply(summary):
    summary["rows"] = summary["rows"][:1]
    summary |= {"interrupted": False, "policies": ["O0"], "references": {}}
    assert len(facts(summary)) == 2


def test_the_facts_of_a_gpu_name_it_and_the_state_of_tf32(summary):
    summary["machine"] |= {"gpu": "H200", "tf32_matmul": False, "tf32_convolution": True}
    assert facts(summary)[1].startswith("H200; AMD EPYC, 2 threads; ")
    assert "; TF32 off in products, on in convolutions; " in facts(summary)[1]


def test_the_facts_say_why_a_run_stopped(summary):
    summary["rows"][2] |= {"status": "stopped", "note": "the scale collapsed\n  where  step 121"}
    assert "O3,dtype=float16 stopped after 120 steps: the scale collapsed" in facts(summary)


def test_the_summary_of_a_real_run_makes_a_table(finished_run):
    summary = json.loads((finished_run / "summary.json").read_text())
    text = text_of(summary, 200)
    assert all(row["policy"] in text for row in summary["rows"])
    assert "+" in text or "-" in text


def test_names_are_shown_as_they_are_and_move_no_cursor(summary):
    """A glob in brackets is no markup of rich's, and an escape no colour."""
    summary["rows"][1]["policy"] = "O1,dtype=float16,fp32_module=[ab]*+[red]x[/]\x1b[31m"
    summary["recipe"] = "digits\x9b2J"
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    for table in results_tables(summary, 200):
        console.print(table)
    assert r"fp32_module=[ab]*+[red]x[/]\x1b[31m" in console.file.getvalue()
    assert "\x1b[31m" not in console.file.getvalue()
    assert r"digits\x9b2J" in facts(summary)[0]
    assert "\x1b" not in to_markdown(summary)
