"""What evidence about numbers is asked for and cannot be had: refused by name, nothing changed."""

import contextlib
import json
import math

import pytest
import torch
from torch import nn

from mezzo.errors import NumericsError, PolicyError, StateError, UnsupportedError
from mezzo.numerics import Recorder, SwallowedUpdates, diagnose, exponent_histogram, read_evidence, swallowed, tune
from mezzo.numerics.evidence import FILE, kind_of, write

from ..support.refusals import refused
from ..support.releases import torchscript
from .test_evidence import SPECIAL, example
from .test_recorder import adamw, backward, batches, is_bare, net, session
from .test_tune import batches as data_of_tune
from .test_tune import loss_fn
from .test_tune import net as net_of_tune

pytestmark = pytest.mark.usefixtures("emulating")

NONE = SwallowedUpdates(updated=0, swallowed={"float16": 0}, beyond=0)
ASK = "exponent_histogram(torch.tensor"
COALESCED = "tensor.coalesce().values()"
NO_UPDATE = "no updates are swallowed by "
HALF = torch.ones(3, dtype=torch.float16)

#: What is asked of numbers and of evidence: the call, the error, its words.
ASKED = [
    *((lambda wrong=wrong: exponent_histogram(wrong), PolicyError, ("has no histogram", ASK)) for wrong in
      ([1.0], None, 1.0)),
    (lambda: exponent_histogram(torch.zeros(3, dtype=torch.float64)), PolicyError, ("tensor.float()",)),
    (lambda: exponent_histogram(torch.zeros(3, dtype=torch.int32)), PolicyError, ("tensor.float()",)),
    (lambda: exponent_histogram(torch.zeros(3, dtype=torch.complex64)), PolicyError, ("view_as_real",)),
    (lambda: exponent_histogram(torch.eye(3).to_sparse()), PolicyError, (COALESCED,)),
    (lambda: exponent_histogram(torch.eye(3).to_sparse_coo().coalesce()), PolicyError, (COALESCED,)),
    *((lambda name=name, ask=ask: ask(name), PolicyError, ("values by themselves are not stored in", why)) for ask in
      (exponent_histogram(SPECIAL).coverage, exponent_histogram(SPECIAL).best_scale,
       lambda name: swallowed(torch.ones(3), torch.ones(3), name), lambda name: Recorder(net(), formats=[name]))
      for name, why in (("e2m1", "beside their scales only"), ("e8m0", "its numbers are scales"))),
    (lambda: exponent_histogram(SPECIAL).coverage("float16", scale=0.0), PolicyError, ("positive finite",)),
    (lambda: exponent_histogram(torch.zeros(1)).best_scale(), NumericsError, ("every value is zero",)),
    (lambda: exponent_histogram(SPECIAL).best_scale(), NumericsError, ("2 inf and 1 nan", "overflow.locate(fn")),
    (lambda: swallowed(HALF, HALF[:2], "float16"), PolicyError, ("differ in shape",)),
    *((lambda pair=pair: swallowed(*pair, "float16"), PolicyError, (NO_UPDATE,)) for wrong in
      (HALF.int(), HALF.bool(), torch.zeros(3, dtype=torch.complex64), [1.0], None)
      for pair in ((wrong, HALF), (HALF, wrong))),
    (lambda: kind_of("activation grad"), PolicyError, ("did you mean 'activation_gradients'",)),
    (lambda: kind_of("wheights"), PolicyError, ("did you mean 'weights'", 'write  "weights"')),
    (lambda: kind_of(3), PolicyError, ("unknown kind of tensors 3",)),
    (lambda: NONE.share("e5m2"), PolicyError, ("not recorded", "recorded: float16", 'formats=("float8_e5m2"')),
    (lambda: example().histogram("weights", "blocks.7"), PolicyError, ("did you mean 'blocks.",)),
    (lambda: example().histogram("weight_gradients"), StateError, ("recorded: weights, activations, updates",)),
    (lambda: example().histogram(3), PolicyError, ("unknown kind of tensors 3",)),
    (lambda: example().histogram("activations", "unused"), StateError, ("no recorded step called it",)),
    (lambda: example().histogram("updates", step=11), StateError, ("step 11 was skipped",)),
    (lambda: example().histogram("updates", "embed", step=2), StateError, ("recorded: 1, 11",)),
    (lambda: example().histogram("updates", name="bias"), StateError, ("there are weight",)),
    (lambda: example().histogram("updates", step="last"), PolicyError, ('step="newest"',)),
    (lambda: example(steps=()).histogram("updates"), StateError, ("no step was recorded yet, of 17 taken",)),
    *((lambda wrong=wrong: diagnose(wrong), PolicyError, ("is no evidence", "write  diagnose(recorder.evidence)"))
      for wrong in (Recorder(nn.Linear(2, 2)), "evidence.jsonl", None)),
]  # fmt: skip


def test_what_is_asked_of_numbers_and_evidence():
    for call, error, words in ASKED:
        with refused(error, *words):
            call()


