"""``Halves``, the tensor: whatever is done to it, beside a plain FP32 parameter to which the same is done."""

import copy
import ctypes
import re
import threading

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import MezzoError, NumericsError, UnsupportedError
from mezzo.weights import Halves, decode, encode
from mezzo.weights.models import store, store_plainly

from .values import BF16, FP16, LOW, low_of, numbers, on_grid, same

aten = torch.ops.aten
each_dtype = pytest.mark.parametrize("dtype", LOW, ids=str)


def made(shape=(6, 8), seed=0):
    return nn.Parameter(on_grid(shape, seed))


def in_halves(param, dtype=BF16):
    store({param: dtype}, {param: "layer.weight"})
    return param


def pair(shape=(6, 8), dtype=BF16):
    """A plain parameter, and one that is stored in halves, of the same values."""
    return made(shape), in_halves(made(shape), dtype)


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def assert_alike(one, two):
    one, two = plain(one), plain(two)
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, list):
        assert len(one) == len(two)
        for parts in zip(one, two, strict=True):
            assert_alike(*parts)
    else:
        assert one == two


# Storing ----------------------------------------------------------------------------------------------------


@each_dtype
def test_a_parameter_stays_the_object_that_it_is_and_comes_back_bit_for_bit(dtype):
    values = numbers(dtype)
    param = nn.Parameter(values.clone())
    param.note, calls = "a program's", []
    param.register_hook(lambda gradient: calls.append("hook"))
    before = id(param)
    in_halves(param, dtype)
    assert isinstance(param, Halves)
    assert isinstance(param, nn.Parameter)
    assert (id(param), param.dtype, param.is_leaf, param.requires_grad) == (before, torch.float32, True, True)
    assert torch.equal(param.hi, low_of(values, dtype))
    assert (param.lo.dtype, param.lo.shape, param.note) == (torch.int16, param.shape, "a program's")
    kept = decode(*encode(values, dtype))
    assert same(param.detach().clone(), kept)
    param.sum().backward()
    assert calls == ["hook"]
    assert param.grad.dtype == torch.float32
    param.register_hook(lambda gradient: calls.append("later")).remove()
    store_plainly([param])
    assert (type(param), id(param), param.note) == (nn.Parameter, before, "a program's")
    assert same(param.detach(), kept)
    param.sum().backward()
    assert calls == ["hook", "hook"]


def test_fp16_weights_beyond_its_range_are_refused_by_name_and_nothing_is_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    large = model[1].weight
    large.data[2, 2] = 70000.0
    with pytest.raises(MezzoError, match=r"1\.weight"):
        mezzo.prepare(model, "O2,dtype=float16,emulate=true")
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    with pytest.raises(NumericsError, match=r"head\.weight"):
        Halves.of(large, FP16, name="head.weight")
    assert not Halves.of(large, BF16).isinf().any()


def test_no_name_of_ours_hides_one_of_torchs():
    ours = {"__slots__", "data", "data_ptr", "is_shared", "numpy", "share_memory_", "storage", "tolist"}
    assert {name for name in vars(Halves) if not name.startswith("_")} & {*dir(torch.Tensor)} <= ours


def test_its_class_makes_a_plain_parameter_of_a_plain_tensor():
    """``type(param)(tensor, requires_grad)``, as libraries that move models spell it."""
    _, weight = pair()
    for args, kwargs in (((torch.ones(2),), {"requires_grad": False}), ((torch.ones(2), False), {})):
        param = type(weight)(*args, **kwargs)
        assert (type(param), param.requires_grad) == (nn.Parameter, False)


# The cast -----------------------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@each_dtype
def test_a_cast_is_the_high_half_and_a_copy_of_its_own(dtype):
    _, weight = pair(dtype=dtype)
    before = weight.hi.clone()
    for cast in (weight.to(dtype), weight.detach().to(dtype), weight.type(dtype), weight.to(dtype, copy=True)):
        assert type(cast) is torch.Tensor
        assert torch.equal(cast, before)
        with torch.no_grad():
            cast.add_(1)  # the cast's own
    assert torch.equal(weight.hi, before)
    kept = weight.to(dtype)
    with torch.no_grad():
        weight.add_(1)  # and the weight's
    assert torch.equal(kept, before)
    assert torch.equal(weight.to(dtype), weight.hi)


