"""What the bridges to frameworks refuse, with what to write instead: one table. Nothing was changed."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mezzo
from mezzo.errors import PolicyError, StateError, UnsupportedError

from ..support.refusals import refused

NAMES = ("accelerate", "transformers", "lightning")
pytestmark = [
    pytest.mark.usefixtures("emulating", "anew"),
    pytest.mark.filterwarnings("ignore::Warning:(transformers|lightning).*"),
]


@pytest.fixture(scope="module")
def of(hf, tmp_path_factory):
    """The frameworks, with mezzo's bridges to them."""
    lightning, fabric = pytest.importorskip("lightning"), pytest.importorskip("lightning.fabric")
    bridges = {f"to_{name}": importlib.import_module(f"mezzo.integrations.{name}") for name in NAMES}
    return SimpleNamespace(
        accelerate=hf.accelerate,
        transformers=hf.of,
        lightning=lightning,
        fabric=fabric,
        forget=hf.forget,
        **bridges,
        folder=str(tmp_path_factory.mktemp("trainer")),
    )


def model_and_optimizer():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def trainer_of(of, **options):
    """A Trainer of transformers over a small model."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 8, "n_positions": 8}
    model = of.transformers.GPT2LMHeadModel(of.transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    args = of.transformers.TrainingArguments(output_dir=of.folder, use_cpu=True, report_to=[])
    for name, value in options.items():
        setattr(args, name, value)
    return of.transformers.Trainer(model, args)


class Given:
    """A framework's objects, and what is done with them that is refused."""

    def __init__(self, of, monkeypatch):
        self.of, self.monkeypatch = of, monkeypatch
        self.accelerator, (self.model, self.optimizer) = of.accelerate.Accelerator(cpu=True), model_and_optimizer()

    def attach(self, accelerator=None, model=None, optimizer=None, policy="O1", **options):
        given = accelerator or self.accelerator, model or self.model, optimizer or self.optimizer
        return self.of.to_accelerate.attach(*given, policy, **options)

    def attach_to(self, **options):
        self.of.forget()
        self.attach(self.of.accelerate.Accelerator(cpu=True, **options))

    def attach_beside(self, engine):
        self.monkeypatch.setattr(self.accelerator.state, "distributed_type", self.of.accelerate.DistributedType(engine))
        self.attach()

    def attach_beside_a_scaler(self):
        self.accelerator.scaler = torch.amp.GradScaler("cpu")
        self.attach()

    def plug(self, trainer=None, policy="O1", **options):
        return self.of.to_transformers.plug(trainer or trainer_of(self.of), policy, **options)

    def plug_beside_engines(self):
        trainer, engine = trainer_of(self.of), self.of.accelerate.DistributedType("DEEPSPEED")
        self.monkeypatch.setattr(trainer.accelerator.state, "distributed_type", engine)
        self.plug(trainer)

    def plug_on_several_gpus(self):
        trainer = trainer_of(self.of)
        self.monkeypatch.setattr(type(trainer.args), "n_gpu", 4)
        self.plug(trainer)

    def plugin(self, policy="O1", **options):
        return self.of.to_lightning.MezzoPrecision(policy, **options)

    def trainer(self, *plugins, **options):
        return self.of.lightning.Trainer(accelerator="cpu", logger=False, plugins=[self.plugin(), *plugins], **options)

    def fabric(self, **options):
        return self.of.fabric.Fabric(accelerator="cpu", plugins=self.plugin(), **options)

    def backward_without_an_optimizer(self):
        fabric = self.fabric()
        fabric.backward(fabric.setup_module(nn.Linear(1, 1))(torch.ones(1)).sum())


