"""Scripts of many styles under a policy, none of their lines edited: metrics, kernels, checkpoints in plain torch."""

import runpy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from .conftest import SCRIPTS

#: Each with the number of its steps.
TRAINING = {
    "plain": 60,
    "accumulate": 80,
    "gan": 400,
    "scaled": 40,
    "older": 40,
    "lbfgs": 8,
    "sam": 40,
    "averages": 80,
    "compiled": 60,
    "frozen": 80,
    "folds": 60,
}
#: Where not all products ran low, the share that did: a frozen backbone trains from the middle on.
SHARES = {"frozen": 0.357}
QUICK = ("plain", "folds")


class Saved:
    """The formats of the matrices that autograd keeps: what products have read, told by torch and not by mezzo."""

    def __init__(self):
        self.matrices = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0)
        self.hooks = saved_tensors_hooks(self.keep, lambda tensor: tensor)

    def keep(self, tensor):
        if tensor.dim() > 1 and tensor.dtype in self.matrices:
            self.matrices[tensor.dtype] += 1
        return tensor


def check(script, name, policy):
    _, fp32 = script(name)
    saved = Saved()
    with saved.hooks:
        ended, metrics = script(name, policy=policy)
    assert fp32.keys() == metrics.keys()
    wrong = {
        key: (fp32[key], metrics[key]) for key in fp32.keys() - {"scale"} if abs(metrics[key] / fp32[key] - 1) > 0.02
    }
    assert wrong == {}
    report = ended.report
    assert report.alarm == ""
    assert report.low_share == pytest.approx(SHARES.get(name, 1.0), abs=0.01)
    assert report.steps == TRAINING[name]
    assert report.skipped <= 2
    return report, saved.matrices


@pytest.mark.parametrize("name", QUICK)
def test_a_script_trains_as_well_as_in_fp32_and_its_products_run_low(script, name):
    report, matrices = check(script, name, "O1,dtype=bfloat16")
    assert report.flops.keys() == {"bfloat16"}
    assert matrices[torch.bfloat16] > 3 * TRAINING[name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("name", TRAINING)
def test_each_script_under_a_policy(script, name):
    levels = [f"{level},dtype={dtype}" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]
    check(script, name, levels[list(TRAINING).index(name) % 4])


def test_a_checkpoint_of_the_run_loads_in_plain_torch(script, tmp_path):
    path = tmp_path / "checkpoint.pt"
    _, metrics = script("plain", path, policy="O2,dtype=bfloat16")
    saved = torch.load(path)
    assert {value.dtype for value in saved["model"].values()} == {torch.float32}

    plain = runpy.run_path(str(SCRIPTS / "plain.py"), run_name="plain")
    model = plain["Net"]()
    model.load_state_dict(saved["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(saved["optimizer"])
    x, y = (torch.from_numpy(array) for array in plain["load_digits"](return_X_y=True))
    right = model((x[1500:] / 16).float()).argmax(1) == y[1500:]
    assert float(right.float().mean()) == pytest.approx(metrics["accuracy"], abs=0.004)


def test_tensors_of_no_module_are_left_alone_and_named(script):
    ended, metrics = script("functional_only", policy="O1,dtype=bfloat16")
    assert metrics == script("functional_only")[1]
    assert ended.report.left_alone == {"SGD over 1 tensor": "no module holds what it updates"}


def test_regions_and_scalers_of_a_script_are_the_sessions(script):
    ended, metrics = script("scaled", policy="O1,dtype=bfloat16")
    assert ended.report.intercepted["torch.autocast"] == 40
    assert ended.report.intercepted["GradScaler"] == 1
    assert metrics["scale"] == ended.report.scale == 1.0  # the policy's, and not 2^12


def test_weights_that_an_optimizer_and_one_inside_it_update_are_stored_low(script):
    ended, _ = script("sam", policy="O2,dtype=float16")
    assert (ended.report.left_alone, ended.report.low_share, ended.report.steps) == ({}, 1.0, 40)
