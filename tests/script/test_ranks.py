"""``torchrun … -m mezzo run`` on two ranks: one report, equal weights, FP32 checkpoints, the loss of FP32."""

import os
import re
import subprocess
import sys

import pytest
import torch

from .conftest import SCRIPTS


def trained(folder, *mezzo):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *mezzo,
         str(SCRIPTS / "two_ranks.py"), str(folder)],
        capture_output=True, text=True, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(each) for each in re.findall(r"\d\.\d{4}", done.stdout)]  # both ranks' lines, as they come
    return losses, [torch.load(folder / f"{rank}.pt") for rank in range(2)], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["O1,dtype=bfloat16", "O2,dtype=bfloat16", "O2,dtype=float16,loss_scale=dynamic(init=1024)"]
)
def test_two_ranks_train_as_one(tmp_path, policy):
    (fp32, _), _, _ = trained(tmp_path)
    (first, second), saved, err = trained(tmp_path, "-m", "mezzo", "run", "--policy", policy)
    assert first == second == pytest.approx(fp32, rel=0.02)
    assert all(torch.equal(saved[0][name], value) for name, value in saved[1].items())
    assert {value.dtype for value in saved[0].values()} == {torch.float32}
    assert err.count(f"under {policy}: 100 % of the work of its matrix products ran low") == 1
    assert ("DistributedDataParallel, to store" in err) == policy.startswith("O2")
