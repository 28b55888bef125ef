"""Two ranks under each framework, run by ``torch.distributed.run``: trained, saved, and gone on with from there.

One rank's third batch overflows. Each program tells its losses, steps and skips, its weights at the end, and those of a
second one that has loaded what the first has saved in the middle.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo.tensors import dtype_name

warnings.simplefilter("ignore")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))


def dataset():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :4].argmax(1))


def adamw(policy, params):
    """mezzo's optimizer under O2 in bfloat16, and torch's elsewhere."""
    return (mezzo.optim if policy == "O2,dtype=bfloat16" else torch.optim).AdamW(params, lr=0.01)


def overflow(output):
    output.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))


def whole(values):
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]


def vector(values):
    return nn.utils.parameters_to_vector(whole(values)).tolist()


POLICIES = ("O0", "O1,dtype=float16", "O2,dtype=float16", "O2,dtype=bfloat16")


def of_lightning(folder):
    """Lightning's Trainer, whole models and models in shards, which are gathered in the policy's dtype."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from mezzo.integrations.lightning import MezzoPrecision

    class Module(lightning.LightningModule):
        def __init__(self, shards):
            super().__init__()
            self.net, self.shards, self.losses, self.seen = net(), shards, [], set()

        def configure_model(self):
            if self.shards is None or isinstance(next(self.net.parameters()), torch.distributed.tensor.DTensor):
                return
            mesh, policy = self.device_mesh["data_parallel"], self.trainer.precision_plugin.policy
            if self.shards == "mezzo":
                mezzo.fully_shard(self.net, policy, mesh=mesh, wrap=nn.Linear)
            else:
                fully_shard(self.net, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=policy.param_dtype))
            self.net[0].register_forward_pre_hook(lambda layer, _: self.seen.add(dtype_name(layer.weight.dtype)))

        def training_step(self, batch, batch_idx):
            scores = self.net(batch[0])
            if batch_idx == 2 and self.global_rank == 1 and self.current_epoch == 0:
                overflow(scores)
            loss = nn.functional.cross_entropy(scores.float(), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return adamw(str(self.trainer.precision_plugin.policy), self.parameters())

    class Saving(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    def fitted(module, policy, saves_shards, resumes):
        sharding = {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": saves_shards}
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=ModelParallelStrategy(**sharding) if module.shards else "ddp",
            max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=2, gradient_clip_val=1.0,
            plugins=[MezzoPrecision(policy)], callbacks=[] if resumes else [Saving()],
        )  # fmt: skip
        trainer.fit(module, DataLoader(dataset(), batch_size=4), ckpt_path=path if resumes else None)
        return trainer

    sharded = ("O1,dtype=float16", "torch", False), ("O2,dtype=bfloat16", "mezzo", True)
    for policy, shards, saves_shards in (*((policy, None, False) for policy in POLICIES), *sharded):
        name = f"Lightning {policy}" + (f" in {shards}'s shards" if shards else "")
        path, module, again = Path(folder) / f"{name}.ckpt", Module(shards), Module(shards)
        trainer = fitted(module, policy, saves_shards, resumes=False)
        fitted(again, policy, saves_shards, resumes=True)
        assert module.seen == ({"float32"} if shards else set()), (name, module.seen)
        yield name, {
            "losses": module.losses, "steps": trainer.global_step, "weights": vector(module.parameters()),
            "skipped": int(trainer.callback_metrics["mezzo/skipped"]), "resumed": vector(again.parameters()),
        }  # fmt: skip


def of_fabric(folder):
    from lightning.fabric import Fabric

    from mezzo.integrations.lightning import MezzoPrecision

    def setup(policy):
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=MezzoPrecision(policy))
        fabric.launch()
        model = fabric.setup_module(net())
        return fabric, model, fabric.setup_optimizers(adamw(policy, model.parameters()))

    def train(fabric, model, optimizer, given, overflow_at=None):
        losses = []
        for number, (x, y) in enumerate(given, start=1):
            with fabric.no_backward_sync(model, enabled=number % 2 != 0):
                scores = model(x)
                if number == overflow_at and fabric.global_rank == 1:
                    overflow(scores)
                loss = nn.functional.cross_entropy(scores, y)
                fabric.backward(loss / 2)
            losses.append(loss.item())
            if number % 2 == 0:
                fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
        return losses

    for policy in (*POLICIES, "O2,dtype=float16,loss_scale=64"):
        fabric, model, optimizer = setup(policy)
        mine = [tensor[fabric.global_rank :: 2].split(4) for tensor in dataset().tensors]
        given, path = [*zip(*mine, strict=True)], Path(folder) / f"Fabric {policy}.ckpt"
        losses = train(fabric, model, optimizer, given, overflow_at=3)
        fabric.save(path, {"model": model, "optimizer": optimizer})
        losses += train(fabric, model, optimizer, given)
        again, other, further = setup(policy)
        again.load(path, {"model": other, "optimizer": further})
        train(again, other, further, given)
        assert again.strategy.precision.metrics() == fabric.strategy.precision.metrics()
        stats = fabric.strategy.precision.session.stats()
        yield f"Fabric {policy}", {
            "losses": losses, "steps": stats.steps, "skipped": stats.skipped,
            "weights": vector(model.state_dict().values()), "resumed": vector(other.state_dict().values()),
        }  # fmt: skip


def of_accelerate(folder):
    from accelerate import Accelerator

    from mezzo.integrations.accelerate import attach

    class Program:
        def __init__(self, policy):
            self.module, self.losses = net(), []
            optimizer = adamw(policy, self.module.parameters())
            self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            self.amp = attach(self.accelerator, self.module, optimizer, policy)
            loader = DataLoader(dataset(), batch_size=4)
            self.model, self.optimizer, self.loader = self.accelerator.prepare(self.module, optimizer, loader)

        def epoch(self, overflow_at=None):
            for number, (x, y) in enumerate(self.loader):
                with self.accelerator.accumulate(self.model):
                    scores = self.model(x)
                    if number == overflow_at and self.accelerator.process_index == 1:
                        overflow(scores)
                    loss = nn.functional.cross_entropy(scores, y)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())

        def end(self):
            stats = self.amp.stats()
            self.amp.close()
            self.accelerator.scaler = None
            return vector(self.module.parameters()), stats

    for policy in POLICIES:
        path, program = Path(folder) / f"Accelerate {policy}", Program(policy)
        program.epoch(overflow_at=3)
        program.accelerator.save_state(path)
        program.accelerator.wait_for_everyone()
        program.epoch()
        weights, stats = program.end()
        again = Program(policy)
        again.accelerator.load_state(path)
        again.epoch()
        yield f"Accelerate {policy}", {
            "losses": program.losses, "steps": stats.steps, "skipped": stats.skipped, "weights": weights,
            "resumed": again.end()[0],
        }  # fmt: skip


