"""Emulation by family: where one kind of product is slow or not right, that one alone computes in FP32."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.cast.device import FAMILIES, Claim, DeviceReport, FamilySupport, FormatSupport, arithmetic, decide
from mezzo.cast.device.probing import FORMATS
from mezzo.cast.emulate import EMULATED, family_of
from mezzo.errors import UnsupportedError
from mezzo.tensors import dtype_name, tensors

from ..support.processors import has_low_lstm
from ..support.refusals import refused
from .models import assert_same

LOW = torch.bfloat16
ATEN = torch.ops.aten
#: What multiplies and adds up, forward and backward.
KERNELS = (
    ATEN.mm, ATEN.bmm, ATEN.addmm, ATEN.baddbmm, ATEN.convolution, ATEN.convolution_backward,
    ATEN._scaled_dot_product_flash_attention_for_cpu, ATEN._scaled_dot_product_flash_attention_for_cpu_backward,
    ATEN.mkldnn_rnn_layer, ATEN.mkldnn_rnn_layer_backward, ATEN._embedding_bag, ATEN._embedding_bag_dense_backward,
)  # fmt: skip


class Kernels(TorchDispatchMode):
    """Collect the floating dtypes of what products read first: attention keeps sums of its own in FP32."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    @classmethod
    def is_infra_mode(cls):
        return True  # torch.compile refuses to run under any other

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in KERNELS:
            self.dtypes.add(dtype_name(next(x.dtype for x in tensors(args) if x.is_floating_point())))
        return func(*args, **kwargs or {})


HAS = Claim(has=("it",), words="it has it")
RIGHT = FamilySupport(status="right", detail="as told", claim=HAS)
SLOW = dataclasses.replace(RIGHT, speed_ratio=0.1)
WRONG, UNSUPPORTED, DEAD = (dataclasses.replace(RIGHT, status=status) for status in ("wrong", "unsupported", "dead"))
WHY = "it was measured at 0.1 times float32's speed (as told), although it has it"


@pytest.fixture
def probed(monkeypatch):
    """Return a function that tells what a processor is in each format: right and fast but for what is said."""
    monkeypatch.setattr(decide, "_said", set())

    def tell(**families):
        support = dict.fromkeys(FAMILIES, RIGHT) | families
        formats = dict.fromkeys(FORMATS, FormatSupport(families=support))
        monkeypatch.setitem(
            decide._reports,
            "cpu",
            DeviceReport(device_type="cpu", name="a CPU", formats=formats, needs_isa_limit=False),
        )

    return tell