def test_casts_to_other_dtypes_cast_the_value():
    param, weight = pair()
    with torch.no_grad():
        for tensor in (param, weight):
            tensor.add_(2**-12)
    for dtype in (torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64):
        assert_alike(param.to(dtype), weight.to(dtype))
    assert weight.float() is weight


def test_a_cast_of_a_view_is_the_high_half_of_the_view():
    _, weight = pair()
    assert torch.equal(weight.t()[2:5].to(BF16), weight.hi.t()[2:5])


# Operations -------------------------------------------------------------------------------------------------


def views_of_views_while_wide(w):
    c = torch.view_as_complex(w.view(6, 4, 2))
    v = w[1:4][:, 2:]
    v.mul_(3)
    u = v.t()[1]
    u.add_(1)
    c.mul_(2)
    w[0].zero_()
    return c, v, u, w * 1


def data_of_data(w):
    one = w.data
    two = one.data
    two[2:].data.mul_(2)
    one.add_(1)
    return one, two


def other_memory(w):
    x = torch.arange(48.0).view(6, 8)
    w.data = x
    x.add_(1)
    w.data.mul_(2)
    return x, w[2], w.t()[1:]


def other_memory_and_back(w):
    old = w.data
    w.data = torch.ones(6, 8)
    w.mul_(3)
    w.data = old
    w.add_(1)
    return old, old[1]


def part_of_other_memory(w):
    x = torch.arange(100.0)
    w.data = x[10:58].view(6, 8)
    w[1:3].add_(1)
    x.mul_(2)
    return x, w[1:3]


def other_memory_of_a_part(w):
    part = w.data[2:4]
    part.data = torch.arange(16.0).view(2, 8)
    return part[1], part, w


def two_lists(w):
    torch._foreach_add_([w, w[1], w.t()[3]], 1.0)
    torch._foreach_copy_([w[0], w[2]], [w[4], torch.ones(8)])
    return torch._foreach_mul([w, torch.ones(3)], [2.0, 3.0])


def set_items(w):
    w[1:3, ::2] = 5.0
    w[w < 0] = 0.0
    w[torch.tensor([4, 5]), torch.tensor([0, 7])] = torch.tensor([1.5, 2.5])
    w[0] = w[1]


