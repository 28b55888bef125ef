"""`plug` on a Trainer of transformers: losses like FP32 with low kernels, and all that a Trainer does besides.

What needs the library imports it where it runs: that takes seconds, and each process of the suite reads this file.
"""

import copy
import json
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mezzo
from mezzo.errors import NumericsError
from mezzo.tensors import dtype_name, tensors

from ..support.products import Products

pytestmark = [
    pytest.mark.usefixtures("emulating", "anew"),
    pytest.mark.skipif(not (find_spec("transformers") and find_spec("accelerate")), reason="needs transformers"),
    pytest.mark.filterwarnings("ignore::Warning:transformers.*"),
]

POLICIES = [f"{level},dtype={dtype}" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]


def few(*quick, optimizers=("torch", "mezzo")):
    """All policies with all optimizers; all but those that are named take their seconds in `make test-all` alone."""
    every = [(policy, optimizer) for policy in POLICIES for optimizer in optimizers]
    return [pytest.param(*each, marks=[] if each in quick else pytest.mark.slow) for each in every]


@pytest.fixture(scope="module")
def hf():
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import accelerate
        import transformers

        from mezzo.integrations import transformers as ours

        return SimpleNamespace(plug=ours.plug, ours=ours, of=transformers, state=accelerate.state.AcceleratorState)


@pytest.fixture
def anew(hf):
    """With no trace of an accelerator of before: all of them share one state."""
    hf.state._reset_state(reset_partial_state=True)
    yield
    hf.state._reset_state(reset_partial_state=True)


@pytest.fixture
def made(hf, tmp_path):
    """A Trainer over a GPT-2 of one layer, that learns to count; its class is ``kind``."""

    def make(optimizer="torch", kind=None, dropout=0.0, overflow_at=(), rest=None, **options):
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 32, "n_positions": 16}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        model = hf.of.GPT2LMHeadModel(hf.of.GPT2Config(**sizes, **drops, **tokens, loss_type="ForCausalLM"))
        if overflow_at:
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
        rest = dict(rest or {})
        if optimizer == "mezzo":
            rest["optimizers"] = (mezzo.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0), None)
        kind = kind or hf.of.Trainer
        return kind(model, args, train_dataset=data, eval_dataset=data[:16], **rest)

    return make


def plant(model, batches):
    """Let gradients of some batches overflow, counted from the first that the model is trained with."""
    count = iter(range(1000))

    def after(_, args, output):
        if model.training and next(count) in batches:
            output.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))

    model.lm_head.register_forward_hook(after)


def logged(trainer, name):
    return [each[name] for each in trainer.state.log_history if name in each]


def whole(trainer):
    state = trainer.optimizer.state_dict()["state"]
    return [*trainer.model.state_dict().values(), *tensors(list(state.values()))]


@pytest.fixture(scope="module")
def fp32():
    return {}


@pytest.mark.parametrize("policy, optimizer", few(("O2,dtype=bfloat16", "mezzo")))
def test_losses_are_fp32s_and_steps_the_trainers(hf, made, fp32, policy, optimizer):
    if not fp32:
        reference = made()
        reference.train()
        fp32 |= {name: logged(reference, name) for name in ("loss", "grad_norm", "learning_rate")}
    trainer = hf.plug(made(optimizer), policy)
    steps = []
    begin = trainer.create_optimizer

    def counted():
        optimizer = begin()
        step = trainer.session.step
        trainer.session.step = lambda *args, **kwargs: steps.append(step(*args, **kwargs)) or steps[-1]
        return optimizer

    trainer.create_optimizer = counted
    trainer.train()
    assert sum(logged(trainer, "loss")[-3:]) == pytest.approx(sum(fp32["loss"][-3:]), rel=0.01)
    assert logged(trainer, "grad_norm") == pytest.approx(fp32["grad_norm"], rel=0.02)
    assert logged(trainer, "learning_rate") == fp32["learning_rate"]
    assert len(steps) == trainer.state.global_step == 8
    assert not any(step.skipped for step in steps)
    assert trainer.session is None
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("policy, optimizer", few((POLICIES[0], "torch"), (POLICIES[3], "torch"), optimizers=["torch"]))
def test_kernels_run_low(hf, made, policy, optimizer):
    """On a device that computes natively; all products of steps, and of evaluations in training and by themselves."""
    trainer = hf.plug(made(optimizer, max_steps=2, eval_strategy="steps", eval_steps=1), f"{policy},emulate=false")
    with Products() as products:
        trainer.evaluate()
        trainer.train()
        trainer.predict(trainer.eval_dataset)
    low = policy.partition("=")[2]
    assert products.dtypes == {low: products.dtypes[low]}
    assert products.dtypes[low] > 4 * 15


