"""Two ranks under Fabric's ``strategy="ddp"``: a program, for it starts its ranks by itself."""

import json
import sys
import warnings
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

import mezzo
from mezzo.integrations.lightning import MezzoPrecision


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))


def setup(policy, is_ours):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=MezzoPrecision(policy))
    fabric.launch()
    model = fabric.setup_module(net())
    optimizer = (mezzo.optim if is_ours else torch.optim).AdamW(model.parameters(), lr=0.01)
    return fabric, model, fabric.setup_optimizers(optimizer)


def train(fabric, model, optimizer, given, overflow_at=()):
    losses = []
    for number, (x, y) in enumerate(given, start=1):
        with fabric.no_backward_sync(model, enabled=number % 2 != 0):
            scores = model(x)
            if number in overflow_at and fabric.global_rank == 1:
                scores.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))  # on one rank alone
            loss = nn.functional.cross_entropy(scores, y)
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if number % 2 == 0:
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main(folder):
    warnings.simplefilter("ignore")
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    found = {}
    for policy, is_ours in (
        ("O0", False),
        ("O1,dtype=float16", False),
        ("O2,dtype=float16", False),
        ("O2,dtype=bfloat16", True),
        ("O2,dtype=float16,loss_scale=64", False),
    ):
        fabric, model, optimizer = setup(policy, is_ours)
        mine = x[fabric.global_rank :: 2]
        given = [(part, part[:, :4].argmax(1)) for part in mine.split(4)] * 2
        losses = train(fabric, model, optimizer, given[:8], overflow_at=[3])
        path = Path(folder) / f"{policy}.ckpt"
        fabric.save(path, {"model": model, "optimizer": optimizer})
        losses += train(fabric, model, optimizer, given[8:])
        again, other, further = setup(policy, is_ours)
        again.load(path, {"model": other, "optimizer": further})
        train(again, other, further, given[8:])
        plugin = fabric.strategy.precision
        stats = plugin.session.stats()
        found[policy] = {
            "losses": losses,
            "steps": stats.steps,
            "skipped": stats.skipped,
            "metrics": [plugin.metrics(), again.strategy.precision.metrics()],
            "weights": nn.utils.parameters_to_vector(model.state_dict().values()).tolist(),
            "resumed": nn.utils.parameters_to_vector(other.state_dict().values()).tolist(),
        }
    (Path(folder) / f"rank{fabric.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