#: What a program may do; what it returns, and what the parameter holds then, are compared.
PROGRAMS = {
    "views of views": views_of_views_while_wide, "data of data": data_of_data, "other memory": other_memory,
    "other memory and back": other_memory_and_back, "part of other memory": part_of_other_memory,
    "other memory of a part": other_memory_of_a_part, "lists of aliases": two_lists, "items": set_items,
    "expand": lambda w: w[:1].expand(3, 8) + 0, "unfold": lambda w: w.unfold(1, 3, 2) * 2,
    "as_strided": lambda w: w.as_strided((3, 3), (8, 2), 1).mul_(2),
    "as_strided of a view": lambda w: w[2:].as_strided((3, 3), (8, 2), 1).add_(2),
    "diagonal": lambda w: w.diagonal().fill_(3), "transpose": lambda w: w.swapdims(0, 1).mul_(2),
    "flat": lambda w: w.view(-1)[3:7].mul_(0), "reshape": lambda w: w.reshape(8, 6).add_(1),
    "reshape that copies": lambda w: w.t().reshape(6, 8).add_(1), "ravel": lambda w: w.ravel().add_(1),
    "split": lambda w: [part.mul_(i + 1) for i, part in enumerate(w.split(2))],
    "sections": lambda w: aten.split_with_sizes(w, [2, 4])[1].add_(1), "chunk": lambda w: w.chunk(3, 1),
    "unbind": lambda w: [row.add_(1) for row in w], "tensor_split": lambda w: w.tensor_split(4),
    "narrow": lambda w: w.narrow(0, 1, 2).fill_(1), "movedim": lambda w: w.movedim(0, 1).zero_(),
    "view_as": lambda w: w.view_as(w).add_(1), "alias": lambda w: aten.alias(w).add_(1),
    "detach": lambda w: w.detach().add_(1), "detach_": lambda w: w.detach_().add_(1),
    "of one element": lambda w: w[0, 0].mul_(3), "of none": lambda w: w[:0].add_(1),
    "view_copy": lambda w: aten.view_copy(w, (8, 6)), "select_scatter": lambda w: w.select_scatter(torch.ones(8), 0, 1),
    "slice_scatter": lambda w: w.slice_scatter(torch.ones(2, 8), 0, 1, 3),
    "diagonal_scatter": lambda w: w.diagonal_scatter(torch.ones(6)),
    "as_strided_scatter": lambda w: w.as_strided_scatter(torch.ones(2, 2), (2, 2), (8, 1)),
    "out": lambda w: torch.add(torch.ones(6, 8), 1.5, out=w), "out of a view": lambda w: torch.add(w[1], 1.5, out=w[2]),
    "out of a product": lambda w: torch.mm(torch.ones(6, 4), torch.ones(4, 8), out=w),
    "two outs": lambda w: torch.sort(w.clone(), out=(w, torch.empty(6, 8, dtype=torch.int64))),
    "out of itself": lambda w: torch.cumsum(w, 0, out=w), "plain out": lambda w: torch.mul(w, 2, out=torch.empty(6, 8)),
    "scatter_": lambda w: w.scatter_(0, torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8)),
    "index_add_": lambda w: w.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 8)),
    "index_put_": lambda w: w.index_put_((torch.tensor([1, 1]),), torch.ones(8), accumulate=True),
    "masked_fill_": lambda w: w.masked_fill_(w > 0, 7.0), "put_": lambda w: w.put_(torch.tensor([9]), torch.ones(1)),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1), "renorm_": lambda w: w.renorm_(2, 0, 0.1),
    "lerp_": lambda w: w.lerp_(torch.ones(6, 8), 0.5),
    "addcmul_": lambda w: w.addcmul_(w, w.data), "cumsum_": lambda w: w.cumsum_(0), "add_ itself": lambda w: w.add_(w),
    "copy_ of its own": lambda w: w[:3].copy_(w[3:]), "copy_ float64": lambda w: w.copy_(torch.ones(6, 8).double() / 3),
    "copy_ that broadcasts": lambda w: w.copy_(torch.arange(8)), "copy_ to plain": lambda w: torch.ones(6, 8).copy_(w),
    "copy_ to low": lambda w: torch.ones(6, 8, dtype=BF16).copy_(w), "fill_": lambda w: w.fill_(float("inf")),
    "fill_ with NaN": lambda w: w.fill_(float("nan")), "plain, in place": lambda w: torch.ones(6, 8).add_(w),
    "normal_": lambda w: w.normal_(), "uniform_": lambda w: w.uniform_(), "random_": lambda w: w.random_(0, 10),
    "bernoulli_": lambda w: w.bernoulli_(0.3), "exponential_": lambda w: w.exponential_(),
    "a generator": lambda w: w.t()[1:].normal_(generator=torch.Generator().manual_seed(3)),
    "dropout, in place": lambda w: functional.dropout(w, 0.5, inplace=True), "relu_": lambda w: torch.relu_(w),
    "rand_like": lambda w: torch.rand_like(w), "multinomial": lambda w: torch.multinomial(w.abs(), 2),
    "ints": lambda w: w.view(torch.int32).bitwise_and_(-65536), "ints, read": lambda w: w.view(torch.int32),
    "ints of a view": lambda w: w[2:4].t()[1:].contiguous().view(torch.int32), "shorts": lambda w: w.view(torch.int16),
    "complex": lambda w: w.view(torch.complex64), "complex and back": lambda w: torch.view_as_real(
        torch.view_as_complex(w.view(6, 4, 2))).mul_(2), "negated view": lambda w: torch._neg_view(w.detach()),
    "products": lambda w: (w @ torch.ones(8, 2), torch.ones(2, 6) @ w, torch.einsum("ij,ij->i", w, w)),
    "cat": lambda w: torch.cat([w, torch.ones(1, 8), w]), "stack": lambda w: torch.stack([w, w]),
    "bmm": lambda w: torch.bmm(w.expand(2, 6, 8), w.t().expand(2, 8, 6)), "qr": lambda w: torch.linalg.qr(w),
    "where": lambda w: torch.where(w > 0, w, 0.0), "comparisons": lambda w: (w == w, w > 0, torch.equal(w, w.clone())),
    "topk": lambda w: w.topk(3), "norm": lambda w: (w.norm(), torch._foreach_norm([w])), "flip": lambda w: w.flip(0),
    "rows": lambda w: w[torch.tensor([1, 2])], "gather": lambda w: w.gather(0, torch.zeros(1, 8, dtype=torch.int64)),
    "take": lambda w: w.take(torch.tensor([1, 9])), "index_select": lambda w: w.index_select(1, torch.tensor([0, 0])),
    "embedding": lambda w: functional.embedding(torch.tensor([[1, 2]]), w),
    "embedding that renormalises": lambda w: functional.embedding(torch.tensor([[1, 2]]), w, max_norm=0.5),
    "embedding_bag": lambda w: functional.embedding_bag(torch.tensor([[1, 2]]), w),
    "to_sparse": lambda w: w.to_sparse().to_dense(), "to_mkldnn": lambda w: w.to_mkldnn().to_dense(),
    "quantised": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.quint8).dequantize(),
    "fake-quantised": lambda w: torch.fake_quantize_per_tensor_affine(w, 0.1, 0, -128, 127),
    "likes": lambda w: (torch.zeros_like(w), torch.ones_like(w, dtype=torch.float64), torch.full_like(w, 3)),
    "news": lambda w: (w.new_zeros(3), w.new_tensor([1.0]), w.new_full((2,), 3.0), w.new_ones(2, dtype=torch.int8)),
    "strides": lambda w: (w.stride(), w.t().contiguous().stride(), torch.empty_like(w.t()).stride(),
        w.view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last).stride(),
        w.view(2, 3, 2, 4).clone(memory_format=torch.channels_last).stride()),
    "facts": lambda w: (w.element_size(), w.nbytes, w.numel(), w.storage_offset(), w.is_contiguous(), w.dtype,
        w.layout, w.device, w.is_leaf, w.is_floating_point(), w.type(), w.is_sparse, w.is_pinned(), len(w)),
    "itself": lambda w: (w.contiguous() is w, w.to(torch.float32) is w, w.resolve_conj() is w, hash(w) == id(w)),
    "copies": lambda w: (w.to(torch.float32, copy=True).add_(1), torch.as_tensor(w) is w, w.clone().mul_(0)),
    "Python": lambda w: (w[0, 0].item(), float(w[1, 1]), bool(w[2, 2] > 0), w.tolist(), f"{w[0, 0]:.3f}", repr(w)),
    "a new parameter": lambda w: (nn.Parameter(w).data.add_(1), nn.Buffer(w.data)),
    "a new parameter of a part": lambda w: nn.Parameter(w.data[1:]).data.mul_(2),
    "init": lambda w: (nn.init.kaiming_uniform_(w), nn.init.xavier_normal_(w), nn.init.trunc_normal_(w)),
    "orthogonal": lambda w: nn.init.orthogonal_(w), "sparse init": lambda w: nn.init.sparse_(w, 0.3),
    "vectors": lambda w: (nn.utils.vector_to_parameters(torch.arange(48.0), [w]), nn.utils.parameters_to_vector([w])),
    "a fused kernel": lambda w: torch._fused_sgd_([w], [torch.ones(6, 8)], [], weight_decay=0.0, momentum=0.0, lr=0.1,
        dampening=0.0, nesterov=False, maximize=False, is_first_step=True),
}  # fmt: skip


