"""Two ranks under each framework: an overflow on one is both's, weights stay equal, and a checkpoint goes on."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.slow  # two processes that import the frameworks, and train a dozen times
@pytest.mark.parametrize("names", [("lightning", "fabric"), ("accelerate", "transformers")], ids=" and ".join)
def test_two_ranks_step_together(tmp_path, names):
    if not all(find_spec("lightning" if name == "fabric" else name) for name in names):
        pytest.skip(f"needs {' and '.join(names)}")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, Path(__file__).with_name("ranks.py"), tmp_path, *names], env=environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    for name, results in first.items():
        assert results["weights"] == second[name]["weights"], name
        assert results["resumed"] == results["weights"], name
        assert (results["steps"], results["skipped"]) == (8, 1), name
        reference = first[f"{name.split()[0]} O0"]["losses"]
        assert sum(results["losses"][-4:]) == pytest.approx(sum(reference[-4:]), rel=0.02), name
