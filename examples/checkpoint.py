"""Save and resume: model, optimizer and session side by side, in one file that is never half written."""

import tempfile
from pathlib import Path

import torch
from torch.nn import functional

import mezzo


def build() -> dict[str, object]:
    """Make what a run consists of; the policy may be another one when it resumes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "amp": mezzo.MixedPrecision(model, optimizer, "O2,emulate=true")}


def train(run: dict, steps: range) -> float:
    """Return the last loss of some steps."""
    for number in steps:
        torch.manual_seed(number)
        x = torch.randn(64, 16)
        with run["amp"].autocast():
            loss = functional.cross_entropy(run["model"](x), x[:, :4].argmax(dim=1))
        run["amp"].backward(loss)
        run["amp"].step()
        run["amp"].zero_grad()
    return loss.item()


path = Path(tempfile.mkdtemp()) / "last.pt"
first = build()
train(first, range(10))
mezzo.save(path, **first)  # model=…, optimizer=…, amp=…

second = build()
mezzo.load(path, **second)
assert train(first, range(10, 20)) == train(second, range(10, 20))  # bit for bit
print(f"resumed: loss {train(second, range(20, 21)):.4g}")