@pytest.mark.parametrize("policy, optimizer", few(("O1,dtype=float16", "torch")))
def test_resume_from_checkpoint_goes_on_bit_for_bit(hf, made, policy, optimizer):
    """In the middle of an epoch, with dropout, after a skipped step."""
    options = {"save_strategy": "steps", "save_steps": 3, "dropout": 0.1}
    straight = hf.plug(made(optimizer, overflow_at=[2], **options), policy)
    straight.train()
    path = Path(straight.args.output_dir) / "checkpoint-3"
    again = hf.plug(made(optimizer, **options), policy)
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


def test_an_overflow_is_explained_in_pythons_log(hf, made, caplog):
    trainer = hf.plug(made(max_steps=2), "O1,dtype=float16", on_overflow="explain")
    with torch.no_grad():
        trainer.model.transformer.ln_f.weight.mul_(1e6)
    trainer.train()
    assert "lm_head" in caplog.text
    assert logged(trainer, "mezzo/skipped") == [1, 2, 2]
    assert json.dumps(trainer.state.log_history)


@pytest.mark.slow
def test_an_overflow_can_end_the_run(hf, made):
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
            self.dtype, self.copied = model.lm_head.weight.dtype, copy.deepcopy(model)

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


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=bfloat16"])
def test_the_best_model_is_loaded_and_a_second_run_goes_on(hf, made, policy):
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    trainer = hf.plug(made(**options), policy)
    trainer.train()
    best = trainer.state.best_metric
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=0.01)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < best


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["O1,dtype=float16", "O2,dtype=bfloat16"])
def test_what_generates_runs_low_with_its_encoder(hf, tmp_path, policy):
    """`generate` calls the encoder by itself, and not as part of its model."""
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    sizes = {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    model = hf.of.T5ForConditionalGeneration(hf.of.T5Config(**sizes, **tokens))
    args = hf.of.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, predict_with_generate=True,
        generation_max_length=4, num_train_epochs=1, save_strategy="no", eval_strategy="epoch",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in torch.arange(2, 26).reshape(4, 6)]
    trainer = hf.of.Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data)
    hf.plug(trainer, policy)
    seen = set()
    query = model.encoder.block[0].layer[0].SelfAttention.q
    query.register_forward_hook(lambda module, args, output: seen.add(dtype_name(output.dtype)))
    trainer.train()
    trainer.predict(data)
    assert seen == {policy.partition("=")[2]}


@pytest.mark.slow
def test_without_clipping_the_norm_is_logged(hf, made):
    trainer = hf.plug(made(max_steps=2, max_grad_norm=0.0), "O2,dtype=float16")
    reference = made(max_steps=2, max_grad_norm=0.0)
    for each in (trainer, reference):
        each.train()
    assert logged(trainer, "grad_norm") == pytest.approx(logged(reference, "grad_norm"), rel=0.02)


@pytest.mark.slow
def test_clipping_is_of_unscaled_gradients(hf, made):
    """By so little that every step is decided by it."""
    moved = []
    for policy in (None, "O1,dtype=float16", "O2,dtype=float16"):
        trainer = made(max_steps=2, max_grad_norm=1e-3, optim="sgd", learning_rate=1.0)
        start = nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()
        if policy is not None:
            hf.plug(trainer, policy)
        trainer.train()
        moved.append(nn.utils.parameters_to_vector(trainer.model.parameters()).detach() - start)
    for each in moved[1:]:
        assert (each - moved[0]).norm() < 0.03 * moved[0].norm()


def test_a_class_of_ones_own(hf, made):
    """The mixin before a Trainer that overrides what the mixin does."""

    class Own(hf.of.Trainer):
        def create_optimizer(self):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            return self.optimizer

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(inputs["input_ids"]).logits
            assert logits.dtype == torch.float32
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
            return (loss, {"logits": logits}) if return_outputs else loss

    class Both(hf.ours.MezzoMixin, Own):
        pass

    first = made(kind=Both, max_steps=2, rest={"policy": "O2,dtype=bfloat16"})
    second = hf.plug(made(kind=Own, max_steps=2), "O2,dtype=bfloat16")
    for trainer in (first, second):
        trainer.train()
    assert isinstance(second, Own)
    assert type(second).__name__ == "MezzoOwn"
    assert logged(first, "loss") == logged(second, "loss")


@pytest.mark.slow  # two processes that import transformers, and train
def test_two_ranks_step_together(hf, tmp_path):
    """An overflow on one is both's; weights are equal bit for bit, and a checkpoint goes on so."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    program = Path(__file__).with_name("transformers_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, program, tmp_path], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    for policy, found in first.items():
        assert found["weights"] == second[policy]["weights"], policy
        assert found["again"] == found["weights"], policy
        assert (found["steps"], found["skipped"]) == (8, 1), policy
        assert sum(found["losses"][-3:]) == pytest.approx(sum(first["O0"]["losses"][-3:]), rel=0.01), policy
