"""O2 computes what O1 computes: the same loss, gradients and weights, bit for bit, whatever the model."""

from contextlib import closing
from itertools import product

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import mezzo
from mezzo.weights import Halves

from .values import BF16, FP16
from .zoo import ZOO
from .zoo.registry import data

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections"),  # is slow in torch
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),  # forward-mode's own imports
    pytest.mark.filterwarnings("ignore:hooks of parameters see"),  # scaled gradients, in both levels
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo, of autograd functions
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # which Dynamo looks at, unless warnings are errors
]

#: Where no processor is fast in a format, its products cost minutes; tests are told of one that is fast in BF16.
ARITHMETICS = {
    "bf16 emulated": "dtype=bfloat16,emulate=true",
    "bf16": "dtype=bfloat16,emulate=false",
    "fp16 emulated": "dtype=float16,emulate=true,loss_scale=1024",
    "fp16": "dtype=float16,emulate=false,loss_scale=1024",
}
STYLES = ["five lines", "attach"]
each_program = pytest.mark.parametrize("program", ZOO)


def cases():
    """Yield each program in each arithmetic and style; of those that compile, for a second or three, two by default."""
    for program, arithmetic, style in product(ZOO, ARITHMETICS, STYLES):
        chosen = (arithmetic, style) in (("bf16", "five lines"), ("fp16 emulated", "attach"))
        is_slow = arithmetic == "fp16" or (program.startswith("compiled") and not chosen)
        yield pytest.param(program, arithmetic, style, marks=[pytest.mark.slow] * is_slow)


def dtype_of(arithmetic):
    return BF16 if arithmetic.startswith("bf16") else FP16


def built(program, dtype):
    """Return a program whose weights lie on the grid of a format, where no tie is rounded."""
    torch.manual_seed(0)
    model, loss = ZOO[program]()
    with torch.no_grad():
        for param in model.parameters():
            if param.dtype == torch.float32:
                param.copy_(param.to(dtype).float())
    torch.manual_seed(1)  # what is drawn on the way
    return model, loss


def trained(program, policy, style, dtype, make=torch.optim.SGD):
    """Train one step; return by name the loss, what else came with it and gradients, and what the model holds then."""
    model, loss_of = built(program, dtype)
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=2.0**-5)
    begin = mezzo.attach if style == "attach" else mezzo.MixedPrecision
    with closing(begin(model, optimizer, policy)) as amp:
        if style == "attach":
            results = loss_of()
        else:
            with amp.autocast():
                results = loss_of()
        loss, *others = results if isinstance(results, tuple) else (results,)
        loss.backward() if style == "attach" else amp.backward(loss)
        results = {"loss": loss.detach()} | {f"{number}": other.detach() for number, other in enumerate(others, 1)}
        grads = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
        results |= {f"{name}.grad": grad.to(model.get_parameter(name).dtype, copy=True) for name, grad in grads.items()}
        optimizer.step() if style == "attach" else amp.step()
        return results, {name: tensor.detach().clone() for name, tensor in tensors_of(model)}


def tensors_of(model):
    return [*model.named_parameters(), *model.named_buffers()]


def bits(tensor):
    return tensor.flatten().contiguous().view(torch.uint8)


def differing(one, two, dtype=BF16):
    """Return the names of what differs in a bit; FP16's halves keep weights below 2⁻¹⁶ within 2⁻⁴⁰."""
    assert {name: value.dtype for name, value in one.items()} == {name: value.dtype for name, value in two.items()}
    names = []
    for name, mine in one.items():
        theirs = two[name]
        if dtype == FP16 and mine.dtype == torch.float32:
            is_small = (mine.abs() < 2.0**-16) & ((mine.double() - theirs.double()).abs() <= 2.0**-40)
            mine = mine.where(~is_small, theirs)
        if not torch.equal(bits(mine), bits(theirs)):
            names.append(name)
    return names