#: What is done, what is raised, with which words.
REFUSED = [
    (lambda g: g.attach(nn.Linear(1, 1)), PolicyError, ["the accelerator is Linear("]),
    (lambda g: g.attach(policy="O4"), PolicyError, ["unknown level 'O4'"]),
    (lambda g: g.attach(on_overflow="halt"), PolicyError, ["'halt'"]),
    (lambda g: g.attach_to(mixed_precision="bf16"), PolicyError,
     ['mixed_precision="bf16" besides', "write  Accelerator() without"]),
    (Given.attach_beside_a_scaler, PolicyError, ["has a GradScaler besides"]),
    (lambda g: g.attach(optimizer=g.accelerator.prepare(model_and_optimizer()[1])), PolicyError,
     ["prepared before it was attached", "write  attach(accelerator, model"]),
    (lambda g: g.attach(model=g.optimizer, optimizer=g.model), PolicyError, ["model"]),
    (lambda g: g.attach(model=mezzo.prepare(nn.Linear(2, 1), "O1")), PolicyError,
     ["a prepared model cannot be attached"]),
    (lambda g: g.attach_beside("DEEPSPEED"), UnsupportedError, ["with DEEPSPEED", "torchrun"]),
    (lambda g: g.attach_beside("FSDP"), UnsupportedError, ["with FSDP", "mezzo.fully_shard"]),
    (lambda g: g.attach_beside("MEGATRON_LM"), UnsupportedError, ["with MEGATRON_LM", "torchrun"]),
    (lambda g: g.plug(nn.Linear(1, 1)), PolicyError, ["the trainer is Linear(", "write  plug(Trainer"]),
    (lambda g: g.plug(g.plug()), PolicyError, ["has a policy already"]),
    (lambda g: g.plug(policy="O4"), PolicyError, ["unknown level"]),
    (lambda g: g.plug(on_overflow="halt"), PolicyError, ["'halt'"]),
    *(
        (lambda g, name=name: g.plug(trainer_of(g.of, **{name: True})), PolicyError,
         [f"has {name}=True besides", f"write  TrainingArguments(…) without {name}"])
        for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")
    ),
    (Given.plug_beside_engines, UnsupportedError, ["with DEEPSPEED", "torchrun"]),
    (Given.plug_on_several_gpus, UnsupportedError, ["on 4 GPUs in one process", "torchrun"]),
    (lambda g: g.plugin("O4"), PolicyError, ["unknown level 'O4'"]),
    (lambda g: g.plugin(on_overflow="halt"), PolicyError, ["'halt'"]),
    (lambda g: g.trainer(precision="bf16-mixed"), ValueError, ["Received both `precision"]),
    (lambda g: g.trainer(g.of.lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu")), Exception,
     ["multiple values for Precision"]),
    (lambda g: g.of.lightning.pytorch.strategies.FSDPStrategy(precision_plugin=g.plugin()), TypeError,
     ["can only work with the `FSDPPrecision` plugin"]),
    (lambda g: g.fabric(precision="16-mixed"), ValueError, ["Received both `precision"]),
    (lambda g: g.fabric(strategy=g.of.fabric.strategies.DataParallelStrategy()).setup(*model_and_optimizer()),
     UnsupportedError, ['strategy="dp"', 'strategy="ddp"']),
    (Given.backward_without_an_optimizer, StateError,
     ["there is no session", "write  model, optimizer = fabric.setup"]),
    (lambda g: g.fabric().setup(nn.Linear(2, 1), g.optimizer), PolicyError, ["not the models'"]),
    (lambda g: g.plugin().metrics(), StateError, ["there is no session"]),
]  # fmt: skip


def test_refused(of):
    for do, error, words in REFUSED:
        of.forget()
        with pytest.MonkeyPatch.context() as monkeypatch:
            given = Given(of, monkeypatch)
            try:
                with refused(error, *words, parts=(given.model, given.optimizer)):
                    do(given)
            except (AssertionError, pytest.fail.Exception) as wrong:
                raise AssertionError(f"{error.__name__} {words}: {wrong}") from wrong
            assert given.accelerator.scaler is None or do is Given.attach_beside_a_scaler, words


def test_a_second_session_of_an_accelerator(of):
    given = Given(of, None)
    amp, (other, another) = given.attach(), model_and_optimizer()
    words = "has a session already", "write  attach(accelerator, [model, other]"
    with refused(PolicyError, *words, parts=(amp, other, another)):
        given.attach(model=other, optimizer=another)
    amp.close()
    given.attach(model=other, optimizer=another).close()


@pytest.mark.parametrize("bridge", ["accelerate", "transformers"])
def test_a_sharded_model_is_refused(of, alone, bridge):
    trainer = trainer_of(of)
    mezzo.fully_shard(trainer.model, "O1")
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    bridges = {
        "accelerate": lambda: of.to_accelerate.attach(trainer.accelerator, trainer.model, optimizer, "O1"),
        "transformers": lambda: of.to_transformers.plug(trainer),
    }
    with pytest.raises(UnsupportedError, match=r"the model is sharded\n(.|\n)*write  a loop of your own"):
        bridges[bridge]()
    assert type(trainer) is of.transformers.Trainer
    assert trainer.accelerator.scaler is None


@pytest.mark.parametrize(
    "name, install",
    [("lightning", "lightning>=2"), ("accelerate", "accelerate>=1"), ("transformers", "transformers>=4")],
)
def test_an_absent_framework_is_named(of, monkeypatch, name, install):
    for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"mezzo.integrations.{name}")
    with pytest.raises(UnsupportedError, match=rf'pip install .*"{install}'):
        importlib.import_module(f"mezzo.integrations.{name}")
