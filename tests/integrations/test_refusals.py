"""What the bridges to frameworks refuse, with what to write instead."""

import importlib
import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mezzo
from mezzo.errors import PolicyError, StateError, UnsupportedError

pytestmark = [
    pytest.mark.usefixtures("emulating"),
    pytest.mark.filterwarnings("ignore::Warning:(transformers|lightning).*"),
]


@pytest.fixture(scope="module")
def of():
    """The frameworks, with mezzo's bridges to them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate, transformers = pytest.importorskip("accelerate"), pytest.importorskip("transformers")
        lightning, fabric = pytest.importorskip("lightning"), pytest.importorskip("lightning.fabric")
        names = ("accelerate", "transformers", "lightning")
        bridges = {f"to_{name}": importlib.import_module(f"mezzo.integrations.{name}") for name in names}
        yield SimpleNamespace(
            accelerate=accelerate, transformers=transformers, lightning=lightning, fabric=fabric, **bridges
        )


@pytest.fixture(autouse=True)
def anew(of):
    """With no trace of an accelerator of before: all of them share one state."""
    of.accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    of.accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def model_and_optimizer():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def trainer_of(of, **options):
    """A Trainer of transformers over a small model."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 8, "n_positions": 8}
    model = of.transformers.GPT2LMHeadModel(of.transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    args = of.transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    for name, value in options.items():
        setattr(args, name, value)
    return of.transformers.Trainer(model, args)


def attached(of, accelerator=None, given=None, policy="O1", **options):
    accelerator = of.accelerate.Accelerator(cpu=True) if accelerator is None else accelerator
    return of.to_accelerate.attach(accelerator, *(given or model_and_optimizer()), policy, **options)


def attached_twice(of):
    accelerator = of.accelerate.Accelerator(cpu=True)
    attached(of, accelerator)
    attached(of, accelerator)


def attached_beside_a_scaler(of):
    accelerator = of.accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    attached(of, accelerator)


def attached_late(of):
    accelerator, (model, optimizer) = of.accelerate.Accelerator(cpu=True), model_and_optimizer()
    attached(of, accelerator, (model, accelerator.prepare(optimizer)))


def attached_beside(kind):
    def attaching(of, monkeypatch):
        accelerator = of.accelerate.Accelerator(cpu=True)
        monkeypatch.setattr(accelerator.state, "distributed_type", of.accelerate.DistributedType(kind))
        attached(of, accelerator)

    return attaching


def plugged_beside_engines(of, monkeypatch):
    trainer = trainer_of(of)
    monkeypatch.setattr(trainer.accelerator.state, "distributed_type", of.accelerate.DistributedType("DEEPSPEED"))
    of.to_transformers.plug(trainer)


def plugged_on_several_gpus(of, monkeypatch):
    trainer = trainer_of(of)
    monkeypatch.setattr(type(trainer.args), "n_gpu", 4)
    of.to_transformers.plug(trainer)


def fabric_of(of, policy="O1", **options):
    return of.fabric.Fabric(accelerator="cpu", plugins=of.to_lightning.MezzoPrecision(policy), **options)


def lightning_beside_another(of):
    other = of.lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu")
    of.lightning.Trainer(accelerator="cpu", logger=False, plugins=[of.to_lightning.MezzoPrecision("O1"), other])


#: What is done, what is raised, with which words.
REFUSED = {
    "accelerate: no accelerator": (
        lambda of: attached(of, nn.Linear(1, 1)),
        PolicyError,
        r"the accelerator is Linear\(",
    ),
    "accelerate: a level": (lambda of: attached(of, policy="O4"), PolicyError, "unknown level 'O4'"),
    "accelerate: an option": (lambda of: attached(of, on_overflow="halt"), PolicyError, "'halt'"),
    "accelerate: mixed_precision": (
        lambda of: attached(of, of.accelerate.Accelerator(cpu=True, mixed_precision="bf16")),
        PolicyError,
        r'mixed_precision="bf16" besides(.|\n)*write  Accelerator\(\) without',
    ),
    "accelerate: two sessions": (
        attached_twice,
        PolicyError,
        r"has a session already(.|\n)*write  attach\(accelerator, \[model, other\]",
    ),
    "accelerate: another scaler": (attached_beside_a_scaler, PolicyError, "has a GradScaler besides"),
    "accelerate: after prepare": (
        attached_late,
        PolicyError,
        r"prepared before it was attached(.|\n)*write  attach\(accelerator, model",
    ),
    "accelerate: in each other's place": (
        lambda of: attached(of, given=model_and_optimizer()[::-1]),
        PolicyError,
        "model",
    ),
    "accelerate: a prepared model": (
        lambda of: attached(of, given=(mezzo.prepare((given := model_and_optimizer())[0], "O1"), given[1])),
        PolicyError,
        "a prepared model cannot be attached",
    ),
    "accelerate: DeepSpeed": (attached_beside("DEEPSPEED"), UnsupportedError, r"with DEEPSPEED(.|\n)*torchrun"),
    "accelerate: FSDP": (attached_beside("FSDP"), UnsupportedError, r"with FSDP(.|\n)*mezzo.fully_shard"),
    "accelerate: Megatron-LM": (attached_beside("MEGATRON_LM"), UnsupportedError, r"with MEGATRON_LM(.|\n)*torchrun"),
    "transformers: no Trainer": (
        lambda of: of.to_transformers.plug(nn.Linear(1, 1)),
        PolicyError,
        r"the trainer is Linear\((.|\n)*write  plug\(Trainer",
    ),
    "transformers: twice": (
        lambda of: of.to_transformers.plug(of.to_transformers.plug(trainer_of(of))),
        PolicyError,
        "has a policy already",
    ),
    "transformers: a level": (lambda of: of.to_transformers.plug(trainer_of(of), "O4"), PolicyError, "unknown level"),
    "transformers: an option": (
        lambda of: of.to_transformers.plug(trainer_of(of), on_overflow="halt"),
        PolicyError,
        "'halt'",
    ),
    **{
        f"transformers: {name}": (
            lambda of, name=name: of.to_transformers.plug(trainer_of(of, **{name: True})),
            PolicyError,
            rf"has {name}=True besides(.|\n)*write  TrainingArguments.* without {name}",
        )
        for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")
    },
    "transformers: DeepSpeed": (plugged_beside_engines, UnsupportedError, r"with DEEPSPEED(.|\n)*torchrun"),
    "transformers: DataParallel": (
        plugged_on_several_gpus,
        UnsupportedError,
        r"on 4 GPUs in one process(.|\n)*torchrun",
    ),
    "lightning: a level": (lambda of: of.to_lightning.MezzoPrecision("O4"), PolicyError, "unknown level 'O4'"),
    "lightning: an option": (lambda of: of.to_lightning.MezzoPrecision(on_overflow="halt"), PolicyError, "'halt'"),
    "lightning: precision": (
        lambda of: of.lightning.Trainer(
            accelerator="cpu", precision="bf16-mixed", plugins=[of.to_lightning.MezzoPrecision("O1")]
        ),
        ValueError,
        "Received both `precision",
    ),
    "lightning: another precision": (lightning_beside_another, Exception, "multiple values for Precision"),
    "lightning: FSDP": (
        lambda of: of.lightning.pytorch.strategies.FSDPStrategy(precision_plugin=of.to_lightning.MezzoPrecision("O1")),
        TypeError,
        "can only work with the `FSDPPrecision` plugin",
    ),
    "fabric: precision": (lambda of: fabric_of(of, precision="16-mixed"), ValueError, "Received both `precision"),
    "fabric: DataParallel": (
        lambda of: fabric_of(of, strategy=of.fabric.strategies.DataParallelStrategy()).setup(*model_and_optimizer()),
        UnsupportedError,
        r'strategy="dp"[\s\S]*strategy="ddp"',
    ),
    "fabric: without an optimizer": (
        lambda of: (fabric := fabric_of(of)).backward(fabric.setup_module(nn.Linear(1, 1))(torch.ones(1)).sum()),
        StateError,
        r"there is no session[\s\S]*write  model, optimizer = fabric\.setup",
    ),
    "fabric: an optimizer of another model": (
        lambda of: fabric_of(of).setup(nn.Linear(2, 1), model_and_optimizer()[1]),
        PolicyError,
        "not the models'",
    ),
    "fabric: metrics of no session": (
        lambda of: of.to_lightning.MezzoPrecision().metrics(),
        StateError,
        "there is no session",
    ),
}


@pytest.mark.parametrize("done, error, words", REFUSED.values(), ids=REFUSED)
def test_refused(of, monkeypatch, done, error, words):
    patches = "monkeypatch" in done.__code__.co_varnames[: done.__code__.co_argcount]
    with pytest.raises(error, match=words):
        done(of, monkeypatch) if patches else done(of)


@pytest.mark.parametrize("bridge", ["accelerate", "transformers"])
def test_a_sharded_model_is_refused(of, alone, bridge):
    trainer = trainer_of(of)
    mezzo.fully_shard(trainer.model, "O1")
    given = trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    done = {
        "accelerate": lambda: attached(of, trainer.accelerator, given),
        "transformers": lambda: of.to_transformers.plug(trainer),
    }
    with pytest.raises(UnsupportedError, match=r"the model is sharded\n(.|\n)*write  a loop of your own"):
        done[bridge]()


def test_what_is_refused_was_not_changed(of):
    accelerator = of.accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = model_and_optimizer()
    with pytest.raises(PolicyError):
        attached(of, accelerator, (model, optimizer), "O2,dtype=bfloat16")
    assert (vars(optimizer).get("step"), vars(model).get("forward"), accelerator.scaler) == (None, None, None)
    trainer = trainer_of(of, bf16=True)
    with pytest.raises(PolicyError):
        of.to_transformers.plug(trainer, "O1")
    assert type(trainer) is of.transformers.Trainer


@pytest.mark.parametrize(
    "name, install",
    [("lightning", "lightning>=2"), ("accelerate", "accelerate>=1"), ("transformers", "transformers>=4")],
)
def test_an_absent_framework_is_named(of, monkeypatch, name, install):
    for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"mezzo.integrations.{name}")
    with pytest.raises(UnsupportedError, match=rf'pip install .*"{install}'):
        importlib.import_module(f"mezzo.integrations.{name}")
