"""Two ranks of a program for Accelerate, run by ``torch.distributed.run``."""

import json
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo.integrations.accelerate import attach


class Program:
    def __init__(self, policy):
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
        self.module[2].register_forward_hook(lambda module, inputs, output: self.seen.add(str(inputs[0].dtype)))
        self.seen = set()
        kind = (mezzo.optim if policy == "O2,dtype=float16" else torch.optim).AdamW
        optimizer = kind(self.module.parameters(), lr=0.01)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.amp = attach(self.accelerator, self.module, optimizer, policy)
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.module, optimizer, loader)
        self.losses = []

    def epoch(self, overflow_at=None):
        accelerator = self.accelerator
        for number, (x, y) in enumerate(self.loader):
            with accelerator.accumulate(self.model):
                scores = self.model(x)
                if number == overflow_at and accelerator.process_index == 1:
                    scores.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
                loss = nn.functional.cross_entropy(scores, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def weights(self):
        stats = self.amp.stats()
        self.amp.close()
        self.accelerator.scaler = None
        return nn.utils.parameters_to_vector(self.module.parameters()).tolist(), stats


def main(folder):
    warnings.simplefilter("ignore")
    found = {}
    for policy in ("O0", "O1,dtype=float16", "O2,dtype=float16", "O2,dtype=bfloat16"):
        program = Program(policy)
        program.epoch(overflow_at=3)
        program.accelerator.save_state(Path(folder) / policy)
        program.accelerator.wait_for_everyone()
        program.epoch()
        weights, stats = program.weights()
        again = Program(policy)
        again.accelerator.load_state(Path(folder) / policy)
        again.epoch()
        found[policy] = {
            "seen": sorted(program.seen),
            "losses": program.losses,
            "steps": stats.steps,
            "skipped": stats.skipped,
            "weights": weights,
            "again": again.weights()[0],
        }
    (Path(folder) / f"rank{program.accelerator.process_index}.json").write_text(json.dumps(found))
    program.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
