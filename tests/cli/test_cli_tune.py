"""`mezzo tune`: the answer first, a policy with reasons, nothing written unless it is asked for, honest exit codes."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from mezzo.cli import tune as command
from mezzo.policy import Policy
from mezzo.script import Program, tuning

pytestmark = pytest.mark.usefixtures("emulating")

SCRIPTS = Path(__file__).parent.parent / "script" / "scripts"
NOISY = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(24):
    x = torch.randn(16, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    if "crash" in sys.argv and model[0].weight.element_size() == 2 and step == 6:
        raise ValueError("the script's own")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9g}")
"""
MASKED = """
import torch
from torch.nn import functional


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qk, self.out = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
        mask = torch.zeros(8, 8)
        mask[0] = -1e9
        self.register_buffer("mask", mask)

    def forward(self, x, *, scale):
        scores = self.qk(x) @ x.mT * scale
        return {"logits": self.out((scores + self.mask).softmax(-1) @ x).mean(1), "unused": scores}


torch.manual_seed(0)
batches = [(torch.randn(4, 8, 16), torch.randint(4, (4,))) for _ in range(3)]
model = Masked()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x, y in batches * 2:
    functional.cross_entropy(model(x, scale=0.25)["logits"], y).backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
"""


@pytest.fixture
def masked(tmp_path):
    (tmp_path / "masked.py").write_text(MASKED)
    return "masked.py"


def test_the_answer_the_rules_and_the_policy_to_paste(mezzo, tmp_path, masked):
    code, out, err = mezzo("tune", "--policy", "O1,fp16", masked)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("float16: 1 of ")
    assert lines[1].startswith("  pinned  softmax in (model)")
    assert "is not finite in step 1, with it the worst gradient has" in " ".join(out.split())
    assert lines[-1].startswith('  write   mezzo.MixedPrecision(model, optimizer, "O1,dtype=float16,fp32=softmax')
    policy = lines[-1].split('"')[1]
    assert f'next: mezzo compare --policies "O0; {policy}" masked.py' in err
    assert "done" not in out + err  # it ended once three calls had gradients
    assert [path.name for path in tmp_path.iterdir()] == ["masked.py"]
    assert "\x1b" not in out + err
    full = mezzo("tune", "--policy", "O1,fp16", "--full", masked)[1]
    assert full.startswith(out)
    assert len(full.splitlines()) == len(lines) + int(lines[0].split(" of ")[1].split()[0])


def test_a_folder_holds_the_policy_with_its_reasons_and_the_summary_last(mezzo, tmp_path, masked):
    words = ("tune", "--policy", "O1,fp16,emulate=true,fp32_module=out", "--out", "tuned", "--steps", "2")
    code, out, err = mezzo(*words, "--json", masked)
    assert code == 0
    data = json.loads(out)
    assert json.loads((tmp_path / "tuned" / "summary.json").read_text()) == data
    assert sorted(path.name for path in (tmp_path / "tuned").iterdir()) == ["found.policy", "summary.json"]
    policy = Policy.load("tuned/found.policy")
    assert Policy.parse(data["policy"]) == policy
    assert policy.emulate is True
    assert [str(rule) for rule in policy.rules] == ["fp32=softmax", "fp32_module=out"]  # its own is kept
    assert [rule.reason for rule in policy.rules] == list(data["rules"].values())
    assert data["evidence"]["steps"] == 2
    assert 'next: mezzo compare --policies "O0; tuned/found.policy" masked.py' in err
    again = mezzo(*words, masked)
    assert again[:2] == (2, "")
    assert "tuned has results already" in again[2]
    assert mezzo("run", "--policy", "tuned/found.policy", masked)[:2] == (0, "done\n")


def test_trials_begin_with_the_scripts_own_gradients(tmp_path, monkeypatch):
    kept, noisy = {}, tmp_path / "noisy.py"
    noisy.write_text(NOISY)

    def tuned(model, loss_fn, batches, *, optimizer, **options):
        loss_fn(model, batches[0]).backward()
        kept.update(model=model, batches=batches, optimizer=optimizer(model.parameters()), options=options)

    monkeypatch.setattr(tuning, "tuned", tuned)
    tuning.tune(Program(name=str(noisy)), "O1,fp16", steps=2, after=3)
    model, (x,) = kept["model"], kept["batches"][0].args
    gradients = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    for gradient, param in zip(gradients, model.parameters(), strict=True):
        assert torch.allclose(gradient, param.grad, rtol=1e-5, atol=1e-7)
    assert isinstance(kept["optimizer"], torch.optim.AdamW)
    assert (kept["optimizer"].param_groups[0]["lr"], len(kept["batches"])) == (1e-2, 2)
    assert kept["options"] == {"policy": Policy.O1("float16"), "steps": 2}
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    assert not torch.equal(model[0].weight, first[0].weight)  # it has taken three steps


def test_gradients_that_stay_far_from_fp32_are_an_alert(mezzo, monkeypatch, masked):
    real = command.tuned_script

    def far_from_fp32(*args, **kwargs):
        result = real(*args, **kwargs)
        worse = dataclasses.replace(result.evidence.result, sqnr_db=10.0)
        return dataclasses.replace(result, evidence=dataclasses.replace(result.evidence, result=worse))

    monkeypatch.setattr(command, "tuned_script", far_from_fp32)
    code, out, _ = mezzo("tune", "--policy", "O1,fp16", masked)
    assert code == 4
    assert "the worst gradient stays at 10 dB: no rule raises it by 3 dB" in out