@pytest.mark.parametrize("program, arithmetic, style", [*cases()])
def test_o2_trains_what_o1_trains(program, arithmetic, style):
    dtype = dtype_of(arithmetic)
    (results, kept), (wanted, whole) = (
        trained(program, f"{level},{ARITHMETICS[arithmetic]}", style, dtype) for level in ("O2", "O1")
    )
    assert all(value.isfinite().all() for value in wanted.values())
    assert any(value.count_nonzero() for name, value in wanted.items() if name.endswith(".grad"))
    assert differing(results, wanted) == []
    assert differing(kept, whole, dtype) == []


#: A complex weight, and a sparse gradient.
NOT_OURS = {"complex_parameters", "gradients_that_are_sparse"}


@pytest.mark.parametrize("program", [name for name in ZOO if name not in NOT_OURS and "compiled" not in name])
@pytest.mark.parametrize("arithmetic", ["bf16 emulated", "fp16 emulated"])
def test_so_does_it_with_an_optimizer_of_mezzo_s_and_gradients_of_16_bits(program, arithmetic):
    """Of weights that a product alone has read, once: FP32 would hold the same numbers."""
    dtype = dtype_of(arithmetic)
    (results, kept), (wanted, whole) = (
        trained(program, f"{level},{ARITHMETICS[arithmetic]}", "five lines", dtype, mezzo.optim.SGD)
        for level in ("O2", "O1")
    )
    assert differing(results, wanted) == []
    assert differing(kept, whole, dtype) == []


@each_program
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_weights_of_products_lie_in_halves_and_all_else_in_fp32(program, dtype):
    model, _ = built(program, dtype)
    before = {name: tensor.dtype for name, tensor in tensors_of(model)}
    handle = mezzo.prepare(model, mezzo.Policy.O2(dtype))
    params = dict(model.named_parameters())
    for name, tensor in tensors_of(model):
        assert tensor.dtype == before[name], name
        assert isinstance(tensor, nn.Parameter) == (name in params), name
        in_halves = name in params and tensor.dtype == torch.float32 and sum(size > 1 for size in tensor.shape) > 1
        assert isinstance(tensor, Halves) == in_halves, name
        if in_halves:
            assert (tensor.hi.dtype, tensor.lo.dtype) == (dtype, torch.int16), name
            assert tensor.hi.shape == tensor.lo.shape == tensor.shape, name
    handle.remove()
    assert not any(isinstance(tensor, Halves) for _, tensor in tensors_of(model))


def copies_of_weights(level):
    """Count what a forward pass copies or casts of the size of a weight: no input or activation has one."""
    model, loss_of = built("attention_of_torch", BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes = [[*p.shape] for p in model.parameters() if p.dim() == 2]
    with closing(mezzo.MixedPrecision(model, optimizer, f"{level},dtype=bfloat16,emulate=false")) as amp:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen, amp.autocast():
            loss_of()
        num_copies = sum(event.name == "aten::copy_" and event.input_shapes[0] in shapes for event in seen.events())
        del seen  # it refers to the weights, which could not be stored plainly again
        return num_copies


def test_a_weight_is_cast_by_no_kernel():
    assert (copies_of_weights("O1"), copies_of_weights("O2")) == (5, 0)


@pytest.mark.parametrize("arithmetic", ["bf16 emulated", "fp16 emulated"])
def test_penalties_are_those_of_o1(arithmetic):
    """By ``amp.grad``, between two regions."""
    runs = []
    for level in ("O2", "O1"):
        model, _ = built("penalty_on_slopes", dtype_of(arithmetic))
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), data(4, 6).requires_grad_()
        with closing(mezzo.MixedPrecision(model, optimizer, f"{level},{ARITHMETICS[arithmetic]}")) as amp:
            with amp.autocast():
                out = model(x)
            (slope,) = amp.grad(out, x, grad_outputs=torch.ones_like(out), create_graph=True)
            amp.backward(out.float().mean() + (slope.norm(dim=1) - 1).square().mean())
            runs.append({name: p.grad.clone() for name, p in model.named_parameters()} | {"slope": slope.detach()})
    assert runs[1]["slope"].count_nonzero()
    assert differing(*runs) == []