def changed(line, *path, to=None):
    """Return a file of evidence with one value of a line replaced; ``None`` takes it out."""

    def change(text):
        lines = [json.loads(row) for row in text.splitlines()]
        entry = lines[line]
        for key in path[:-1]:
            entry = entry[key]
        entry.pop(path[-1], None)
        if to is not None:
            entry[path[-1]] = to
        return "".join(json.dumps(row) + "\n" for row in lines)

    return change


FILES = [
    (changed(0, "schema", to=1), 1, "it has schema 1, and this version of mezzo reads schema 3"),
    (changed(0, "modules", 0, "path"), 1, "missing 1 required keyword-only argument: 'path'"),
    (changed(1, "tensors", 0, "counts", "900", to=1), 2, "out of range"),
    (changed(2, "seed", to=3), 3, "unexpected keyword argument 'seed'"),
    (lambda text: "not JSON\n", 1, "Expecting value"),
    (lambda text: "[]\n", 1, "pop"),
    (lambda text: "", 1, "Expecting value"),
    (lambda text: text.replace("\n", "\n{\n", 1), 2, "Expecting property name"),
]


def test_damaged_files_of_evidence(tmp_path):
    with refused(StateError, "there is no evidence here", "recorder.save(path)", parts=[tmp_path]):
        read_evidence(tmp_path)
    for change, line, words in FILES:
        write(example(), tmp_path / FILE)
        (tmp_path / FILE).write_text(change((tmp_path / FILE).read_text()))
        with refused(StateError, f"{FILE}, line {line}\n", words, parts=[tmp_path]):
            read_evidence(tmp_path)


RECORDER = [
    ((3,), {}, "watches a torch.nn.Module, not int"),
    ((nn.ReLU(),), {}, "nothing to record of a model without parameters"),
    ((nn.Sequential(nn.LazyLinear(3)),), {}, "without a shape", "0.weight, 0.bias", "first forward pass"),
    ((net(), "adamw"), {}, "takes a torch.optim.Optimizer, not str"),
    ((net(), []), {}, "not an empty list"),
    ((net(), torch.amp.GradScaler("cpu")), {}, "not GradScaler"),
    ((net(), adamw(net())), {}, "updates none of the model's parameters"),
    ((net(), None, 0), {}, "every is 0, not a number of steps"),
    ((net(), None, 2.5), {}, "every is 2.5"),
    ((net(), None, 50, ("float61",)), {}, "did you mean 'float16'"),
    ((net(),), {"kinds": ()}, "kinds is empty"),
    ((net(),), {"kinds": ["weigths"]}, "did you mean 'weights'"),
    ((net(),), {"modules": ["blok"]}, "no module matches 'blok'", "did you mean 'block'"),
    ((net(),), {"modules": []}, "no module matches modules=()"),
    ((net(),), {"keep": 0}, "keep is 0"),
    ((net(),), {"loss_scale": 0.0}, "loss scale is 0.0, not a positive finite number"),
    ((net(),), {"loss_scale": "dynamic"}, "loss scale is 'dynamic'"),
    ((net(), adamw(net()), 0, ("float61",)), {}, "3 problems"),
]


def test_arguments_of_a_recorder():
    for arguments, options, *words in RECORDER:
        with refused(PolicyError, *words, parts=arguments):
            Recorder(*arguments, **options)
    with refused(FileNotFoundError, "no folder to save in"):
        Recorder(net(), stream="/nowhere/at/all.jsonl")


def test_calls_of_a_recorder_at_the_wrong_moment():
    model, optimizer, amp = session()
    recorder = Recorder(model, optimizer)
    with refused(StateError, "outside of its block"):
        recorder.step()
    with refused(StateError, "no step was recorded yet, of 0 taken"):
        recorder.histogram("weights")
    with recorder, refused(StateError, "records one run"):
        recorder.__enter__()
    with refused(StateError, "outside of its block"):
        recorder.step()
    with refused(StateError, "records one run"), recorder:
        pass
    with Recorder(model, optimizer, loss_scale=2.0), refused(PolicyError, "knows which scale"):
        backward(amp, model, batches(1)[0])


