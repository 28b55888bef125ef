"""The table of a watched pass: values that writes renew, calls, phases, modules, casts and products."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.policy import Policy
from mezzo.trace.function_calls import LOSS, Locator, frame_id
from mezzo.trace.modes import is_watched
from mezzo.trace.recording import KernelTeller, PassRecorder
from mezzo.trace.table import flops_by_format, low_share


def recorded(run, *, model=None, inputs=(), policy="O0", **options):
    """Run something under a recorder, and return its table."""
    recorder = PassRecorder(Policy.of(policy), where=Locator(until=frame_id()), **options)
    models = [] if model is None else [model]
    for part in models:
        recorder.learn(part, inputs)
    with recorder.hooked(models), recorder.watching():
        run()
    return recorder.table()


def named(table, name):
    return [record for record in table.kernels if record.name == name]


def test_each_write_makes_a_new_value():
    x, y = torch.ones(4), torch.ones(2, 2)

    def run():
        z = x + 1  # read through a view, and written to through one
        z.view(2, 2)[0].mul_(2)
        torch.cat([z, y.flatten()])
        torch.add(y, y, out=torch.empty(2, 2))

    table = recorded(run)
    add, mul, cat, out = table.kernels
    assert [record.name for record in table.kernels] == ["add", "mul", "cat", "add"]
    (made,), (written,) = add.gives, mul.gives
    assert made.number != written.number
    assert made.memory == written.memory
    assert mul.reads[0].number == made.number
    assert mul.reads[0].shape == (2,)
    assert [value.number for value in cat.reads] == [written.number, out.reads[0].number]
    assert table.maker(written) is mul
    assert table.maker(add.reads[0]) is None
    assert table.readers(made) == [mul]
    assert table.readers(written) == [cat]
    assert cat.effect == "rearranging"
    assert [record.constants for record in (add, mul)] == [(1,), (2,)]
    memory = out.gives[0].memory
    assert [call.op for call in table.calls if call is table.allocated[memory]] == ["empty"]


class Net(nn.Module):
    def __init__(self, *, use_reentrant):
        super().__init__()
        self.first, self.second, self.use_reentrant = nn.Linear(4, 4, bias=False), nn.Linear(4, 2), use_reentrant
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        x = checkpoint(lambda y: self.first(y).sigmoid(), x, use_reentrant=self.use_reentrant)
        return self.second(x + self.shift)


def test_phases_modules_and_calls_of_both_checkpoints():
    for use_reentrant in (False, True):
        model, x = Net(use_reentrant=use_reentrant), torch.ones(3, 4, requires_grad=True)
        recorder = PassRecorder(where=Locator(until=frame_id()))
        recorder.learn(model, (x,))
        with recorder.hooked([model]):
            with recorder.watching():
                loss = model(x).sum()
            with recorder.watching(backward=True):
                loss.backward()
        table = recorder.table()
        products = [
            (record.phase, record.module, record.call.op) for record in table.kernels if record.effect == "product"
        ]
        backward = [("backward", "second", "linear")] * 2
        assert products[:4] == [("forward", "first", "linear"), ("forward", "second", "linear"), *backward]
        assert products[4] == ("recomputed", "first", "linear")
        assert [product[:2] for product in products[5:]] == [("backward", "first")] * 2
        assert {call.op for call in table.calls if call.is_backward} == {"linear"}  # those that modules make
        assert all(call.line.startswith(__file__) for call in table.calls if call.module == "")
        assert [(call.op, call.returns) for call in table.calls if call.module == LOSS] == [("sum", ("float32",))]
        assert table.modules_run >= {"", "first", "second"}
        (add,) = [record for record in named(table, "add") if record.phase == "forward"]
        assert table.names[add.reads[1].number] == "shift"
        assert [table.role_of(value) for value in add.reads] == ["activation", "buffer"]
        first = next(record for record in table.kernels if record.effect == "product")
        assert {table.names[value.number] for value in first.reads} == {"input [0]", "first.weight"}
        node = next(
            record.node for record in table.kernels if record.phase == "backward" and record.effect == "product"
        )
        assert node.name == "AddmmBackward0"
        assert first.flops == (2 * 3 * 4 * 4, torch.float32)
        assert first.sizes == (("M", 3), ("N", 4), ("K", 4))


def test_a_derivative_in_the_forward_pass():
    x = torch.ones(3, 4, requires_grad=True)
    table = recorded(lambda: torch.autograd.grad((x * x).sum(), x, create_graph=True)[0].exp())
    records = [record for record in table.kernels if record.name in ("sum", "mul", "exp")]
    assert [(record.name, record.phase, record.is_inner) for record in records] == [
        ("mul", "forward", False), ("sum", "forward", False), ("mul", "backward", True), ("mul", "backward", True),
        ("exp", "forward", False),
    ]  # fmt: skip


@torch.library.custom_op("mezzo_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def test_a_kernel_of_an_extension_has_a_call_of_its_own():
    x = torch.ones(3)
    table = recorded(lambda: torch.add(tripled(x), 1))
    assert [(call.op, call.has_returned, call.returns) for call in table.calls] == [
        ("mezzo_tests::tripled", True, ("float32",)), ("add", True, ("float32",)),
    ]  # fmt: skip
    assert [len(table.of(call)) for call in table.calls] == [1, 1]


def test_who_casts_and_what_runs_low():
    model, x = nn.Linear(8, 4), torch.ones(2, 8)
    for emulate, by in (("true", "emulation"), ("false", "other")):
        handle = mezzo.prepare(model, policy := f"O1,dtype=bfloat16,emulate={emulate}")
        recorder = PassRecorder(Policy.of(policy), where=Locator(until=frame_id()))
        recorder.learn(model, (x,))
        with recorder.hooked([model]), handle.autocast(), recorder.watching():
            model(x).float()
        table = recorder.table()
        handle.remove()
        casts = [record for record in table.kernels if record.effect == "cast" and record.reads[0].role == "parameter"]
        assert {table.names[cast.reads[0].number] for cast in casts} == {"weight", "bias"}
        assert all(cast.by == "cast" for cast in casts)
        (product,) = [record for record in table.kernels if record.effect == "product"]
        assert product.by == by or (by == "other" and product.by == "region")
        assert {table.role_of(value) for value in product.reads} == {"parameter", "activation"}
        flops = flops_by_format(table.kernels)
        assert flops == {"emulated" if by == "emulation" else "bfloat16": 2 * 2 * 8 * 4}
        assert low_share(flops, [torch.bfloat16]) == 1.0
        (call,) = [call for call in table.calls if call.op == "float"]
        assert (call.argument_dtypes, call.returns, call.is_conversion) == (("bfloat16",), ("float32",), True)


def test_a_call_is_told_before_and_after_and_a_kernel_with_what_it_read():
    calls, kernels = [], []

    def called(call, function, args, kwargs):
        calls.append((call.op, args[0].tolist()))
        return lambda out: calls.append((call.op, out.tolist(), call.has_returned))

    def run():
        torch.ones(2).mul_(3.0)

    def ran(record, tensors):
        kernels.append((record.name, [operand.tensor.tolist() for operand in tensors.before]))

    recorded(run, called=lambda *call: called(*call) if call[0].op == "mul_" else None, ran=ran)
    assert calls == [("mul_", [1.0, 1.0]), ("mul_", [3.0, 3.0], True)]
    assert kernels == [("ones", []), ("mul", [[1.0, 1.0]])]

    def fails():
        torch.ones(2) @ torch.ones(3)

    table = None
    recorder = PassRecorder()
    with recorder.watching():
        try:
            fails()
        except RuntimeError:
            table = recorder.table()
    assert [(call.op, call.has_returned) for call in table.calls] == [("ones", True), ("ones", True), ("matmul", False)]


def test_kernels_alone_are_told_of_and_that_is_no_watching():
    model, x, kernels = nn.Linear(8, 4).bfloat16(), torch.ones(2, 8, dtype=torch.bfloat16), []
    with KernelTeller(kernels.append):
        assert not is_watched()
        model(x).sum().backward()
    assert flops_by_format(kernels) == {"bfloat16": 2 * 2 * 2 * 8 * 4}
    product = next(record for record in kernels if record.effect == "product")
    assert [value.shape for value in product.gives] == [(2, 4)]
    assert (product.call.op, product.number) == ("", -1)
