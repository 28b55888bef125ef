"""``torchrun … -m mezzo run`` on two ranks, wrapped and sharded: one report, equal weights, FP32 checkpoints."""

import os
import re
import subprocess
import sys

import pytest
import torch

from .conftest import SCRIPTS


def ran(folder, name, *mezzo, arguments=(), ends_with=0):
    """Run a script on two ranks: what it printed, what it saved by rank, and the report."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *mezzo,
         str(SCRIPTS / f"{name}.py"), str(folder), *arguments],
        capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode != 0) == (ends_with != 0), done.stderr
    assert ends_with == 0 or f"exitcode: {ends_with}" in done.stderr  # torchrun itself ends with 1
    return done.stdout, [torch.load(folder / f"{rank}.pt") for rank in range(2)], done.stderr


def under(policy):
    return ("-m", "mezzo", "run", "--policy", policy)


POLICIES = ("O1,dtype=bfloat16", "O2,dtype=bfloat16", "O2,dtype=float16,loss_scale=dynamic(init=1024)")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_two_ranks_train_as_one(tmp_path, policy):
    losses = [ran(tmp_path, "two_ranks"), ran(tmp_path, "two_ranks", *under(policy))]
    (fp32, _), (first, second) = ([float(loss) for loss in re.findall(r"\d\.\d{4}", out)] for out, _, _ in losses)
    _, saved, err = losses[1]
    assert first == second == pytest.approx(fp32, rel=0.02)
    assert all(torch.equal(saved[0][name], value) for name, value in saved[1].items())
    assert {value.dtype for value in saved[0].values()} == {torch.float32}
    assert err.count(f"under {policy}: 100 % of the work of its matrix products ran low") == 1
    assert ("DistributedDataParallel, to convert" in err) == policy.startswith("O2")


@pytest.mark.slow
@pytest.mark.parametrize("policy, how", [(POLICIES[0], "blocks"), (POLICIES[2], "whole")])
def test_a_script_that_shards_its_model_by_itself_trains_as_in_fp32(tmp_path, policy, how):
    _, fp32, _ = ran(tmp_path, "two_shards", arguments=[how])
    _, low, err = ran(tmp_path, "two_shards", *under(policy), arguments=[how])
    assert low[0]["losses"] == low[1]["losses"] == pytest.approx(fp32[0]["losses"], rel=0.02)
    assert all(torch.equal(low[0]["model"][name], value) for name, value in low[1]["model"].items())
    assert {value.dtype for value in low[0]["model"].values()} == {torch.float32}
    assert err.count(f"under {policy}: 100 % of the work of its matrix products ran low") == 1
    assert "left alone" not in err


@pytest.mark.slow
def test_a_scripts_own_mixed_precision_policy_is_left_alone_and_trains_as_by_itself(tmp_path):
    _, plain, _ = ran(tmp_path, "two_shards", arguments=["own"])
    _, same, err = ran(tmp_path, "two_shards", *under("O1,dtype=bfloat16"), arguments=["own"], ends_with=4)
    assert [rank["losses"] for rank in same] == [rank["losses"] for rank in plain]
    assert all(torch.equal(same[0]["model"][name], value) for name, value in plain[0]["model"].items())
    assert "fully_shard gathers parameters in bfloat16, and O1 wants float32" in err