def drawn(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def layer(layer_class, *sizes):
    torch.manual_seed(0)
    made = layer_class(*sizes)
    return lambda x: made(x)[0]


#: Some ops of each family, and what they read.
OPS = {
    "linear": ("products", functional.linear, [(4, 16), (8, 16), (8,)]),
    "matmul": ("products", lambda a, b: a @ b, [(4, 16), (16, 8)]),
    "einsum": ("products", lambda a, b: torch.einsum("ij,jk->ik", a, b), [(4, 16), (16, 8)]),
    "tensordot": ("products", lambda a, b: torch.tensordot(a, b, 1), [(4, 16), (16, 8)]),
    "matrix_power": ("products", lambda a: torch.linalg.matrix_power(a / 8, 3), [(8, 8)]),
    "conv2d": ("convolution", functional.conv2d, [(2, 4, 8, 8), (6, 4, 3, 3), (6,)]),
    "conv_transpose1d": ("convolution", functional.conv_transpose1d, [(2, 4, 8), (4, 6, 3)]),
    "attention": ("attention", functional.scaled_dot_product_attention, [(1, 2, 8, 16)] * 3),
    "lstm": ("recurrent", layer(nn.LSTM, 8, 8), [(5, 2, 8)]),
    "gru": ("recurrent", layer(nn.GRU, 8, 8), [(5, 2, 8)]),
    "lstm cell": ("recurrent", layer(nn.LSTMCell, 8, 8), [(2, 8)]),
}


def run(context, function, inputs):
    """The result and the gradients, the dtypes of products, and how much stays FP32."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    with Kernels() as kernels:
        with context:
            out = function(*leaves)
        gradients = torch.autograd.grad(out.float().square().sum(), leaves)
    return [out, *gradients], kernels.dtypes


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("slow", FAMILIES)
def test_a_family_that_is_slow_is_emulated_and_no_other(probed, slow, level):
    probed(**{slow: SLOW})
    for dtype in FORMATS:
        region = mezzo.autocast(getattr(mezzo.Policy, level)(dtype), "cpu")
        assert region.emulated
        assert region.region.per_device[0].emulated == {slow}
        for name, (family, function, shapes) in OPS.items():
            if (level != "O1" and family == "recurrent") or name == "tensordot":
                continue  # whose weights a handle would store low; whose operands are promoted, and not cast
            inputs = [x if level == "O1" else x.to(dtype) for x in drawn(*shapes)]
            outputs, dtypes = run(region, function, inputs)
            assert dtypes == {"float32" if family == slow else dtype_name(dtype)}, name
            assert outputs[0].dtype == dtype, name


@pytest.mark.parametrize("slow", FAMILIES)
def test_a_native_family_keeps_torchs_own_dtypes_and_bits(probed, slow):
    """In a region with a mode, which torch alone has not: states of recurrent layers, composites, promotions."""
    probed(**{slow: WRONG})
    region = mezzo.autocast(mezzo.Policy.O1(LOW, lists="device"), "cpu")
    for name, (family, function, shapes) in OPS.items():
        if name == "lstm" and not has_low_lstm():
            continue
        inputs = drawn(*shapes)
        mine, _ = run(region, function, inputs)
        theirs, dtypes = run(torch.autocast("cpu", dtype=LOW), function, inputs)
        assert dtypes == {"bfloat16"}, name
        assert [x.dtype for x in mine] == [x.dtype for x in theirs], name
        if family != slow:
            assert_same(mine, theirs)


def test_what_is_emulated_is_part_of_what_regions_are_kept_by(probed):
    keys = set()
    for slow in ({}, {"convolution": SLOW}, {"attention": SLOW}, {"convolution": SLOW, "attention": SLOW}):
        probed(**slow)
        region = mezzo.autocast("O1,dtype=bfloat16", "cpu").region
        assert region.per_device[0].emulated == set(slow)
        assert region.emulated == bool(slow)
        keys.add(region.keys)
    assert len(keys) == 4
    probed()
    assert not mezzo.autocast("O1,dtype=bfloat16,lists=device", "cpu").has_differences


def test_false_refuses_what_is_not_right_and_true_emulates_all(probed):
    probed(convolution=SLOW)
    assert {choice.action for choice in arithmetic(LOW, "cpu", False).values()} == {"native"}
    assert {choice.action for choice in arithmetic(LOW, "cpu", True).values()} == {"emulate"}
    probed(recurrent=UNSUPPORTED, attention=WRONG)
    why = "bfloat16 in attention on this cpu is wrong (as told); bfloat16 in recurrent on this cpu is unsupported"
    with refused(UnsupportedError, "bfloat16 cannot be computed natively on this cpu: attention, recurrent\n", why):
        arithmetic(LOW, "cpu", False)


def test_what_is_wrong_is_said_and_what_is_slow_or_missing_is_not(probed, caplog):
    probed(convolution=SLOW, recurrent=UNSUPPORTED)
    choices = arithmetic(LOW)
    assert [choices[family].action for family in FAMILIES] == ["native", "emulate", "native", "emulate"]
    assert choices["convolution"].reason == f"bfloat16 in convolution on this cpu is slow: {WHY}"
    assert not caplog.records
    probed(convolution=WRONG, attention=WRONG)
    arithmetic(LOW)
    (record,) = caplog.records
    assert record.getMessage().startswith("bfloat16 is emulated in convolution and attention on this cpu\n")


def test_a_death_is_the_whole_devices_and_what_its_cure_leaves_wrong_is_emulated(probed, monkeypatch):
    cured = dataclasses.replace(DEAD, is_cured=True)
    slow = dataclasses.replace(cured, speed_ratio=0.1)
    probed(products=cured, convolution=cured, attention=DEAD, recurrent=slow)
    monkeypatch.setattr(decide, "_revived", {})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    for survives, actions in ((True, ["native", "native", "emulate", "emulate"]), (False, ["emulate"] * 4)):
        monkeypatch.setattr(decide, "_revived", {})
        monkeypatch.setattr(decide, "survives_here", lambda dtype, survives=survives: survives)
        assert [choice.action for choice in arithmetic(LOW).values()] == actions
        lacking = ": attention\n" if survives else "\n"
        with refused(UnsupportedError, f"bfloat16 cannot be computed natively on this cpu{lacking}"):
            arithmetic(LOW, "cpu", False)


def test_a_pin_inside_emulates_what_the_region_around_it_does(probed):
    probed(convolution=SLOW)

    @mezzo.low
    def pinned(x, image, kernel):
        return x.softmax(-1) @ x.mT, functional.conv2d(image, kernel)

    x, image, kernel = drawn((4, 4), (1, 4, 8, 8), (6, 4, 3, 3))
    for emulate, product, convolution in (
        ("auto", LOW, torch.float32),
        (True,) + (torch.float32,) * 2,
        (False, LOW, LOW),
    ):
        for given, wanted in (((x, image, kernel), {product, convolution}),):
            with Kernels() as kernels, mezzo.autocast(mezzo.Policy.O1(LOW, emulate=emulate), "cpu"):
                out = pinned(*given)
            assert {result.dtype for result in out} == {LOW}
            assert kernels.dtypes == {dtype_name(of_operand) for of_operand in wanted}, emulate


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_compiled_code_emulates_the_same_family(probed):
    probed(convolution=SLOW)
    region = mezzo.autocast("O1,dtype=bfloat16", "cpu")

    def both(image, kernel, weight):
        return functional.linear(functional.conv2d(image, kernel).flatten(1), weight)

    def inside(*given):
        with mezzo.autocast("O1,dtype=bfloat16", "cpu"):
            return both(*given)

    inputs = drawn((2, 4, 8, 8), (6, 4, 3, 3), (8, 216))
    torch.compiler.reset()
    eager, dtypes = run(region, both, inputs)
    assert dtypes == {"float32", "bfloat16"}
    for function, context in ((both, region), (inside, torch.enable_grad())):
        outputs, dtypes = run(context, torch.compile(function, backend="aot_eager", fullgraph=True), inputs)
        assert dtypes == {"float32", "bfloat16"}
        assert_same(outputs, eager)
    probed()  # as after a refreshed probe: what was compiled is not used again
    native = mezzo.autocast("O1,dtype=bfloat16", "cpu")
    assert run(native, torch.compile(both, backend="aot_eager"), inputs)[1] == {"bfloat16"}


def test_a_session_and_an_explanation_say_which_family(probed):
    probed(convolution=SLOW)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(288, 8))
    explanation = mezzo.explain(model, torch.ones(2, 4, 8, 8), "O1,dtype=bfloat16")
    assert {row.op: row.emulated for row in explanation.rows if row.op in EMULATED} == {"conv2d": True, "linear": False}
    why = f"bfloat16 in convolution on this cpu is slow: {WHY}"
    assert [dataclasses.astuple(family) for family in explanation.emulated] == [("convolution", why)]
    assert f"convolution emulated in FP32 ({why}), torch" in " ".join(str(explanation).split())
    assert explanation.to_dict()["emulated"] == [{"family": "convolution", "why": why}]
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1,dtype=bfloat16")
    assert amp.emulated
    linear = mezzo.explain(nn.Linear(8, 8), torch.ones(2, 8), "O1,dtype=bfloat16")
    assert linear.emulated == ()
    assert "native arithmetic" in str(linear)


def test_a_plan_emulates_the_same_family(probed):
    probed(convolution=SLOW)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(288, 8))
    backend = mezzo.compile_backend("O1,bf16", inner="eager")
    with Kernels() as kernels:
        torch.compile(model, backend=backend)(torch.ones(2, 4, 8, 8)).sum().backward()
    assert backend.plans[0].emulated
    assert kernels.dtypes == {"float32", "bfloat16"}


def test_every_emulated_op_has_a_family():
    assert {family_of(op) for op in EMULATED} == set(FAMILIES)
    assert [family_of(op) for op in ("linear", "conv_tbc", "rnn_tanh_cell", "embedding_bag", "nothing")] == [
        "products", "convolution", "recurrent", "products", "products",
    ]  # fmt: skip
