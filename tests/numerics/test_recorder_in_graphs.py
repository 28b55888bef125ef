"""The recorder where torch.compile makes graphs: the same counts as in eager mode, one graph, and none made anew."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mezzo import MixedPrecision, Policy, PolicyError
from mezzo.numerics import KINDS, Recorder, exponent_histogram
from mezzo.numerics.outputs import OutputHook

from ..support.releases import torchscript

pytestmark = [
    pytest.mark.usefixtures("emulating"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo, of emulation's autograd functions
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo, where any module has a forward hook
]


class Two(nn.Module):
    """Returns a tuple, with what is no tensor in it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x), 3, self.b(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.two, self.norm = nn.Linear(6, 8), nn.ReLU(inplace=True), Two(), nn.LayerNorm(8)
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        one, _, other = self.two(self.act(self.up(x)))
        return x + self.down(self.norm(one + other))


class Net(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(make=Net):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(7, 6, generator=generator) for _ in range(count)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def hooks(model):
    return [
        hook for module in model.modules() for hook in module._forward_hooks.values() if isinstance(hook, OutputHook)
    ]


class Counting:
    """A backend that counts its graphs."""

    def __init__(self, name="aot_eager"):
        self.graphs, self._inner = 0, torch._dynamo.lookup_backend(name)

    def __call__(self, graph, examples):
        self.graphs += 1
        return self._inner(graph, examples)


def whole(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def by_blocks(model, backend):
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def in_a_function(model, backend):
    return torch.compile(lambda x: model(x), backend=backend, fullgraph=True)


def eager(model, backend):
    return model


def recorded(compiled, policy=None, backend=None, steps=4, every=2, kinds=KINDS, make=Net):
    torch.compiler.reset()
    model = net(make)
    optimizer = adamw(model)
    amp = MixedPrecision(model, optimizer, Policy.of(policy)) if policy else None
    called = compiled(model, backend)
    with Recorder(model, optimizer, every=every, kinds=kinds) as recorder:
        for x in batches(steps):
            with amp.autocast() if amp else contextlib.nullcontext():
                loss = called(x).float().square().mean()
            amp.backward(loss) if amp else loss.backward()
            amp.step() if amp else optimizer.step()
            recorder.step()
            optimizer.zero_grad()
    assert not hooks(model)
    return recorder.evidence


def counts_of(evidence, tensor_kind, step):
    return {
        tensor.path: (tensor.dtype, tensor.histogram.numbers) for tensor in evidence.tensors(tensor_kind, step=step)
    }


FP16 = "O2,dtype=float16,loss_scale=dynamic(init=1024)"


@pytest.mark.parametrize("compiled, policy", [(whole, "O1,dtype=bfloat16"), (by_blocks, None), (in_a_function, FP16)])
def test_graphs_count_what_eager_mode_counts(compiled, policy, caplog):
    backend = Counting()
    evidence, expected = recorded(compiled, policy, backend), recorded(eager, policy)
    assert [step.step for step in evidence.steps] == [1, 3]
    for tensor_kind in KINDS:
        for step in (1, 3):
            assert counts_of(evidence, tensor_kind, step) == counts_of(expected, tensor_kind, step), (tensor_kind, step)
    assert evidence.header.modules == expected.header.modules
    assert backend.graphs == 1  # blocks share it, and no step that is recorded or not makes another one
    assert not [entry for entry in caplog.records if entry.name.startswith("mezzo.numerics")]


def test_a_late_recorder_is_seen_and_one_that_has_ended_leaves_nothing():
    torch.compiler.reset()
    backend, (x,) = Counting(), batches(1)
    model, other = net(), net()
    called, called_too = whole(model, backend), whole(other, backend)
    for called_model in (called, called_too, called):
        called_model(x).sum().backward()
    assert backend.graphs == 1
    with Recorder(model, kinds=("activations", "activation_gradients")) as recorder:
        for called_model in (called, called_too):
            called_model(x).sum().backward()
        recorder.step()
    assert counts_of(recorder.evidence, "activations", 1) == counts_of(
        recorded(eager, steps=1, kinds=("activations",)), "activations", 1
    )
    before = backend.graphs
    for called_model in (called, called_too):
        called_model(x).sum().backward()
    assert backend.graphs == before + 1  # without what counts, and for both


@pytest.mark.parametrize("first", ["the recorded one", "the other"])
def test_another_model_of_the_class_has_a_graph_of_its_own(first):
    torch.compiler.reset()
    backend, (x,) = Counting(), batches(1)
    model = net()
    called, called_too = whole(model, backend), whole(net(), backend)
    with Recorder(model, every=2) as recorder:
        for _ in range(5):
            for called_model in (called, called_too) if first == "the recorded one" else (called_too, called):
                called_model(x).sum().backward()
            recorder.step()
    expected = counts_of(recorded(eager, steps=1, kinds=("activations",)), "activations", 1)
    assert [counts_of(recorder.evidence, "activations", step) for step in (1, 3, 5)] == [expected] * 3
    assert backend.graphs == 2
    assert torch._dynamo.config.skip_nnmodule_hook_guards


def test_what_is_compiled_inside_the_block_counts_from_the_next_recorded_step_on():
    torch.compiler.reset()
    backend, (x,) = Counting(), batches(1)
    model = net()
    with Recorder(model, every=2) as recorder:
        for number in range(1, 6):
            called = model if number == 1 else in_a_function(model, backend)
            called(x).sum().backward()
            recorder.step()
    expected = counts_of(recorded(eager, steps=1, kinds=("activations",)), "activations", 1)
    assert [counts_of(recorder.evidence, "activations", step) for step in (1, 3, 5)] == [expected] * 3


def test_evaluation_in_graphs_counts_only_where_gradients_come_back():
    torch.compiler.reset()
    model, (x, y) = net(), batches(2)
    called = whole(model, Counting())
    with Recorder(model) as recorder:
        with torch.no_grad():
            called(y)
        model.eval()
        called(y)
        model.train()
        called(x).sum().backward()
        recorder.step()
    assert recorder.histogram("activations", "head").total == 7 * 3
    with Recorder(model) as recorder:  # training in evaluation mode is training
        model.eval()
        called(x).sum().backward()
        recorder.step()
    assert recorder.histogram("activations", "head").numbers == exponent_histogram(model(x)).numbers
    assert recorder.histogram("activation gradients", "blocks.0.two").total == 2 * 7 * 8


@pytest.mark.parametrize("compiled", [eager, whole, by_blocks])
def test_of_training_in_evaluation_mode_passes_count_that_gradients_come_back_through(compiled):
    torch.compiler.reset()
    model, (x, y) = net(), batches(2)
    called = compiled(model.eval(), Counting())
    expected = exponent_histogram(model(x)).numbers
    for kinds in (("activations",), ("activations", "activation gradients")):
        with Recorder(model, kinds=kinds) as recorder:
            called(y.repeat(2, 1))
            loss = called(x).sum()
            called(y)
            loss.backward()
            called(y)
            recorder.step()
        assert recorder.histogram("activations", "head").numbers == expected
    assert recorder.histogram("activation gradients", "head").total == 7 * 3


class Branches(nn.Module):
    """Calls its modules in another order than it has them, and returns a dict of them."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(6, 3), nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.first(x)
        return {"out": self.last(hidden), "aside": (None, [hidden * 2])}


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.branches = nn.LayerNorm(3), Branches()

    def forward(self, x):
        outputs = self.branches(x)
        return self.norm(outputs["out"]) + outputs["aside"][1][0].mean()


@pytest.mark.parametrize("kinds", [KINDS, ("activation_gradients",)])
def test_names_and_the_order_of_calls_are_those_of_eager_mode(kinds):
    of_modes = {}
    for compiled in (eager, whole):
        evidence = recorded(compiled, backend="aot_eager", make=Branching, steps=1, kinds=kinds)
        of_modes[compiled] = [(tensor.kind, tensor.path) for tensor in evidence.steps[0].tensors]
        names = [path for tensor_kind, path in of_modes[compiled] if tensor_kind == "activation_gradients"]
        assert names == [
            "branches.first.output", "branches.last.output", "branches.output['out']",
            "branches.output['aside'][1][0]", "norm.output", "output",
        ]  # fmt: skip
        order = [module.path for module in evidence.header.modules]
        assert order == ["branches.first", "branches.last", "branches", "norm", ""]
    assert of_modes[eager] == of_modes[whole]


def test_graphs_may_serve_the_next_recorder():
    torch.compiler.reset()
    model, (x,), counts = net(Branching), batches(1), []
    called = whole(model, Counting())
    with Recorder(net()):  # as long as it lasts, graphs stay
        for _ in range(2):
            with Recorder(model) as recorder:
                called(x).sum().backward()
                recorder.step()
            counts.append(counts_of(recorder.evidence, "activations", 1))
    assert counts[0] == counts[1]
    assert "branches.output['out']" in counts[0]


def test_what_a_graph_recomputes_is_counted_once():
    class Checkpointed(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    evidence, expected = recorded(whole, backend="aot_eager", make=Checkpointed, steps=1), recorded(eager, steps=1)
    for tensor_kind in KINDS:
        assert counts_of(evidence, tensor_kind, 1) == counts_of(expected, tensor_kind, 1), tensor_kind


@torchscript
def test_inductor_counts_as_many_values():
    evidence, expected = recorded(whole, backend="inductor", steps=1), recorded(eager, steps=1)
    for tensor_kind in KINDS:
        totals = [
            {p: sum(row[:-1]) for p, (_, row) in counts_of(side, tensor_kind, 1).items()}
            for side in (evidence, expected)
        ]
        assert totals[0] == totals[1], tensor_kind


def test_more_observations_than_there_is_memory_for_are_refused(monkeypatch):
    monkeypatch.setattr("mezzo.numerics.outputs.MOST", 30)
    compiled = torch.compile(net(), backend="eager")
    with pytest.raises(PolicyError, match="40 observations are too many") as caught:
        Recorder(compiled).__enter__()
    assert 'modules=["layers.0"' in str(caught.value)
    with pytest.raises(PolicyError, match="too many"):
        Recorder(by_blocks(net(), "eager")).__enter__()
    Recorder(compiled, modules="blocks.0").__enter__().__exit__(None, None, None)
    Recorder(net()).__enter__().__exit__(None, None, None)  # eager mode makes memory for what is called


def test_the_steps_between_are_not_counted():
    torch.compiler.reset()
    model = net()
    called, optimizer = whole(model, Counting()), adamw(model)
    with Recorder(model, optimizer, every=4) as recorder:
        for number, x in enumerate(batches(3)):
            called(x).sum().backward()
            optimizer.step()
            recorder.step()
            rows = torch.stack(
                [row for hook in hooks(model) for count in hook.counts() for row in (count.values, count.gradient)]
            )
            if number == 0:
                counted = rows
            assert torch.equal(rows, counted), number
    assert counted.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_blocks_that_a_checkpoint_runs_again_are_counted_once(reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    evidence, expected = recorded(by_blocks, backend="aot_eager", make=Checkpointed, steps=1), recorded(eager, steps=1)
    for tensor_kind in KINDS:
        assert counts_of(evidence, tensor_kind, 1) == counts_of(expected, tensor_kind, 1), tensor_kind
