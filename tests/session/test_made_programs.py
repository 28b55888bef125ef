"""Programs that torch makes of a model under a policy, beside those of a plain one."""

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of torch's own calls
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),  # torch 2.11, where it loads a program
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x):
        return functional.softmax(self.last(functional.relu(self.norm(self.first(x))) * self.mask), -1)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2.0


def attached(model, optimizer, policy):
    amp = mezzo.attach(model, optimizer, policy)
    model(x()).square().sum().backward()
    optimizer.step()
    return amp.autocast, amp.close


def five_lines(model, optimizer, policy):
    amp = mezzo.MixedPrecision(model, optimizer, policy)
    with amp.autocast():
        loss = model(x()).square().sum()
    amp.backward(loss)
    amp.step()
    return amp.autocast, amp.close


def prepared(model, optimizer, policy):
    handle = mezzo.prepare(model, policy)
    return handle.autocast, handle.remove


def x():
    return torch.linspace(-2, 2, 40).view(5, 8)


def functions():
    """Return what is called meanwhile in the places of torch's functions."""
    return torch.export.export, torch.jit.trace_module, torch.jit._trace.trace_module


def test_functions_of_torch_are_torchs_once_no_model_is_under_a_policy():
    stood = functions()
    models = [nn.Linear(2, 2) for _ in range(3)]
    handles = [mezzo.prepare(model, "O1,bf16") for model in models]
    during = functions()
    handles.pop(0).remove()
    del models, handles
    gc.collect()
    assert functions() == stood
    assert all(function.__wrapped__ for function in during)


def scripted(program):
    """Return a program of TorchScript as another process would load it."""
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    return torch.jit.load(file)


def exported(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


EXPORT, SCRIPT = torch.export.export, torch.jit.script  # as a program has them that imports them by name
MAKERS = {
    "jit.trace": lambda model: scripted(torch.jit.trace(model, x())),
    "jit.trace of forward": lambda model: scripted(torch.jit.trace(model.forward, x(), check_trace=False)),
    "jit.trace_module": lambda model: scripted(torch.jit.trace_module(model, {"forward": x()})),
    "jit.trace around": lambda model: scripted(torch.jit.trace(Around(model), x())),
    "jit.script": lambda model: scripted(torch.jit.script(model)),
    "jit.script by name": lambda model: scripted(SCRIPT(model)),
    "jit.script around": lambda model: scripted(torch.jit.script(Around(model))),
    "jit.freeze": lambda model: scripted(torch.jit.freeze(torch.jit.script(model))),
    "export": lambda model: exported(torch.export.export(model, (x(),))),
    "export by name": lambda model: exported(EXPORT(model, (x(),))),
    "export, strict": lambda model: exported(torch.export.export(mod=model, args=(x(),), strict=True)),
    "export, decomposed": lambda model: torch.export.export(model, (x(),)).run_decompositions().module(),
    "export around": lambda model: exported(torch.export.export(Around(model), (x(),))),
}


@pytest.mark.parametrize(
    "begin, policy",
    [
        (attached, "O1,bf16,emulate=true"),
        (attached, "O2,bf16,emulate=false"),
        (five_lines, "O2,bf16,emulate=false"),
        (prepared, "O1,fp16,emulate=true"),
        (prepared, "O2,fp16,fp32_module=last"),
        (prepared, "O3,bf16,fp32_module=norm"),
    ],
)
def test_programs_are_made_of_a_plain_copy(begin, policy):
    torch.manual_seed(0)
    model, stood = Net().eval(), functions()
    _, end = begin(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    plain = Net().eval()
    plain.load_state_dict(copy.deepcopy(model).state_dict())
    for name, make in MAKERS.items():
        if name == "export by name" and policy.startswith("O3"):  # it computes in 16 bits, as the model does
            continue
        program = make(model)
        expected = (Around(plain) if "around" in name else plain)(x())
        torch.testing.assert_close(program(x()), expected, rtol=1e-6, atol=1e-6, msg=name)  # low: 3e-4
        state = program.state_dict()
        assert {key.rpartition(".")[2] for key in state} <= {"weight", "bias", "mask"}, name
        assert all(type(value) in (torch.Tensor, nn.Parameter) for value in state.values()), name
    assert model.first.weight.requires_grad  # and the model is the session's as before
    end()
    assert functions() == stood


@pytest.mark.parametrize("begin", [attached, five_lines, prepared])
def test_what_onnx_asks_of_torchscript_is_plain_too(begin):
    model = Net().eval()
    _, end = begin(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2,bf16,emulate=true")
    graph, out = torch.jit._get_trace_graph(model, (x(),))
    values = torch.jit._unique_state_dict(model)
    assert "BFloat16" not in str(graph)
    assert torch.equal(out, copy.deepcopy(model)(x()))
    assert {*map(type, values.values())} == {torch.Tensor}
    assert torch.equal(values["first.weight"], model.first.weight)
    end()


@pytest.mark.parametrize("begin", [attached, five_lines, None])
def test_a_program_that_is_exported_in_a_region_has_no_casts(begin):
    """As under torch.autocast, where it can be told to run in low precision as any model can."""
    torch.manual_seed(0)
    model = Net().eval()
    region, end = lambda: mezzo.autocast("O1,bf16,emulate=true", "cpu"), lambda: None
    if begin is not None:
        region, end = begin(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1,bf16,emulate=true")
    for strict in (False, True):
        with region():
            program = torch.export.export(model, (x(),), strict=strict).module()
            low = program(x())
        assert torch.equal(program(x()), copy.deepcopy(model)(x()))
        assert not torch.equal(low, program(x()))
    end()


class OwnRegion(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        with mezzo.autocast("O1,bf16,emulate=false", "cpu"):
            low = functional.linear(x, self.first.weight)
        with mezzo.autocast("O1,bf16,emulate=false,fp32=linear", "cpu"):
            return low, functional.softmax(self.last(low), -1)


@pytest.mark.parametrize("strict", [False, True])
def test_a_region_inside_of_a_program_is_exported(strict):
    model = OwnRegion().eval()
    program = exported(torch.export.export(model, (x(),), strict=strict))
    for output, expected in zip(program(x()), model(x()), strict=True):
        assert output.dtype == expected.dtype
        assert torch.equal(output, expected)
    assert program(x())[0].dtype == torch.bfloat16


def test_what_a_forward_pass_has_left_in_a_module_is_no_matter():
    class Looks(Net):
        def forward(self, x):
            self.seen = self.first(x)
            return self.last(self.norm(self.seen))

    model = Looks()
    amp = mezzo.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2,bf16,emulate=true")
    model(x()).sum().backward()
    traced = torch.jit.trace(model, x())
    model.seen = None
    assert torch.equal(traced(x()), copy.deepcopy(model)(x()))
    amp.close()


def test_a_traced_function_that_calls_a_model_warns_of_its_file():
    model = nn.Linear(8, 4).requires_grad_(False)
    handle = mezzo.prepare(model, "O2,bf16")
    with pytest.warns(
        UserWarning, match=r"would write zeros[\s\S]*torch\.jit\.trace\(model, …\)[\s\S]*text fp32_param="
    ):
        traced = torch.jit.trace(lambda rows: model(rows), x(), check_trace=False)
    assert torch.equal(traced(x()), model(x()))
    handle.remove()