def outcome(program, weight, mode):
    torch.manual_seed(0)
    with mode():
        return program(weight)


@pytest.mark.filterwarnings("ignore:Converting a tensor", "ignore:.*deprecated")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_to_halves_what_it_does_to_a_plain_parameter(name):
    for mode in (torch.no_grad, torch.inference_mode):
        param, weight = pair()
        one, two = (outcome(PROGRAMS[name], tensor, mode) for tensor in (param, weight))
        assert_alike(one, two)
        assert_alike(param, weight)
        assert weight.dtype == torch.float32


def test_what_comes_out_is_plain_but_for_views_and_moves():
    """A buffer of a program's that came in FP16 halves would be rounded."""
    weight = pair()[1].detach()
    for tensor in (
        torch.zeros_like(weight), torch.empty_like(weight), weight.new_zeros(3), weight.new_empty(2), weight.clone(),
        weight + 0, torch.cat([weight]), weight[torch.tensor([0])],
        copy.deepcopy(weight), weight.flip(0), weight.to(torch.float64), weight.to(BF16),
    ):  # fmt: skip
        assert type(tensor) is torch.Tensor
    for tensor in (weight.t(), weight[1], weight.data, weight.to("cpu", copy=True), weight.to("meta")):
        assert type(tensor) is Halves


