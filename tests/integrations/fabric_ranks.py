"""Two ranks under Fabric's ``strategy="ddp"``: a program, for it starts its ranks by itself."""

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import mezzo
from mezzo.integrations.lightning import MezzoFabric


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))


def setup(fabric, is_ours):
    model = net()
    optimizer = (mezzo.optim if is_ours else torch.optim).AdamW(model.parameters(), lr=0.01)
    return fabric.setup(model, optimizer)


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
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main(folder):
    warnings.simplefilter("ignore")
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    found = {}
    for policy in ("O0", "O1,dtype=float16", "O2,dtype=float16", "O2,dtype=bfloat16", "O2,dtype=float16,loss_scale=64"):
        is_ours = policy == "O2,dtype=bfloat16"
        fabric = MezzoFabric(policy, accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        mine = x[fabric.global_rank :: 2]
        given = [(part, part[:, :4].argmax(1)) for part in mine.split(4)] * 2
        model, optimizer = setup(fabric, is_ours)
        losses = train(fabric, model, optimizer, given[:8], overflow_at=[3])
        fabric.save(Path(folder) / "half.ckpt", {"model": model, "optimizer": optimizer})
        losses += train(fabric, model, optimizer, given[8:])

        again = MezzoFabric(policy, accelerator="cpu", devices=2, strategy="ddp")
        again.launch()
        other, further = setup(again, is_ours)
        again.load(Path(folder) / "half.ckpt", {"model": other, "optimizer": further})
        train(again, other, further, given[8:])
        stats = fabric.session.stats()
        found[policy] = {
            "losses": losses,
            "steps": stats.steps,
            "skipped": stats.skipped,
            "weights": torch.cat([each.flatten() for each in model.state_dict().values()]).tolist(),
            "resumed": torch.cat([each.flatten() for each in other.state_dict().values()]).tolist(),
        }
    (Path(folder) / f"rank{fabric.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
