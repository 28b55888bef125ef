"""`plug` on a Trainer of transformers: losses like FP32 with low kernels, and all that a Trainer does besides.

What needs the library imports it where it runs: that takes seconds, and each process of the suite reads this file.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import mezzo
from mezzo.errors import NumericsError
from mezzo.session.session import engine_of
from mezzo.tensors import tensors

from ..support.products import Products
from .programs import assert_alike, flat, overflow

pytestmark = [
    pytest.mark.usefixtures("emulating", "anew"),
    pytest.mark.filterwarnings("ignore::Warning:transformers.*"),
]


@pytest.fixture
def made(hf, tmp_path):
    """A Trainer over a GPT-2 of one layer, that learns to count; its class is ``trainer_class``."""

    def make(optimizer="torch", trainer_class=None, dropout=0.0, overflow_at=(), **options):
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 32, "n_positions": 16}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        model = hf.of.GPT2LMHeadModel(hf.of.GPT2Config(**sizes, **drops, **tokens, loss_type="ForCausalLM"))
        plant(model, overflow_at)
        first = torch.randint(0, 32, (64, 1), generator=torch.Generator().manual_seed(0))
        data = [{"input_ids": row, "labels": row} for row in (first + torch.arange(12)) % 32]
        args = hf.of.TrainingArguments(
            **{
                "output_dir": str(tmp_path / "run"), "use_cpu": True, "report_to": [], "disable_tqdm": True,
                "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
                "learning_rate": 0.01, "logging_steps": 1, "save_strategy": "no", "logging_nan_inf_filter": False,
            } | options
        )  # fmt: skip
        rest = {}
        if optimizer == "mezzo":
            rest["optimizers"] = (mezzo.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0), None)
        return (trainer_class or hf.of.Trainer)(model, args, train_dataset=data, eval_dataset=data[:16], **rest)

    return make


def plant(model, numbers):
    """Let gradients of some batches overflow, counted from the first that the model is trained with."""
    count = iter(range(1000))

    def after(_, args, output):
        if model.training and next(count) in numbers:
            overflow(output)

    if numbers:
        model.lm_head.register_forward_hook(after)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_losses_are_fp32s_kernels_are_low_and_steps_the_trainers(hf, made):
    reference = made(num_train_epochs=1)
    reference.train()
    for policy, optimizer in (("O1,dtype=float16", "torch"), ("O2,dtype=bfloat16", "mezzo")):
        trainer, steps = hf.plug(made(optimizer, num_train_epochs=1), policy), []

        def counted(trainer=trainer, begin=trainer.create_optimizer, steps=steps):
            optimizer, engine = begin(), engine_of(trainer.session)
            step = engine.step
            engine.step = lambda *args, **kwargs: steps.append(step(*args, **kwargs)) or steps[-1]
            return optimizer

        trainer.create_optimizer = counted
        trainer.train()
        assert sum(logged(trainer, "loss")[-3:]) == pytest.approx(sum(logged(reference, "loss")[-3:]), rel=0.01)
        assert logged(trainer, "grad_norm") == pytest.approx(logged(reference, "grad_norm"), rel=0.02)
        assert logged(trainer, "learning_rate") == logged(reference, "learning_rate")
        assert len(steps) == trainer.state.global_step == 4
        assert not any(step.skipped for step in steps)
        assert trainer.session is None
        assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}
        # On a device that computes natively: steps, and evaluations in training and by themselves.
        trainer = hf.plug(made(max_steps=2, eval_strategy="steps", eval_steps=1), f"{policy},emulate=false")
        with Products() as products:
            trainer.evaluate()
            trainer.train()
            trainer.predict(trainer.eval_dataset)
        assert set(products.dtypes) == {policy.partition("=")[2]}
        assert products.dtypes.total() > 4 * 15


@pytest.mark.parametrize(
    "policy, optimizer",
    [("O1,dtype=float16", "torch"), pytest.param("O2,dtype=float16", "mezzo", marks=pytest.mark.slow)],
)
def test_resume_from_checkpoint_goes_on_bit_for_bit(hf, made, policy, optimizer):
    """In the middle of an epoch, with dropout, after a skipped step."""

    def whole(trainer):
        states = trainer.optimizer.state_dict()["state"]
        return [*trainer.model.state_dict().values(), *tensors(list(states.values()))]

    options = {"save_strategy": "steps", "save_steps": 3, "dropout": 0.1}
    straight, again = (hf.plug(made(optimizer, overflow_at=at, **options), policy) for at in ([2], []))
    straight.train()
    path = Path(straight.args.output_dir) / "checkpoint-3"
    again.train(resume_from_checkpoint=str(path))
    for name in ("loss", "grad_norm", "learning_rate", "mezzo/scale", "mezzo/skipped"):
        assert logged(again, name)[-5:] == logged(straight, name)[-5:], name
    assert all(map(torch.equal, whole(straight), whole(again)))
    assert torch.load(path / "scaler.pt", weights_only=True)


def test_a_skipped_step_writes_nothing_holds_the_scheduler_and_is_logged(hf, made):
    trainer = hf.plug(made(overflow_at=[2], num_train_epochs=1), "O1,dtype=float16")
    trainer.train()
    assert logged(trainer, "mezzo/skipped") == [0, 1, 1, 1, 1]
    assert logged(trainer, "mezzo/scale") == [65536.0] + [32768.0] * 4
    assert logged(trainer, "learning_rate") == pytest.approx([0.01, 0.0075, 0.0075, 0.005])
    assert trainer.state.global_step == 4
    assert json.dumps(trainer.state.log_history)


def test_an_overflow_is_explained_in_pythons_log_or_ends_the_run(hf, made, caplog):
    trainer = hf.plug(made(max_steps=1), "O1,dtype=float16", on_overflow="locate")
    with torch.no_grad():
        trainer.model.transformer.ln_f.weight.mul_(1e6)
    trainer.train()
    assert "lm_head" in caplog.text
    trainer = hf.plug(made(overflow_at=[2]), "O2,dtype=float16", on_overflow="raise")
    with pytest.raises(NumericsError):
        trainer.train()
    assert trainer.session is None
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}


def test_what_is_saved_is_fp32_and_loads_so(hf, made, tmp_path):
    trainer = hf.plug(made(max_steps=1), "O2,dtype=bfloat16")

    class Saving(hf.of.TrainerCallback):
        def on_step_end(self, *_, model, **__):
            trainer.save_model(str(tmp_path / "saved"))
            model.save_pretrained(tmp_path / "other")
            self.dtype, self.copied = model.lm_head.weight.hi.dtype, copy.deepcopy(model)

    saving = Saving()
    trainer.add_callback(saving)
    trainer.train()
    assert saving.dtype == torch.bfloat16
    trainer.save_model(str(tmp_path / "end"))
    for name in ("saved", "other", "end"):
        loaded = hf.of.GPT2LMHeadModel.from_pretrained(tmp_path / name)
        assert all(map(torch.equal, loaded.parameters(), trainer.model.parameters())), name
        assert loaded.dtype == torch.float32
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "float32"
    saving.copied.half().save_pretrained(tmp_path / "copied")
    assert json.loads((tmp_path / "copied" / "config.json").read_text())["dtype"] == "float16"


def test_a_second_run_goes_on_after_the_best_model_was_loaded(hf, made):
    every = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    trainer = hf.plug(made(**every, load_best_model_at_end=True, num_train_epochs=1), "O2,dtype=bfloat16")
    trainer.train()
    best = trainer.state.best_metric
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=0.01)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < best


def test_what_generates_runs_low_with_its_encoder(hf, tmp_path):
    """`generate` calls the encoder by itself, and not as part of its model."""
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    sizes = {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    model = hf.of.T5ForConditionalGeneration(hf.of.T5Config(**sizes, **tokens))
    args = hf.of.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, predict_with_generate=True,
        generation_max_length=4, num_train_epochs=1, save_strategy="no", eval_strategy="epoch",
    )  # fmt: skip
    data, seen = [{"input_ids": row, "labels": row} for row in torch.arange(2, 26).reshape(4, 6)], set()
    trainer = hf.plug(hf.of.Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data), "O1,dtype=bfloat16")
    query = model.encoder.block[0].layer[0].SelfAttention.q
    query.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    trainer.train()
    trainer.predict(data)
    assert seen == {torch.bfloat16}


def test_clipping_is_of_unscaled_gradients(hf, made):
    """By so little that every step is decided by it; and without clipping the norm is logged."""
    moved, norms = [], []
    for policy in (None, "O2,dtype=float16"):
        trainer = made(max_steps=2, max_grad_norm=1e-3, optim="sgd", learning_rate=1.0)
        unclipped = made(max_steps=1, max_grad_norm=0.0)
        start = flat(trainer.model.parameters())
        for either in (trainer, unclipped):
            (either if policy is None else hf.plug(either, policy)).train()
        moved.append(flat(trainer.model.parameters()) - start)
        norms.append(logged(unclipped, "grad_norm"))
        assert norms[-1] == pytest.approx(norms[0], rel=0.02)
    assert_alike(moved[1], moved[0], rel=0.03)


def test_a_class_of_ones_own(hf, made):
    """A Trainer that overrides what a plugged one does, too."""

    class Own(hf.of.Trainer):
        def create_optimizer(self):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            return self.optimizer

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(inputs["input_ids"]).logits
            assert logits.dtype == torch.float32
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
            return (loss, {"logits": logits}) if return_outputs else loss

    plain = made(trainer_class=Own, max_steps=2)
    plugged = hf.plug(made(trainer_class=Own, max_steps=2), "O2,dtype=bfloat16")
    for trainer in (plain, plugged):
        trainer.train()
    assert isinstance(plugged, Own)
    assert type(plugged).__name__ == "MezzoOwn"
    assert logged(plugged, "loss") == pytest.approx(logged(plain, "loss"), rel=0.02)


def test_a_schedule_changes_the_policy_and_resumes_in_the_part_of_its_checkpoint(hf, made):
    """Against runs of one policy, the second from the first one's checkpoint; the last step before it is skipped."""
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8}

    def trained(policy, at, checkpoint=None, **more):
        trainer = hf.plug(made(overflow_at=at, **options | more), policy)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer, [*trainer.model.state_dict().values()]

    scheduled, values = trained("O1,bf16@0; O2,fp16@3", [4, 8])
    path = Path(scheduled.args.output_dir)
    assert str(scheduled.policy) == "O2,dtype=float16"
    assert logged(scheduled, "mezzo/scale") == [1.0] * 2 + [65536.0] * 2 + [32768.0] * 5
    _, resumed = trained("O1,bf16@0; O2,fp16@3", [], str(path / "checkpoint-6"))
    assert all(map(torch.equal, values, resumed))
    trained("O1,bf16", [4], output_dir=str(path / "one"))
    _, second = trained("O2,fp16", [2], str(path / "one" / "checkpoint-3"))
    assert all(map(torch.equal, values, second))
    scheduled.evaluate()
    scheduled.train()  # anew, with its first part
    assert logged(scheduled, "mezzo/scale")[-9:-6] == [1.0] * 2 + [65536.0]