def test_a_write_where_elements_share_memory_raises_and_writes_nothing():
    for weight in pair():
        before = weight.detach().clone()
        with pytest.raises(RuntimeError, match="single memory location"):
            weight.data[:1].expand(3, 8).add_(1)
        assert torch.equal(weight, before)


@each_dtype
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1), (3,), (2, 1, 3)], ids=str)
def test_any_shape_is_stored_read_cast_and_written(shape, dtype):
    param, weight = pair(shape, dtype)
    assert_alike(param, weight)
    assert_alike(param.to(dtype), weight.to(dtype))
    for tensor in (param, weight):
        tensor.data.view(-1).add_(1)
        tensor.data.mul_(2)
    assert_alike(param, weight)


@each_dtype
def test_large_ones_go_through_kernels_to_the_same_bits(dtype):
    values = numbers(dtype, count=1 << 18)
    weight = Halves.of(values, dtype)
    assert same(weight.clone(), decode(*encode(values, dtype)))
    other = numbers(dtype, count=1 << 18, seed=1)
    weight.copy_(other)
    assert all(map(torch.equal, (weight.hi, weight.lo), encode(other, dtype)))
    weight[::2].neg_()
    other[::2].neg_()
    assert same(weight.clone(), decode(*encode(other, dtype)))


def test_a_thread_reads_and_writes():
    param, weight = pair()
    thread = threading.Thread(target=lambda: weight.data.mul_(2))
    thread.start()
    thread.join()
    assert_alike(param.detach() * 2, weight)


# Gradients, versions and modes ----------------------------------------------------------------------------------


def linear(weight, x, dtype=BF16):
    with torch.autocast("cpu", dtype=dtype):
        return functional.linear(x, weight)


def edits(weight):
    return {
        "mul_": lambda: weight.mul_(2), "data": lambda: weight.data.mul_(2), "view": lambda: weight.view(-1).mul_(2),
        "copy_": lambda: weight.copy_(torch.ones(6, 8)), "foreach": lambda: torch._foreach_mul_([weight], 2.0),
        "out": lambda: torch.add(torch.ones(6, 8), 1, out=weight),
        "memory": lambda: setattr(weight, "data", weight * 2),
        "items": lambda: weight.__setitem__(0, 1.0), "init": lambda: nn.init.constant_(weight, 0.3),
        "bits": lambda: weight.view(torch.int32).zero_(),
    }  # fmt: skip


@pytest.mark.parametrize("name", edits(torch.ones(1)))
def test_an_edit_between_forward_and_backward_leaves_the_graph_its_old_values(name):
    """As torch.amp does, whose graph has a copy."""
    seen = []
    for weight in pair():
        x = on_grid((3, 8), 1).requires_grad_()
        out = linear(weight, x)
        with torch.no_grad():
            edits(weight)[name]()
        out.float().square().sum().backward()
        seen.append((x.grad, weight.grad))
    assert_alike(*seen)


def steppers():
    return {
        "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
        "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
        "loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
        "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.1),
    }


@pytest.mark.parametrize("name", steppers())
@pytest.mark.parametrize("size", [8, 520])
def test_a_step_between_forward_and_backward_leaves_the_graph_its_old_values(name, size):
    """Kernels that write by address write the weight's memory and not the graph's."""
    seen = []
    for dtype in (None, BF16):
        weight = made((size, size))
        if dtype is not None:
            in_halves(weight, dtype)
        optimizer, x = steppers()[name]([weight]), on_grid((3, size), 1)
        gradients = []
        for _ in range(3):
            x = x.detach().requires_grad_()
            with torch.no_grad():
                weight.copy_(weight.clone().bfloat16())  # no ties: then both cast alike
            weight.grad = torch.full_like(weight, 0.5)
            out = linear(weight, x)
            optimizer.step()
            weight.grad = None
            out.float().sum().backward()
            gradients.append(x.grad)
        seen.append((gradients, weight))
    assert_alike(*seen)


