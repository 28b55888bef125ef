"""Two ranks under Lightning's ``ModelParallelStrategy``, which shard a model: a program, for it starts its ranks."""

import json
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo.integrations.lightning import MezzoPrecision
from mezzo.tensors import dtype_name


class Module(lightning.LightningModule):
    def __init__(self, optimizer, shards, overflows=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
        self.kind, self.shards, self.overflows = optimizer, shards, overflows
        self.losses, self.gathered, self.logged = [], set(), []

    def configure_model(self):
        if isinstance(next(self.net.parameters()), torch.distributed.tensor.DTensor):
            return
        mesh, policy = self.device_mesh["data_parallel"], self.trainer.precision_plugin.policy
        if self.shards == "mezzo":
            mezzo.fully_shard(self.net, policy, mesh=mesh, wrap=nn.Linear)
        else:
            fully_shard(self.net, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=policy.param_dtype))
        self.net[0].register_forward_pre_hook(lambda layer, _: self.gathered.add(dtype_name(layer.weight.dtype)))

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        if self.overflows and batch_idx == 2 and self.global_rank == 1 and self.current_epoch == 0:
            scores.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))  # on one rank alone
        loss = nn.functional.cross_entropy(scores.float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *_):
        self.logged.append({k: float(v) for k, v in self.trainer.callback_metrics.items() if k.startswith("mezzo")})

    def configure_optimizers(self):
        return (mezzo.optim if self.kind == "mezzo" else torch.optim).AdamW(self.parameters(), lr=0.01)


class Saving(lightning.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def fitted(policy, module, *, saves_shards, path, resumes):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4)
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=saves_shards
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2, gradient_clip_val=1.0,
        plugins=[MezzoPrecision(policy)], callbacks=[] if resumes else [Saving(path)],
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=path if resumes else None)
    return trainer


def main(folder):
    warnings.simplefilter("ignore")
    found = {}
    for policy, optimizer, shards, saves_shards in (
        ("O0", "torch", "torch", False),
        ("O1,dtype=float16", "torch", "mezzo", True),
        ("O2,dtype=float16", "torch", "mezzo", False),
        ("O2,dtype=float16", "torch", "torch", True),
        ("O2,dtype=bfloat16", "mezzo", "mezzo", True),
    ):
        name = f"{policy} {optimizer} {shards} {saves_shards}"
        path = Path(folder) / f"{name}.ckpt"
        module, again = Module(optimizer, shards), Module(optimizer, shards)
        trainer = fitted(policy, module, saves_shards=saves_shards, path=path, resumes=False)
        fitted(policy, again, saves_shards=saves_shards, path=path, resumes=True)
        weights = [[p.full_tensor().flatten() for p in each.parameters()] for each in (module, again)]
        found[name] = {
            "losses": module.losses,
            "steps": trainer.global_step,
            "logged": module.logged,
            "gathered": sorted(module.gathered),
            "weights": torch.cat(weights[0]).tolist(),
            "resumed": torch.cat(weights[1]).tolist(),
            "resumed_losses": again.losses,
            "resumed_logged": again.logged,
        }
    (Path(folder) / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
