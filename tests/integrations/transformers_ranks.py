"""Two ranks of a Trainer of transformers, run by ``torch.distributed.run``."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import mezzo
from mezzo.integrations.transformers import plug


def made(folder, policy, overflow_at=None):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 32, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    first = torch.randint(0, 32, (64, 1), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in (first + torch.arange(12)) % 32]
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=0.01, logging_steps=1, save_strategy="steps",
        save_steps=3, ddp_backend="gloo",
    )  # fmt: skip
    optimizers = (None, None)
    if policy == "O2,dtype=float16":
        optimizers = (mezzo.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0), None)
    trainer = plug(Trainer(model, args, train_dataset=data, eval_dataset=data[:16], optimizers=optimizers), policy)
    count = iter(range(1000))

    def after(_, __, output):
        if model.training and next(count) == overflow_at and trainer.args.process_index == 1:
            output.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))

    model.lm_head.register_forward_hook(after)
    return trainer


def weights(trainer):
    return nn.utils.parameters_to_vector(trainer.model.parameters()).tolist()


def main(folder):
    found = {}
    for policy in ("O0", "O1,dtype=float16", "O2,dtype=float16", "O2,dtype=bfloat16"):
        trainer = made(Path(folder) / policy, policy, overflow_at=2)
        trainer.train()
        trainer.evaluate()
        again = made(Path(folder) / policy, policy)
        again.train(resume_from_checkpoint=str(Path(folder) / policy / "checkpoint-3"))
        history = trainer.state.log_history
        found[policy] = {
            "losses": [each["loss"] for each in history if "loss" in each],
            "steps": trainer.state.global_step,
            "skipped": [each["mezzo/skipped"] for each in history if "mezzo/skipped" in each][-1],
            "weights": weights(trainer),
            "again": weights(again),
        }
    (Path(folder) / f"rank{trainer.args.process_index}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