def test_an_edit_of_what_a_graph_reads_in_fp32_raises_as_in_plain_torch():
    for weight in pair():
        out = weight * weight
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


WRITES = {
    "mul_": lambda w: w.mul_(2), "view": lambda w: w[1].mul_(2), "copy_": lambda w: w.copy_(w * 2),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0), "foreach copy": lambda w: torch._foreach_copy_([w], [w * 1]),
    "out": lambda w: torch.add(w.detach(), 1, out=w), "items": lambda w: w.__setitem__(0, 1.0),
    "AdamW": lambda w: torch.optim.AdamW([w]).step(), "SGD": lambda w: torch.optim.SGD([w], foreach=False).step(),
    "fused": lambda w: torch.optim.AdamW([w], fused=True).step(), "mezzo": lambda w: mezzo.optim.AdamW([w]).step(),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_each_write_raises_the_version(name):
    _, weight = pair()
    weight.grad = torch.ones(6, 8)
    for _ in range(2):
        before = weight._version
        with torch.no_grad():
            WRITES[name](weight)
        assert weight._version > before


def test_a_leaf_that_trains_is_not_written_while_gradients_are_recorded():
    for weight in pair():
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            weight.mul_(2)
    for weight in pair():
        weight.requires_grad_(False)
        weight.mul_(2)


def test_what_inference_mode_leaves_trains_on():
    seen = []
    for weight in pair():
        with torch.inference_mode():
            out = functional.linear(torch.ones(2, 8), weight)
            flags = [tensor.is_inference() for tensor in (out, weight.view(-1), weight.data, weight + 1, weight[1])]
            view = weight[1:]
        view.data.mul_(2)
        out = functional.linear(torch.ones(2, 8), weight) + (weight * weight).sum()
        out.sum().backward()
        seen.append((flags, weight.grad, out))
    assert_alike(*seen)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # which torch's own forward derivatives are written in
