"""Two ranks under Fabric's ``strategy="ddp"``, and with shards of a model: a program, for it starts its ranks."""

import json
import sys
import warnings
from pathlib import Path

import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn

import mezzo
from mezzo.integrations.lightning import MezzoFabric


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))


def setup(policy, is_ours, shards):
    def shard(model, mesh):
        return mezzo.fully_shard(model, policy, mesh=mesh["data_parallel"], wrap=nn.Linear)

    strategy = "ddp"
    if shards:
        as_folder = shards == "folder"
        strategy = ModelParallelStrategy(
            shard, data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=as_folder
        )
    fabric = MezzoFabric(policy, accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(net())
    optimizer = (mezzo.optim if is_ours else torch.optim).AdamW(model.parameters(), lr=0.01)
    return fabric, model, fabric.setup_optimizers(optimizer)


def whole(model):
    weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.state_dict().values()]
    return torch.cat([each.flatten() for each in weights]).tolist()


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
    for policy, is_ours, shards in (
        ("O0", False, None),
        ("O1,dtype=float16", False, None),
        ("O2,dtype=float16", False, None),
        ("O2,dtype=bfloat16", True, None),
        ("O2,dtype=float16,loss_scale=64", False, None),
        ("O1,dtype=float16", False, "file"),
        ("O2,dtype=float16", False, "file"),
        ("O2,dtype=bfloat16", True, "folder"),
    ):
        fabric, model, optimizer = setup(policy, is_ours, shards)
        mine = x[fabric.global_rank :: 2]
        given = [(part, part[:, :4].argmax(1)) for part in mine.split(4)] * 2
        losses = train(fabric, model, optimizer, given[:8], overflow_at=[3])
        path = Path(folder) / f"{policy} {shards}.ckpt"
        fabric.save(path, {"model": model, "optimizer": optimizer})
        losses += train(fabric, model, optimizer, given[8:])
        again, other, further = setup(policy, is_ours, shards)
        again.load(path, {"model": other, "optimizer": further})
        train(again, other, further, given[8:])
        stats = fabric.session.stats()
        found[f"{policy} {shards}"] = {
            "losses": losses,
            "steps": stats.steps,
            "skipped": stats.skipped,
            "metrics": [fabric.session.metrics(), again.session.metrics()],
            "weights": whole(model),
            "resumed": whole(other),
        }
    (Path(folder) / f"rank{fabric.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
