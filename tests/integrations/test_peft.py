"""Adapters of PEFT: they train beside a frozen base by every way into a loop, and plain PEFT loads what is saved."""

import copy
import warnings

import pytest
import torch

import mezzo
from mezzo.errors import StateError

from ..support.products import Products

pytestmark = [pytest.mark.usefixtures("emulating"), pytest.mark.filterwarnings("ignore::Warning:(transformers|peft).*")]

ROWS = (torch.randint(0, 32, (64, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(12)) % 32


@pytest.fixture(scope="module")
def peft():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft", reason="needs peft")


def bare(hf):
    """A GPT-2 of one layer."""
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 32, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = hf.of.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    return hf.of.GPT2LMHeadModel(config)


def adapted(hf, peft, base=None, **options):
    """It, or another base, with adapters, which alone train."""
    options = {"target_modules": ["c_attn", "c_proj"], "r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"} | options
    base = bare(hf) if base is None else base
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(**options))


def trained(model):
    return [param for param in model.parameters() if param.requires_grad]


def adapters(model):
    return {name: value for name, value in model.state_dict().items() if "lora_" in name}


def loss_of(model, number=0):
    rows = ROWS[number * 8 % 64 :][:8]
    return model(input_ids=rows, labels=rows).loss


def loop(model, optimizer, num_steps=10):
    for number in range(num_steps):
        loss = loss_of(model, number)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def in_a_loop(hf, model, optimizer, policy, where):
    amp = mezzo.attach(model, optimizer, policy) if policy else None
    last = loop(model, optimizer)
    masters = list(amp.master_params()) if amp else []
    model.save_pretrained(where)
    if amp:
        amp.detach()
    return last, masters


def in_a_trainer(hf, model, optimizer, policy, where):
    args = hf.of.TrainingArguments(
        output_dir=str(where / "run"), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=6,
        per_device_train_batch_size=8, gradient_accumulation_steps=2, save_strategy="no",
    )  # fmt: skip
    data, masters = [{"input_ids": row, "labels": row} for row in ROWS], []

    class Look(hf.of.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            masters[:] = trainer.session.master_params() if policy else []

    trainer = hf.of.Trainer(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=[Look()])
    if policy:
        hf.plug(trainer, policy)
    trainer.train()
    trainer.save_model(str(where))
    return next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry), masters


@pytest.mark.parametrize("way, policy, optimizer_class", [
    (in_a_loop, "O2,dtype=float16", torch.optim.AdamW),
    (in_a_trainer, "O2,dtype=bfloat16", mezzo.optim.AdamW),
])  # fmt: skip
def test_adapters_train_as_in_fp32_and_load_in_plain_peft(hf, peft, anew, way, policy, optimizer_class, tmp_path):
    results = {}
    for name in ("", policy):
        hf.forget()
        model = adapted(hf, peft)
        begun = copy.deepcopy(model.state_dict())
        made = (optimizer_class if name else torch.optim.AdamW)(trained(model), lr=0.02, weight_decay=0.0)
        results[name], masters = way(hf, model, made, name, tmp_path / (name or "fp32"))
    assert results[policy] == pytest.approx(results[""], rel=0.01)
    assert len(masters) == len(adapters(model)) == 6

    for key, value in model.state_dict().items():
        assert value.dtype == torch.float32
        close = 2.0**-40 if policy == "O2,dtype=float16" else 0.0  # of values below 2^-16
        assert "lora_" in key or torch.allclose(value, begun[key], rtol=0, atol=close), key
    loaded = peft.PeftModel.from_pretrained(bare(hf), tmp_path / policy)
    assert all(param.dtype == torch.float32 for param in loaded.parameters())
    for key, value in adapters(loaded).items():
        assert torch.equal(value, adapters(model)[key]), key
    with torch.no_grad():
        assert torch.equal(loss_of(model), loss_of(loaded))
        assert torch.equal(loss_of(model.merge_and_unload()), loss_of(loaded.merge_and_unload()))


@pytest.mark.parametrize("policy", ["O2,dtype=bfloat16"])
def test_what_peft_does_between_steps(hf, peft, policy):
    """Adapters are switched off, merged and taken out again; recomputed activations; a module that trains in whole."""
    model = bare(hf)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model = adapted(hf, peft, model, modules_to_save=["ln_f"]).train()
    plain, optimizer = loss_of(model).item(), torch.optim.AdamW(trained(model), lr=0.02)
    amp = mezzo.attach(model, optimizer, policy)
    loop(model, optimizer, 10)
    begun = {name: value.clone() for name, value in adapters(model).items()}
    with torch.no_grad():
        after = loss_of(model).item()
        assert after < plain
        with model.disable_adapter():
            assert loss_of(model).item() == pytest.approx(plain, rel=0.01)
        model.merge_adapter()
        assert loss_of(model).item() == pytest.approx(after, rel=0.01)
        model.unmerge_adapter()
    assert all(torch.equal(value, begun[name]) for name, value in adapters(model).items())
    assert loop(model, optimizer, 10) < after
    assert amp.stats().steps == 20
    amp.detach()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    amp = mezzo.attach(model, optimizer, f"{policy},emulate=false")  # on a device that computes natively
    with Products() as products:
        loop(model, optimizer, 1)
    amp.detach()
    assert set(products.dtypes) == {policy.partition("=")[2]}
    assert products.dtypes.total() > 6 * 3  # six of adapters, forward and twice backward


def test_a_base_that_was_loaded_low_keeps_its_values(hf, peft):
    model = adapted(hf, peft, bare(hf).bfloat16())
    base = [param.detach().clone() for param in model.parameters() if not param.requires_grad]
    optimizer, begun = torch.optim.AdamW(trained(model), lr=0.02), loss_of(model).item()
    amp = mezzo.attach(model, optimizer, "O2,dtype=bfloat16")
    assert loop(model, optimizer, 20) < 0.95 * begun
    amp.detach()
    assert {param.dtype for param in trained(model)} == {torch.float32}
    after = [param.detach() for param in model.parameters() if not param.requires_grad]
    assert all(torch.equal(old.float(), new.float()) for old, new in zip(base, after, strict=True))


def test_adapters_that_come_after_attach_or_after_the_models_conversion(hf, peft):
    """They train in FP32, with their optimizer in the session; one that is not is told of."""
    losses = []
    for policy in ("", "O2,dtype=bfloat16"):
        model = bare(hf)
        amp = mezzo.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02), policy) if policy else None
        model = adapted(hf, peft, model)
        optimizer = torch.optim.AdamW(trained(model), lr=0.02)
        if amp:
            with pytest.raises(StateError, match=r"does not know updates param(.|\n)*write  amp\.add\(optimizer\)"):
                loop(model, optimizer)
            optimizer.zero_grad()
            amp.add(optimizer)
        losses.append(loop(model, optimizer))
        if amp:
            amp.detach()
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    model = bare(hf)
    mezzo.prepare(model, "O2,dtype=bfloat16")
    model = adapted(hf, peft, model)
    optimizer = torch.optim.AdamW(trained(model), lr=0.02)
    mezzo.attach(model, optimizer, "O2,dtype=bfloat16")
    assert loop(model, optimizer) == pytest.approx(losses[0], rel=0.01)
