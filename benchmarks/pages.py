"""Fill the pages: between each pair of markers, what results, an example or the code says."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import vocabulary
from forms import NAIVE
from mezzo.explanation.rows import counted
from mezzo.report.verdict import number
from stepping.contenders import CONTENDERS
from suite import page as suite

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def newest(pattern: str) -> Any:
    """What the newest result that matches holds."""
    return json.loads(sorted(RESULTS.glob(pattern))[-1].read_text())


def where(result: dict[str, Any]) -> str:
    """What a result was measured on, and when."""
    return f"{result['machine']}, {counted(result['threads'], 'thread')}, torch {result['torch']}, {result['date']}"


def tenths(row: dict[str, Any]) -> str:
    """What 80 % of a row's ratios lie between."""
    return f"{row['ratio_p10']:.2f}–{row['ratio_p90']:.2f}"


def the(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The one row with these entries."""
    (match,) = (row for row in rows if wanted.items() <= row.items())
    return match


def figures() -> str:
    """The README's own table: the eight figures that matter, each beside its rival."""
    lines = ["| | mezzo | its rival |", "|---|---:|---:|"]
    for name, short, dtype in (("digits_cnn", "accuracy in %", "float16"), ("docs_lm", "bits per byte", "bfloat16")):
        mine, fp32 = _rows(name, f"O2,dtype={dtype}", "O0")
        metric = [number(row["metric"]) for row in (mine, fp32)]
        lines.append(f"| {name}, held-out {short}, O2 in {dtype} | {metric[0]} | FP32: {metric[1]} |")
    saved = [f"{row['saved_bytes'] / 2**20:.3g} MiB" for row in (mine, fp32)]
    lines.append(f"| docs_lm, saved for the backward pass, O2 in bfloat16 | {saved[0]} | FP32: {saved[1]} |")

    steps, trainings = newest("step-cpu-*.json"), newest("train-cpu-*.json")
    for dtype in ("bfloat16", "float16"):
        rows = the(steps, shapes="gpt2-small", dtype=dtype)["rows"]
        split = the(rows, name="mezzo O2, AdamW split")
        lines.append(_timed(f"optimizer step of 124 M parameters, O2 in {dtype}", split))
    rows = newest("memory-cpu-*.json")["rows"]
    ways = [the(rows, model="GPT-2 small", way=way) for way in ("O2", "O2, int8 moments", "torch.amp")]
    kept = [f"{row['kept'] / 2**20:,.0f} MiB" for row in ways]
    lines.append(f"| kept to train GPT-2 small, O2; with int8 moments | {kept[0]}; {kept[1]} | torch.amp: {kept[2]} |")
    for net, level in (("gpt2-small", "O2"), ("64-tiny", "O1")):
        rows = the(trainings, net=net)["rows"]
        lines.append(_timed(f"training step of {net}, {level} in bfloat16", the(rows, way=f"mezzo {level}")))
    seeds, day = suite.summary("docs_lm")["seeds"], suite.summary("docs_lm")["date"][:10]
    means = f"the families' are means of {seeds} seeds, {day}"
    measured = f"Steps of the optimizer: {where(steps[0])}; training steps: {where(trainings[0])}"
    return "\n".join([*lines, "", f"{measured}; times in turns, 80 % of the ratios in parentheses; {means}."])


def _rows(name: str, *policies: str) -> list[dict[str, Any]]:
    """Rows of a family's comparison."""
    rows = suite.summary(name)["rows"]
    return [the(rows, policy=policy) for policy in policies]


def _timed(what: str, row: dict[str, Any]) -> str:
    """A line of the README's table about time; the rival's own is another in each pair."""
    return f"| {what} | {row['ratio']:.2f}× ({tenths(row)}) | torch.amp's time |"


def overflow() -> str:
    """What the example of an overflow prints, with the paths of this folder left out."""
    path = ROOT / "examples" / "explain_overflow.py"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    report = printed.getvalue().partition("\n")[2].replace(f"{path.parent}/", "")
    return f"```\n{report.rstrip()}\n```"


def spread(row: dict[str, Any]) -> str:
    """A row's ratio, and what 80 % of its ratios lie between."""
    return f"{row['ratio']:.2f} ({tenths(row)})"


def steps() -> str:
    """The table of the newest ``benchmarks/step.py``, its first shapes: a row a contender, a column a dtype."""
    results = newest("step-cpu-*.json")
    first = [result for result in results if result["shapes"] == results[0]["shapes"]]
    lines = [f"| step | {' | '.join(result['dtype'] for result in first)} | bytes moved | bytes kept |"]
    lines += ["|---|" + "---:|" * (len(first) + 2)]
    for one in first[0]["rows"]:
        if one["name"] in CONTENDERS:
            cells = [spread(the(result["rows"], name=one["name"])) for result in first]
            lines.append(f"| {one['name']} | {' | '.join(cells)} | {one['moved_bytes']:g} | {one['kept_bytes']:.3g} |")
    one = first[0]
    count = f"{one['shapes']}, {one['num_parameters'] / 1e6:.0f} M parameters"
    return "\n".join([*lines, "", f"{where(one)}; {count}; medians of {one['repetitions']} rounds."])


def trainings() -> str:
    """The table of the newest ``benchmarks/train.py``, a row for each network."""
    results = newest("train-cpu-*.json")
    lines = ["| network | FP32 | mezzo O1 | mezzo O2 | peak MiB, torch.amp and O2 |", "|---|---:|---:|---:|---:|"]
    for result in results:
        rows = [row for row in result["rows"] if not row["compiled"]]
        fp32, amp, low, halves = (the(rows, way=way) for way in ("fp32", "torch.amp", "mezzo O1", "mezzo O2"))
        peaks = ", ".join(f"{row['peak_bytes'] / 2**20:.3g}" for row in (amp, halves))
        lines.append(f"| {result['net']} | {' | '.join(map(spread, (fp32, low, halves)))} | {peaks} |")
    one = results[0]
    what = f"{one['dtype']}, size {one['size']}"
    return "\n".join([*lines, "", f"{where(one)}; {what}; medians of {one['repetitions']} pairs."])


def kept() -> str:
    """What training keeps: whole models, each way, as the newest ``benchmarks/memory.py`` has counted them."""
    result = newest("memory-cpu-*.json")
    heads = ["MiB", "weights", "gradients", "moments", "kept", "bytes a parameter", "casts", "while it steps"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in result["rows"]:
        sizes = [row[name] for name in ("weights", "gradients", "moments", "kept")]
        numbers = [f"{size / 2**20:,.0f}" for size in sizes]
        more = [f"+{row[name] / 2**20:.0f}" if row[name] else "" for name in ("casts", "step")]
        cells = [f"{row['model']}, {row['way']}", *numbers, f"{row['kept'] / row['num_parameters']:.3g}", *more]
        lines.append(f"| {' | '.join(cells)} |")
    about = "Counted on the tensors of two BF16 steps of AdamW, or Muon and AdamW, and not measured: no GPU, no clock"
    return "\n".join([*lines, "", f"{about}. {where(result)} (`benchmarks/memory.py`)."])


def losses() -> str:
    """What a loss of many rows allocates, each way, as the newest ``benchmarks/memory.py`` has counted it."""
    result = newest("losses-cpu-*.json")
    rows = result["rows"]
    ways = list(dict.fromkeys(row["loss"] for row in rows))
    lines = [f"| MiB at once | {' | '.join(ways)} |", "|---|" + "---:|" * len(ways)]
    for model, policy in dict.fromkeys((row["model"], row["policy"]) for row in rows):
        peaks = [the(rows, model=model, policy=policy, loss=way)["peak"] / 2**20 for way in ways]
        name = "FP32" if policy == "O0" else policy
        lines.append(f"| {model}, {name} | {' | '.join(f'{peak:,.0f}' for peak in peaks)} |")
    about = f"Allocated from the head to the end of the backward pass, for {result['num_rows']:,} rows, with gradients"
    return "\n".join([*lines, "", f"{about}. {where(result)} (`benchmarks/memory.py`)."])


def saved() -> str:
    """What two families save for the backward pass, at each level."""
    lines = ["| for the backward pass | FP32 | O1 in BF16 | O2 in BF16 |", "|---|---:|---:|---:|"]
    for name in ("digits_cnn", "docs_lm"):
        sizes = [row["saved_bytes"] / 2**20 for row in _rows(name, "O0", "O1,dtype=bfloat16", "O2,dtype=bfloat16")]
        lines.append(f"| {name} | {' | '.join(f'{size:.3g} MiB' for size in sizes)} |")
    return "\n".join(lines)


def moments() -> str:
    """The tables of the newest ``benchmarks/moments.py``: what moments of each dtype do to updates and to trainings."""
    result = newest("moments-cpu-*.json")
    named = {"FP32": "FP32", "BF16": "BF16, at random", "int8": "mezzo", "linear codes, to nearest": NAIVE}
    scripts = {script["script"].removesuffix(".py"): script for script in result["scripts"]}
    heads = [f"{name}, {script['metric']['unit']}" for name, script in scripts.items()]
    lines = [f"| moments | error of an update | swallowed | {' | '.join(heads)} |"]
    lines.append("|---|" + "---:|" * (2 + len(heads)))
    for kind, form in named.items():
        alike = the(result["curves"], form=form, beta2=0.999)
        shares = (alike["error"], alike["swallowed_second"])
        cells = [f"{100 * share:.2g} %" if share > 1e-6 else "0" for share in shares]
        for script in scripts.values():
            row = the(script["rows"], moments=kind)
            around = f" ({row['interval'][0]:+.2g} to {row['interval'][1]:+.2g})" if row["interval"] else ""
            cells.append(f"{row['mean']:.4g}{around}")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    losses = {row["moments"]: row["losses"] for row in scripts["docs_lm"]["rows"]}
    steps = ("10", "100")
    losses_text = "; ".join(f"{kind} {', '.join(f'{losses[kind][step]:.3f}' for step in steps)}" for kind in named)
    about = f"{where(result)}; {result['policy']}, three seeds (`benchmarks/moments.py`)."
    lines += ["", f"Loss of docs_lm after {', '.join(steps)} steps: {losses_text}. {about}"]
    return "\n".join(lines)


def below() -> str:
    """The table of the newest ``benchmarks/below_sixteen.py``: what docs_lm comes to, and what its operands lose."""
    result = newest("below-sixteen-cpu-*.json")
    base = the(result["rows"], name="FP32")["saved_bytes"]
    heads = ["products", "bits per byte", "− BF16 (95 %)", "saved", "saturated", "flushed", "noise"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in result["rows"]:
        beside = "" if row.get("difference_to_bf16") is None else f"{row['difference_to_bf16']:+.4f}"
        if row.get("interval_to_bf16"):
            low, high = row["interval_to_bf16"]
            beside += f" ({low:+.3f}…{high:+.3f})"
        mine = [
            operand for operand in result["operands"] if (operand["name"], operand["layer"]) == (row["name"], "all")
        ]
        lost = {operand["role"]: operand for operand in mine}
        shares = ["/".join(_percent(operand[what]) for operand in lost.values()) for what in ("saturated", "flushed")]
        noise = lost.get("gradient", {}).get("noise")
        name = row["name"] if row["seeds"] == result["seeds"] else f"{row['name']} ({counted(row['seeds'], 'seed')})"
        cells = [name, f"{row['mean']:.4f}", beside, f"{row['saved_bytes'] / base:.2f}×", *shares]
        lines.append(f"| {' | '.join(cells)} | {'' if noise is None else f'{noise:.2g}'} |")
    about = f"docs_lm, O1 in BF16, {counted(result['seeds'], 'seed')} where no other number stands; products emulated"
    shares = "Saturated and flushed: activations/weights/gradients in %, means over layers; noise: ‖noise‖ / ‖g‖"
    return "\n".join([*lines, "", f"{about}. {shares}. {where(result)} (`benchmarks/below_sixteen.py`)."])


def healed() -> str:
    """The result of the newest ``benchmarks/heal.py``: NVFP4 with a last tenth in BF16."""
    result = newest("heal-cpu-*.json")
    base, *rows = result["rows"]
    named = "; ".join(f"{row['name']} {row['difference_to_bf16']:+.4f}" for row in rows)
    closes = "" if result["closed"] is None else f": healing closes {100 * result['closed']:.0f} % of the gap"
    conditions = f"{counted(result['seeds'], 'seed')}, {where(result)}"
    return f"docs_lm: BF16 {base['mean']:.4f} bits per byte; {named}{closes} ({conditions}; `benchmarks/heal.py`)."


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.2g}" if share >= 0.0001 else "<0.01"


def ranks() -> str:
    """The table of the newest ``benchmarks/distributed.py``: what ranks send and keep, counted."""
    result = newest("distributed-cpu-*.json")
    lines = ["| way | gathered | reduced | kept by all | weights cast |", "|---|---:|---:|---:|---:|"]
    for row in result["rows"]:
        names = ("gathered_bytes", "reduced_bytes", "kept_bytes", "weight_casts")
        lines.append(f"| {row['way']} | {' | '.join(f'{row[name]:.3g}' for name in names)} |")
    what = f"{result['net']}, size {result['size']}, {result['ranks']} ranks over {result['backend']}"
    return "\n".join([*lines, "", f"torch {result['torch']}, {result['date']}; {what}."])


def hosts() -> str:
    """The table of the newest ``benchmarks/host.py``: the host's time of a step."""
    result = newest("host-cpu-*.json")
    lines = [f"| step of {result['tensors'][-1]} tensors | ratio |", "|---|---:|"]
    lines += [f"| {row['name']} | {spread(row)} |" for row in result["rows"]]
    conditions = f"medians of {result['rounds']} rounds; the machine was shared, with a load of {result['load']:g}"
    return "\n".join([*lines, "", f"{where(result)}; {conditions}."])


def allow_list() -> str:
    """The table of the newest ``benchmarks/allow_list.py``, a row for each allow list of an encoder."""
    result = newest("allow-list-*.json")
    lines = ["| low | policy | time, of FP32's | saved, of FP32's | loss |", "|---|---|---:|---:|---:|"]
    first = result["rows"][0]
    lines += [
        f"| {row['low']} | `{row['policy']}` | {spread(row)} | {row['saved_bytes'] / first['saved_bytes']:.2f} | "
        f"{row['loss']:.4f} |"
        for row in result["rows"]
    ]
    what = "{layers} layers {width} wide, batches of {batch} sequences of {tokens} tokens".format_map(result)
    return "\n".join([*lines, "", f"{where(result)}; {what}; medians of {result['repetitions']} rounds."])


def placements() -> str:
    """The table of the newest ``benchmarks/plan.py``: torch.autocast's placement and the cheapest."""
    result = newest("plan-cpu-*.json")
    lines = [
        "| model | casts | MB moved | gradients off FP32, % | time, eager | compiled |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for model, counts in result["counts"].items():
        both = [counts["eager"][whose] for whose in ("torch.autocast", "cut")]
        rows = {(row["kernels"], row["placement"]): row for row in result["rows"] if row["model"] == model}
        off = [100 * rows["eager", whose]["gradient_error"] for whose in ("torch.autocast", "cut")]
        lines.append(
            f"| {model} | {both[0]['casts']}→{both[1]['casts']} | {both[0]['moved_bytes'] / 1e6:.4g}→"
            f"{both[1]['moved_bytes'] / 1e6:.4g} | {off[0]:.3g}→{off[1]:.3g} | {spread(rows['eager', 'cut'])} | "
            f"{spread(rows['compiled', 'cut'])} |"
        )
    gpt2 = result["gpt2_small"]
    what = f"GPT-2 small is captured in {gpt2['capture_s']:.1f} s and planned in {gpt2['eager_planning_s']:.1f} s"
    trained = newest("planned-docs_lm-*.json")  # mezzo compare --seeds 3 --policy "O1,bf16;O1,bf16,RULES"
    row = trained["rows"][-1]
    low, high = (f"{bound:+.4f}" for bound in row["interval"])
    so = f"docs_lm under the rules of its plan ends {row['difference']:+.4f} bits a byte from FP32 ({low} to {high})"
    return "\n".join([*lines, "", f"{where(result)}; BF16, size {result['size']}; {what}. {so}, three seeds."])


def rollouts() -> str:
    """The table of the newest ``benchmarks/rollout.py``: log-probabilities of trainer and engine."""
    result = newest("rollout-cpu-*.json")
    lines = ["| trainer | engine | mean | largest | KL | 95 % of ratios below |", "|---|---|---:|---:|---:|---:|"]
    for row in sorted(result["rows"], key=lambda row: row["policy"] == "the engine"):
        trainer = row["policy"] if row["policy"] == "the engine" else f"`{row['policy']}`"
        cells = [f"{row[name]:.2g}" for name in ("mean", "largest", "kl")]
        lines.append(f"| {trainer} | {row['engine']} | {' | '.join(cells)} | {row['ratio_p95']:.4f} |")
    what = f"{counted(result['seeds'], 'seed')}, {result['steps']} steps, {result['rows'][0]['tokens']:,} tokens a row"
    about = (
        "distances of log-probabilities; the last rows are engines that score whole texts, against their own sampling"
    )
    return "\n".join([*lines, "", f"{what}: {about}. {where(result)} (`benchmarks/rollout.py`)."])


#: By page: what stands between its markers.
PAGES: Final[Mapping[str, Mapping[str, Callable[[], str]]]] = MappingProxyType(
    {
        "README.md": {"overflow": overflow, "figures": figures},
        "docs/below_sixteen_bits.md": {"below": below, "healed": healed},
        "docs/benchmarks.md": {
            "step": steps,
            "train": trainings,
            "ranks": ranks,
            "host": hosts,
            "allow-list": allow_list,
            "plan": placements,
        },
        "docs/families.md": {
            "verdicts": suite.verdicts,
            "papers": suite.papers,
            "numbers": suite.numbers,
            "without": suite.without,
        },
        "docs/memory.md": {"memory": kept, "losses": losses, "saved": saved, "moments": moments},
        "docs/rollouts.md": {"rollouts": rollouts},
        "docs/policy.md": {
            "fields": vocabulary.policy_fields,
            "levels": vocabulary.levels,
            "treatments": vocabulary.treatments,
            "scales": vocabulary.scale_fields,
        },
    }
)


def filled(page: str) -> str:
    """Return a page's text with every section between its markers."""
    text = (ROOT / page).read_text()
    for name, section in PAGES[page].items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        match = re.search(f"{start}.*?{end}", text, re.DOTALL)
        if match is None:
            raise SystemExit(f"{page} has no {start} … {end}")
        text = text.replace(match.group(0), f"{start}\n{section()}\n{end}")
    return text


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(filled(page))