def test_a_scaler_that_the_recorder_does_not_know_is_refused_where_its_scale_is_told():
    model = net()
    optimizer = adamw(model, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    words = "AdamW\n", "write  Recorder(model, optimizer, loss_scale=scaler)"
    with Recorder(model, optimizer):
        scaler.scale(model(batches(1)[0]).square().mean()).backward()
        with refused(PolicyError, *words, parts=[*model.parameters()]):
            scaler.step(optimizer)
    weights = [param.detach().clone() for param in model.parameters()]
    scaler.step(optimizer)
    assert not any(map(torch.equal, model.parameters(), weights))


@torchscript
def test_scripted_modules_where_activations_alone_are_wanted():
    scripted = nn.Sequential(nn.Linear(6, 4), torch.jit.script(nn.Linear(4, 2)))
    with refused(UnsupportedError, "inside torch.jit ", "where  1", "kinds="):
        Recorder(scripted, kinds="activations").__enter__()
    assert is_bare(scripted)


# Tuning -------------------------------------------------------------------------------------------------------


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def low(model, batch):
    return loss_fn(model, (batch[0].bfloat16(), batch[1]))


@contextlib.contextmanager
def locked():
    """A model that cannot be copied."""
    model = net_of_tune()
    with open(__file__) as model.lock:
        yield model


@torchscript
def test_what_cannot_be_tuned():
    model, data = net_of_tune(), data_of_tune()
    still, scripted = net_of_tune().requires_grad_(False), nn.Sequential(torch.jit.script(nn.Linear(16, 4)))
    wide = net_of_tune().double(), lambda m, b: loss_fn(m, (b[0].double(), b[1])), data
    other = lambda _, batch: loss_fn(model, batch)  # noqa: E731
    reference = "what low precision is compared with"
    rows = [
        (("model", loss_fn, data), {}, "a model must be an nn.Module, not str"),
        ((model, None, data), {}, "loss_fn is a NoneType, no function"),
        ((net_of_tune().bfloat16(), low, data), {}, "weights that train are stored low", "where  embed.weight"),
        ((model, loss_fn, data), {"dtype": "float8"}, "nothing can be tuned in 'float8'"),
        ((model, loss_fn, data), {"dtype": "e5m2"}, "nothing can be tuned in 'float8_e5m2'"),
        ((model, loss_fn, data), {"dtype": 7}, "nothing can be tuned in 7"),
        ((model, loss_fn, data), {"dtype": torch.float32}, reference),
        ((model, loss_fn, data), {"dtype": "float32"}, reference),
        ((model, loss_fn, data), {"policy": "O0"}, reference),
        ((model, loss_fn, data), {"policy": "O2,bf16"}, "nothing can be tuned under O2"),
        ((model, loss_fn, data), {"steps": 0}, "steps must be a positive integer, not 0"),
        ((model, loss_fn, data), {"steps": True}, "steps must be a positive integer, not True"),
        ((model, loss_fn, data), {"steps": 0, "dtype": "float8"}, "2 problems"),
        ((model, loss_fn, data), {"optimizer": sgd(model)}, "optimizer= is a SGD, no function"),
        ((model, loss_fn, data), {"optimizer": lambda params: 7}, "optimizer= returned 7, no optimizer"),
        ((model, loss_fn, data), {"optimizer": lambda _: sgd(model)}, "other parameters than those it was given"),
        ((model, loss_fn, data), {"optimizer": torch.optim.LBFGS}, "LBFGS takes no step without a closure"),
        ((model, loss_fn, []), {}, "there is no batch to tune on"),
        ((model, loss_fn, 7), {}, "batches is 7, nothing to iterate over"),
        ((still, loss_fn, data), {}, "the model has no parameter that trains"),
        ((model, lambda m, b: m(b[0]), data), {}, "it returned (32, 4) torch.float32"),
        ((model, lambda m, b: None, data), {}, "it returned NoneType"),
        ((model, lambda m, b: loss_fn(m, b).detach(), data), {}, "without a gradient"),
        ((model, other, data), {}, "loss_fn runs another model than it is given"),
        ((scripted, loss_fn, data), {}, "scripted modules cannot be tuned"),
        (wide, {}, "float64"),
    ]
    for arguments, options, *words in rows:
        with refused((PolicyError, UnsupportedError), *words, "\n  write", parts=[model, *data[0]]):
            tune(*arguments, **options)
    with locked() as model, refused(UnsupportedError, "the model cannot be copied", "\n  write"):
        tune(model, loss_fn, data)


class Own(torch.autograd.Function):
    """What asks about autocast by itself."""

    @staticmethod
    def forward(ctx, x):
        return x * (math.inf if torch.is_autocast_enabled("cpu") else 1.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_what_is_not_finite_and_no_rule_cures():
    data, spoilt, bad = data_of_tune(), net_of_tune(), data_of_tune()
    with torch.no_grad():
        spoilt.blocks[1].fc.weight[0, 0] = math.nan
    bad[1][0][0, 0] = math.inf
    begun = "the model is not finite in FP32, in step 1 of 2"
    wide = "the first non-finite tensor: output, in the forward pass of plant exp"
    no_rule = "no rule brings the gradients of float16 near those of FP32", "the loss is not finite"
    for model, batches_, options, words in (
        (net_of_tune(lambda x: x + (x.abs() + 100.0).exp()), data, {}, (begun, wide)),
        (spoilt, data, {}, ("blocks.1.fc", "weight")),
        (net_of_tune(), bad, {}, ("in step 2 of 2", "embed linear")),
        (net_of_tune(), data, {"optimizer": lambda p: torch.optim.SGD(p, lr=1e30)}, ("not finite in FP32, in step 2",)),
        (net_of_tune(lambda x: x + Own.apply(x)), data, {}, no_rule),
    ):
        with refused(NumericsError, *words, parts=[model]):
            tune(model, loss_fn, batches_, steps=2, **options)