def of_transformers(folder):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from mezzo.integrations.transformers import plug

    def made(policy, overflow_at=None):
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 32, "n_positions": 16}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
        first = torch.randint(0, 32, (64, 1), generator=torch.Generator().manual_seed(0))
        data = [{"input_ids": row, "labels": row} for row in (first + torch.arange(12)) % 32]
        args = TrainingArguments(
            output_dir=str(Path(folder) / policy), use_cpu=True, report_to=[], disable_tqdm=True,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=0.01,
            logging_steps=1, save_strategy="steps", save_steps=3, ddp_backend="gloo",
        )  # fmt: skip
        optimizers = (None, None)
        if policy == "O2,dtype=float16":
            optimizers = (mezzo.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0), None)
        trainer = plug(Trainer(model, args, train_dataset=data, eval_dataset=data[:16], optimizers=optimizers), policy)
        count = iter(range(1000))

        def after(_, __, output):
            if model.training and next(count) == overflow_at and trainer.args.process_index == 1:
                overflow(output)

        model.lm_head.register_forward_hook(after)
        return trainer

    for policy in POLICIES:
        trainer, again = made(policy, overflow_at=2), made(policy)
        trainer.train()
        trainer.evaluate()
        again.train(resume_from_checkpoint=str(Path(folder) / policy / "checkpoint-3"))
        history = trainer.state.log_history
        yield f"transformers {policy}", {
            "losses": [entry["loss"] for entry in history if "loss" in entry], "steps": trainer.state.global_step,
            "skipped": [entry["mezzo/skipped"] for entry in history if "mezzo/skipped" in entry][-1],
            "weights": vector(trainer.model.parameters()), "resumed": vector(again.model.parameters()),
        }  # fmt: skip


def main(folder, *names):
    results = {}
    for name in names:
        results |= globals()[f"of_{name}"](folder)
    (Path(folder) / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
