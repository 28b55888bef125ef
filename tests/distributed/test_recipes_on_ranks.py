"""Recipes trained on several ranks: as by one process on the same batches, with a log of each, and one end of all."""

import contextlib
import dataclasses
import io
import json
import math
import os
import signal
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mezzo import recipes, report
from mezzo.cli import main
from mezzo.errors import MezzoError
from mezzo.recipes import compare, train, training
from mezzo.step import ranks as step_ranks

from ..recipes.tiny import TINY
from .ranks import RankError, on_ranks

#: By policy: how far a loss may be off, by the rounding of gradients, 2**-11 and 2**-8 of each, in so few steps.
NEAR = {"O0": 1e-6, "O1,dtype=float16,loss_scale=dynamic(init=1024)": 0.02, "O2,dtype=bfloat16": 0.1}
POLICIES = tuple(NEAR)
WAYS = ("ddp", "fsdp")
STEPS = 8


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def compared(folder, ways):
    """What each rank was returned, by way of sharing."""
    found = {}
    with mock.patch.object(training, "NUM_EVALUATIONS", 1):
        for way in ways:
            comparison = compare(TINY, POLICIES, steps=STEPS, out=f"{folder}/{way or 'alone'}", parallel=way)
            found[way] = [row.final_metric for row in comparison.rows], comparison.ranks, comparison.parallel
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same comparison in one process, and on two ranks; and what these returned."""
    folder = tmp_path_factory.mktemp("runs")
    alone = compared(str(folder), (None,))[None][0]
    return folder, alone, on_ranks(2, compared, str(folder), WAYS)


def test_ranks_train_as_one_process_does_on_the_same_batches(runs):
    folder, alone, returned = runs
    reference = lines(folder / "alone" / "metrics.jsonl")
    for way in WAYS:
        wrong = []
        for mine, theirs in zip(lines(folder / way / "metrics.jsonl"), reference, strict=True):
            near = NEAR[mine["policy"]]
            numbers = [(float(mine[name]), float(theirs[name])) for name in ("loss", "grad_norm")]
            if any(not math.isclose(a, b, rel_tol=near) for a, b in numbers) or mine["skipped"] != theirs["skipped"]:
                wrong.append((mine, theirs))
        assert wrong == []
        for metrics, ranks, shared in (each[way] for each in returned):
            assert (ranks, shared) == (2, way)
            assert metrics == returned[0][way][0]  # bit for bit, on all ranks
            assert metrics[0] == pytest.approx(alone[0], rel=1e-5)


def test_the_first_rank_writes_the_run_and_each_its_own_log(runs):
    folder, _, returned = runs
    for way in returned[0]:
        run = report.read(folder / way)
        names = {path.name for path in (folder / way).iterdir()}
        assert names == {"summary.json", "metrics.jsonl", "metrics.rank0.jsonl", "metrics.rank1.jsonl"}
        assert (run.summary["parallel"], run.summary["ranks"]) == (way, 2)
        assert f"2 ranks ({way}): times and bytes are those of rank 0" in report.facts(run.summary)
        for rank in range(2):
            log = lines(folder / way / f"metrics.rank{rank}.jsonl")
            assert [(each["policy"], each["step"]) for each in log] == [
                (policy, step) for policy in POLICIES for step in range(1, STEPS + 1)
            ]
            assert all(0 <= each["waiting_ms"] <= each["ms"] and each["peak_bytes"] > 2**20 for each in log)
            assert not any(each["overflowed"] for each in log)
            assert all(each["samples_per_s"] == pytest.approx(8e3 / each["ms"]) for each in log)  # 8 of 16


def test_what_is_sent_is_weights_and_gradients_in_their_dtype(runs):
    folder, _, _ = runs
    # On two ranks an all-reduce of n bytes sends n, a gathering before the forward pass n / 2, and a scattering after
    # the backward pass n / 2. Besides there are padding, and the few numbers that a step exchanges.
    for way in WAYS:
        for line in lines(folder / way / "metrics.rank1.jsonl"):
            if line["step"] == STEPS:
                size = 161 * (2 if line["policy"].startswith("O2") else 4)
                assert size <= line["wire_bytes"] <= size + 300, (way, line)


def told(folder, *words):
    """What ``mezzo train`` comes to on this rank: exit code, stdout, stderr."""
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(recipes, "get", return_value=TINY),
        mock.patch.object(report, "curves"),
        mock.patch.object(report, "page"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(SystemExit),
    ):
        main(list(words))
        return 0, out.getvalue(), err.getvalue()
    return 1, out.getvalue(), err.getvalue()


def test_the_command_prints_once_and_decides_on_one_directory(tmp_path):
    words = ("train", "tiny", "--policy", "O2,dtype=bfloat16", "--parallel", "ddp", "--steps", "8")
    (_, out, err), (_, silent, quiet) = on_ranks(2, told, str(tmp_path), *words)
    assert (silent, quiet) == ("", "")
    assert out.startswith("O2,dtype=bfloat16: held-out error ")
    assert "waiting for" in out
    (run,) = (tmp_path / "runs").iterdir()
    assert f"run directory: runs/{run.name}\n" in err
    assert {"metrics.rank0.jsonl", "metrics.rank1.jsonl", "summary.json"} <= {path.name for path in run.iterdir()}


def refused(folder):
    """The errors of this rank, by what is wrong."""
    (Path(folder) / f"of-rank-{dist.get_rank()}").mkdir()
    dist.barrier()
    calls = {
        "no --parallel": lambda: train(TINY, "O0", steps=1),
        "unknown": lambda: train(TINY, "O0", steps=1, parallel="dpp"),
        "a batch of 15": lambda: train(odd, "O0", steps=1, parallel="ddp"),
        "taken": lambda: compare(TINY, ["O0"], steps=1, parallel="ddp", out=folder),
        "a policy": lambda: compare(TINY, ["O4"], steps=1, parallel="ddp"),
        "inspect": lambda: recipes.inspect(TINY, steps=1),
        "tune": lambda: recipes.tune(TINY, steps=1),
    }
    odd = dataclasses.replace(TINY, batches=lambda split, seed: (tuple(x[:15] for x in b) for b in [split.train]))
    found = {}
    for name, call in calls.items():
        try:
            call()
        except MezzoError as error:
            found[name] = type(error).__name__, str(error)
    total = torch.ones(1)
    dist.all_reduce(total)  # nobody waits for anybody
    return found, total.item()


def test_what_ranks_are_refused_all_of_them_are(tmp_path):
    answers = on_ranks(2, refused, str(tmp_path))
    for rank, (found, total) in enumerate(answers):
        assert total == 2.0
        assert found.pop("taken") == (
            "PolicyError",
            "the run directory holds files that no mezzo run wrote\n"
            f"  where  {tmp_path}\n"
            "  why    of-rank-0, of-rank-1 would stand beside the results\n"
            f"  write  --out {tmp_path}/run",
        )
        assert found.pop("a policy")[1].startswith("policy 'O4': unknown level 'O4'")
        assert found == {
            "no --parallel": (
                "PolicyError",
                "each of 2 processes would train all of it, and write the same files\n"
                f"  where  rank {rank} of 2\n"
                "  why    nothing says how they share the work\n"
                "  write  --parallel ddp, or --parallel fsdp",
            ),
            "unknown": (
                "PolicyError",
                "unknown way to train in parallel 'dpp'\n  why    did you mean 'ddp'? valid: ddp, fsdp",
            ),
            "a batch of 15": (
                "PolicyError",
                "2 ranks cannot share a batch of 15 in equal parts\n"
                f"  where  recipe tiny, rank {rank} of 2\n"
                "  why    the mean over ranks is the mean over the batch only where each has as many samples\n"
                "  write  mezzo train tiny",
            ),
            **{
                verb: (
                    "PolicyError",
                    f"mezzo {verb} works in one process, and 2 were started\n"
                    f"  where  rank {rank} of 2\n"
                    "  why    all of them would do the same, and write the same files\n"
                    f"  write  mezzo {verb} …, without torchrun",
                )
                for verb in ("inspect", "tune")
            },
        }


def joining(port, fault, folder):
    """Train as torchrun would have it, with a fault on rank 1 in step 3."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    steps = []

    def loss(outputs, targets):
        steps.append(len(steps) + 1)
        if os.environ["RANK"] == "1" and len(steps) == 3:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raising":
                raise ValueError("a broken batch")
            if fault == "Ctrl-C":
                os.kill(os.getpid(), signal.SIGINT)
        return TINY.loss(outputs, targets) * (math.nan if fault == "nan" and os.environ["RANK"] == "1" else 1.0)

    recipe = dataclasses.replace(TINY, loss=loss)
    before = signal.getsignal(signal.SIGINT)
    with mock.patch.object(step_ranks, "_SIGNS_S", 0.5):
        comparison = compare(recipe, ["O0"], steps=5, parallel="ddp", out=folder)
    assert signal.getsignal(signal.SIGINT) is before
    assert not dist.is_initialized()
    return comparison.interrupted, [row.steps for row in comparison.rows]


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("fault, why", [("killed", ""), ("raising", "ValueError: a broken batch (rank 1); ")])
def test_a_rank_that_fails_ends_all_and_is_named_with_its_step(port, fault, why, tmp_path):
    with pytest.raises(RankError) as caught:
        on_ranks(2, joining, port, fault, str(tmp_path / "run"), backend=None)
    text = caught.value.texts[0]
    assert "DistributedError: rank 1 did not take part in step 3\n  where  " in text
    assert f"why    {why}" in text
    assert "write  look at what rank 1 wrote last" in text
    run = report.read(tmp_path / "run", killed=True)
    assert run.killed
    assert run.series["O0"].step == (1, 2)
    assert [len(each) for each in run.ranks.values()] == [2, 2]