def test_double_backward_and_forward_gradients():
    seen = []
    for weight in pair():
        (first,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(weight, torch.ones(6, 8))
            tangent = torch.autograd.forward_ad.unpack_dual(dual.sin() * dual).tangent
        seen.append((first, second, tangent))
    assert_alike(*seen)


# What has no memory -----------------------------------------------------------------------------------------------


def test_numpy_reads_and_cannot_write():
    param, weight = pair()
    for array in (weight.detach().numpy(), numpy.asarray(weight.detach()), weight.numpy(force=True)):
        assert numpy.array_equal(array, param.detach().numpy())
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 1
    with pytest.raises(RuntimeError, match=re.escape("detach().numpy()")):
        weight.numpy()


@pytest.mark.parametrize("part", [False, True])
def test_whoever_wants_memory_is_refused_with_the_parameter_and_a_cure(part):
    _, weight = pair()
    asked = weight.data[1:] if part else weight
    with pytest.raises(UnsupportedError, match=r"layer\.weight") as refused:
        torch.from_dlpack(asked.detach())
    assert "fp32_param=layer.weight" in str(refused.value)
    assert "keep_fp32(params=['layer.weight'])" in str(refused.value).replace('"', "'")
    with pytest.raises(RuntimeError):  # torch's own words: it would be read in C++
        torch.utils.dlpack.to_dlpack(asked.detach())
    with pytest.raises(RuntimeError):
        asked.untyped_storage().data_ptr()


@pytest.mark.parametrize("part", [False, True])
def test_a_reader_of_addresses_is_lent_fp32_memory_until_the_next_cast(part):
    """Kernels of others (Triton's, by ctypes) read and write there, and to others it is a key."""
    param, weight = pair()
    asked, plain = (weight.data[1:], param.data[1:]) if part else (weight, param.data)
    address = asked.data_ptr()
    assert address == asked.data_ptr() != pair()[1].data_ptr()
    there = numpy.frombuffer((ctypes.c_float * asked.numel()).from_address(address), dtype=numpy.float32)
    assert numpy.array_equal(there.reshape(asked.shape), plain.numpy())
    there *= 2
    with torch.no_grad():
        plain.mul_(2)
        assert torch.equal(weight + 0, param + 0)
    del there
    low = weight.to(torch.bfloat16)
    assert weight.cell.decoded is None
    assert torch.equal(low, weight.hi)
    assert torch.equal(weight.detach().clone(), param)


def test_while_its_values_lie_in_fp32_there_is_an_address():
    _, weight = pair()
    memory = torch.ones(6, 8)
    weight.data = memory
    assert weight.data_ptr() == memory.data_ptr()
    assert weight[1].data_ptr() == memory[1].data_ptr()


RESHAPES = {
    "t_": lambda w: w.t_(), "unsqueeze_": lambda w: w.unsqueeze_(0), "resize_": lambda w: w.resize_(3, 3),
    "set_": lambda w: w.set_(torch.ones(3)), "as_strided_": lambda w: w.as_strided_((2, 2), (1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", RESHAPES)
def test_another_shape_in_place_is_refused(name):
    param, weight = pair()
    with pytest.raises(UnsupportedError, match="another shape in place"):
        RESHAPES[name](weight.data)
    assert_alike(param, weight)


def test_an_out_of_another_shape_raises_and_writes_nothing():
    param, weight = pair()
    with pytest.raises(RuntimeError), pytest.warns(UserWarning, match="output with one or more elements was resized"):
        torch.add(torch.ones(3, 3), 1, out=weight.data)
    assert_alike(param, weight)


# Operators of others ----------------------------------------------------------------------------------------------


@torch.library.custom_op("mezzo_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert type(weight) is torch.Tensor
    return x @ weight


@torch.library.custom_op("mezzo_tests::scale_", mutates_args=("weight",))
def scale_(weight: torch.Tensor, by: float) -> None:
    assert weight.data_ptr()
    weight.mul_(by)


def test_an_operator_that_is_declared_as_torch_compile_wants_it_reads_and_writes_what_it_says():
    seen = []
    for weight in pair():
        version = weight._version
        with torch.no_grad():
            scale_(weight, 2.0)
            scale_(weight[1], 3.0)
        assert weight._version > version
        seen.append((scaled(torch.ones(2, 6), weight.detach()), weight))
    assert_alike(*seen)


def test_any_other_operator_is_refused_since_it_might_write_in_secret():
    library = torch.library.Library("mezzo_tests_old", "DEF")
    library.define("secretly(Tensor weight) -> Tensor")
    library.impl("secretly", lambda weight: weight.mul_(2) + 0, "CPU")
    param, weight = pair()
    with pytest.raises(UnsupportedError, match=r"mezzo_tests_old.secretly") as refused:
        torch.ops.mezzo_tests_old.secretly(weight.detach())
    assert "fp32_param=layer.weight" in str(refused.value)
    assert_alike(param, weight)


# Formats ------------------------------------------------------------------------------------------------------------


def test_fp16_writes_never_ask_the_host():
    """A step's writes, of values beyond its range too, which become infinite."""
    _, weight = pair(dtype=FP16)
    weight.grad = torch.ones(6, 8)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with Launches() as launches, torch.no_grad():
        weight.mul_(1.5)
        weight.copy_(torch.full((6, 8), 70000.0))
        weight[1].fill_(1.0)
        optimizer.step()
    assert not {name for name in launches.names if "local_scalar" in name or "item" in name}
    assert weight[0].isinf().all()
    assert torch.equal(weight[1].detach().clone(), torch.full((8,), 1.0) - 0.1)


def test_fp16_keeps_small_values_within_2_to_the_minus_40():
    values = numbers(FP16)
    weight = Halves.of(values, FP16)
    difference = (weight.double() - values.double()).abs()
    assert (difference[values.abs() >= 2.0**-16] == 0).all()
    assert (difference <= 2.0**-40).all()
    weight.neg_()
    assert (weight.double() + values.double()).abs().max() <= 2.0**-40
