"""Two ranks under Lightning's ``strategy="ddp"``: a program, for it starts its ranks by itself."""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo.integrations.lightning import MezzoPrecision
from mezzo.tensors import dtype_name


class Module(lightning.LightningModule):
    def __init__(self, is_ours):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
        self.is_ours, self.losses, self.seen = is_ours, [], Counter()

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        if batch_idx == 2 and self.global_rank == 1 and self.current_epoch == 0:
            scores.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))  # on one rank alone
        loss = nn.functional.cross_entropy(scores.float(), batch[1])
        self.seen[f"x {dtype_name(batch[0].dtype)}, loss {dtype_name(loss.dtype)}"] += 1
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return (mezzo.optim if self.is_ours else torch.optim).AdamW(self.parameters(), lr=0.01)


def main(folder):
    warnings.simplefilter("ignore")
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4)
    found = {}
    for policy in ("O0", "O1,dtype=float16", "O2,dtype=float16", "O2,dtype=bfloat16"):
        module = Module(is_ours=policy.startswith("O2"))
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2, gradient_clip_val=1.0,
            plugins=[MezzoPrecision(policy)],
        )  # fmt: skip
        trainer.fit(module, loader)
        found[policy] = {
            "losses": module.losses,
            "seen": module.seen,
            "steps": trainer.global_step,
            "skipped": float(trainer.callback_metrics["mezzo/skipped"]),
            "weights": nn.utils.parameters_to_vector(module.parameters()).tolist(),
        }
    (Path(folder) / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