def test_ctrl_c_on_one_rank_stops_all_after_the_same_step(port, tmp_path):
    answers = on_ranks(2, joining, port, "Ctrl-C", str(tmp_path / "run"), backend=None)
    assert answers == [(True, [2])] * 2
    assert [len(each) for each in report.read(tmp_path / "run").ranks.values()] == [2, 2]


def test_a_rank_that_overflows_alone_is_told(port, tmp_path):
    answers = on_ranks(2, joining, port, "nan", str(tmp_path / "run"), backend=None)
    assert answers == [(False, [5])] * 2
    run = report.read(tmp_path / "run")
    assert [[line["overflowed"] for line in each] for each in run.ranks.values()] == [[False] * 5, [True] * 5]
    assert [alert.what for alert in report.judge(run).alerts] == [
        "5 of 5 losses were infinite or NaN.",
        "5 of 5 steps were skipped.",
        "Only rank 1 overflowed, in 5 steps of 5.",
    ]


def evaluated_and_compared():
    comparison = compare(TINY, ["O3,dtype=bfloat16"], steps=2, parallel="fsdp")  # evaluates last, which gathers
    return comparison.rows[0].status


def test_a_session_over_shards_is_closed_after_an_evaluation():
    assert on_ranks(2, evaluated_and_compared) == ["finished"] * 2
