"""What has no kernel in 16 bits, coordinates, and operators of other libraries, each against FP32."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import Policy, UnsupportedError

from ..support.refusals import refused
from .walked import LOW

CALLED = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double"}
low = pytest.mark.parametrize("word", LOW)


# Operators of another library, that say in what they run ------------------------------------------------

RAN = []


def kernel(*dtypes):
    """Make a kernel that adds two tensors in some dtypes, and in others says what torch's macros say."""

    def run(x, y):
        for operand in (x, y):
            if operand.dtype not in dtypes:
                raise NotImplementedError(f"\"fused_cpu\" not implemented for '{CALLED[operand.dtype]}'")
        RAN.append((x.dtype, y.dtype))
        return x + y

    return run


def define(name, run, **options):
    """Define an operator of two tensors, differentiable."""

    def fused(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return run(x, y)

    made = torch.library.custom_op(f"mezzo_tests::{name}", mutates_args=(), **options)(fused)
    made.register_fake(lambda x, y: torch.empty_like(x))
    made.register_autograd(lambda _, gradient: (gradient, gradient))
    return made


EVERY = (torch.float16, torch.bfloat16, torch.float32)
any_dtype, wide_only, none_of_both = (
    define(name, kernel(*dtypes))
    for name, dtypes in (("any_dtype", EVERY), ("wide_only", (torch.float32,)), ("none_of_both", (torch.float64,)))
)
autocasting = define("autocasting", kernel(torch.float32))
torch.library.register_autocast("mezzo_tests::autocasting", "cpu", torch.float32)


@torch.library.custom_op("mezzo_tests::writes", mutates_args=("x",))
def writes(x: torch.Tensor, y: torch.Tensor) -> None:
    RAN.append((x.dtype, y.dtype))
    x.add_(kernel(torch.float32)(x, y))


def roi_align(x, rois, scale, height, width, ratio, aligned):
    if x.dtype != torch.float32 or rois.dtype != torch.float32:
        raise NotImplementedError(f"\"roi_align_forward_kernel\" not implemented for '{CALLED[x.dtype]}'")
    return x.mean() + rois[:, :1]


@pytest.fixture
def torchvision():
    """Define one operator of torchvision's by its name, in plain Python."""
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        library.define("roi_align(Tensor x, Tensor rois, float s, int h, int w, int r, bool a) -> Tensor")
        library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
        yield lambda *args: torch.ops.torchvision.roi_align(*args)


# Coordinates ---------------------------------------------------------------------------------------------


@low
@pytest.mark.parametrize("is_image_low", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_identity_warp_is_the_image_and_theta_gets_its_gradient(word, is_image_low, level):
    torch.manual_seed(0)
    theta = torch.eye(2, 3)[None].repeat(2, 1, 1)
    image = torch.rand(2, 3, 512, 512).to(LOW[word])
    slope = torch.linspace(0, 1, 512) ** 2

    def warped(image, theta):
        grid = functional.affine_grid(theta, image.shape, align_corners=False)
        out = functional.grid_sample(image, grid, align_corners=False)
        return grid, out, torch.autograd.grad((out.float() * slope).mean(), theta)[0]

    _, _, want = warped(image.float(), theta.requires_grad_())
    with mezzo.autocast(f"{level},{word}", "cpu"):
        grid, out, gradient = warped(
            image if is_image_low else image.float(), theta.to(LOW[word]).detach().requires_grad_()
        )
    assert (grid.dtype, out.dtype) == (torch.float32, torch.float32)
    assert (out.float() - image.float()).abs().max() < 1e-3
    assert (gradient.float() - want).norm() < 0.02 * want.norm()


@low
def test_a_low_grid_is_sampled_in_fp32(word):
    """The grid itself is what the program made; what torch's low kernel did with it was foreign memory."""
    image = torch.rand(1, 3, 300, 512).to(LOW[word])
    grid = functional.affine_grid(torch.eye(2, 3)[None], image.shape, align_corners=False).to(LOW[word])
    want = functional.grid_sample(image.float(), grid.float(), align_corners=False).to(LOW[word])
    with mezzo.autocast(f"O1,{word}", "cpu"):
        got = functional.grid_sample(image, grid, align_corners=False)
    assert torch.equal(got, want)


@low
def test_counts_of_a_histogram_are_exact(word):
    x = torch.rand(5000).to(LOW[word])
    with mezzo.autocast(f"O1,{word}", "cpu"):
        assert torch.equal(torch.histc(x, 2, 0, 1), torch.histc(x.float(), 2, 0, 1))
        assert torch.equal(torch.histogram(x, 2).hist, torch.histogram(x.float(), 2).hist)


# What no row names ----------------------------------------------------------------------------------------


def operators(made):
    """The three ways to call an operator of another library."""
    name = made._opoverload._schema.name.partition("::")[2]
    return made, getattr(torch.ops.mezzo_tests, name), getattr(torch.ops.mezzo_tests, name).default


@low
def test_an_operator_without_a_low_kernel_runs_in_fp32(word):
    x = torch.rand(5).to(LOW[word]).requires_grad_()
    for call in operators(wide_only):
        RAN.clear()
        with mezzo.autocast(f"O1,{word}", "cpu"):
            out = call(x, x)
        assert (out.dtype, RAN) == (torch.float32, [(torch.float32, torch.float32)])
        assert torch.equal(out, x.float() + x.float())
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, 2))


@low
def test_what_writes_is_written_to(word):
    for policy in (f"O1,{word}", f"O1,{word},fp32=mezzo_tests::writes"):
        x, y = torch.ones(3).to(LOW[word]), torch.ones(3)
        with mezzo.autocast(policy, "cpu"):
            writes(x, y)
            out = torch.full((3,), 2.0, dtype=LOW[word])
            assert torch.special.erfcx(torch.ones(3).to(LOW[word]), out=out) is out
        assert torch.equal(x, torch.full((3,), 3.0).to(LOW[word])), policy
        assert torch.equal(out, torch.special.erfcx(torch.ones(3)).to(LOW[word]))


def test_a_second_call_is_made_of_nothing_that_writes_elsewhere():
    """Where a cast would be written to, nothing is tried: torch's words remain, and nothing is lost silently."""
    leaf = torch.ones(3, requires_grad=True)
    with mezzo.autocast("O1,bf16", "cpu"):
        with pytest.raises(RuntimeError, match="grad_dtype"):
            leaf.grad = torch.ones(3, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="divisible"):
            torch.ones(3, dtype=torch.bfloat16).view(torch.float32)
    assert leaf.grad is None


def test_other_errors_are_torch_s():
    x = torch.ones(3, dtype=torch.bfloat16)
    with mezzo.autocast("O1,bf16", "cpu"):
        for call, words in (
            (lambda: x + torch.ones(2), "must match the size"),
            (lambda: functional.cross_entropy(x[None], torch.ones(1, dtype=torch.bfloat16)), "Long"),
            (lambda: torch.index_select(torch.ones(3), 0, x), "int32 or int64"),
            (lambda: functional.embedding(x, torch.ones(3, 3)), "Long"),
        ):
            with pytest.raises(RuntimeError, match=words) as caught:
                call()
            assert not isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize("policy", ["O1,bf16,lists=device", "O3,bf16", "O0"])
def test_where_no_op_is_cast_nothing_is_tried(policy):
    x = torch.ones(3, dtype=torch.bfloat16)
    with mezzo.autocast(policy, "cpu"), pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        wide_only(x, x)


@contextmanager
def region(model, policy):
    """Run the block in the region of a prepared model."""
    prepared = mezzo.prepare(model, policy)
    with prepared.autocast():
        yield
    prepared.remove()


class Inner(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.fc, self.call = nn.Linear(4, 4), call

    def forward(self, x):
        h = self.fc(x)
        return self.call(h, h)


WITHOUT = (
    ("O1,fp16", none_of_both, "mezzo_tests::none_of_both", "float16 or float32"),
    ("O1,bf16", none_of_both, "mezzo_tests::none_of_both", "bfloat16 or float32"),
    ("O1,bf16", torch.bitwise_and, "bitwise_and", "bfloat16 or float32"),
    ("O1,fp16,low=mezzo_tests::*", wide_only, "mezzo_tests::wide_only", "float16"),
    ("O2,bf16,native=mezzo_tests::wide_only", wide_only, "mezzo_tests::wide_only", "bfloat16"),
    ("O1,bf16,low=erfcx", lambda h, _: torch.special.erfcx(h), "erfcx", "bfloat16"),
    ("O1,bf16,low=linalg_vander", lambda h, _: torch.linalg.vander(h), "linalg_vander", "bfloat16"),
)


@pytest.mark.parametrize("policy, call, op, dtypes", WITHOUT, ids=lambda x: x if isinstance(x, str) else "")
def test_no_kernel_in_any_format_is_said_with_the_op_the_module_and_the_rule(policy, call, op, dtypes):
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"deep": Inner(call)})["deep"])
    with region(model, policy):
        words = (
            f"{op} has no kernel in {dtypes}", f"where  module 1, op {op}, device cpu", "why    ",
            f'policy.fp32("{op}"), the text fp32={op}',
        )  # fmt: skip
        with refused(UnsupportedError, *words):
            model(torch.ones(2, 4))
    with mezzo.autocast(policy, "cpu"), refused(UnsupportedError, f"where  op {op}, device cpu, in a mezzo.autocast"):
        call(*[torch.ones(2, 4).to(LOW["fp16" if "fp16" in policy else "bf16"])] * 2)


def test_a_banned_op_names_its_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    words = "softmax is banned", "where  module 1, a mezzo.autocast region"
    with region(model, "O1,bf16,ban=softmax"), refused(UnsupportedError, *words):
        model(torch.ones(2, 4))


@low
def test_what_ran_in_fp32_is_explained(word):
    model = nn.Sequential(Inner(lambda x, y: wide_only(x, y)))
    explanation = mezzo.explain(model, torch.ones(2, 4), policy=f"O1,{word}")
    (row,) = (row for row in explanation.rows if row.op == "mezzo_tests::wide_only")
    assert (row.computes_in, row.treatment) == (("float32",), "fp32")
    assert "no kernel in" in str(explanation)
    assert not any(row.disagreement for row in explanation.rows)


# Rules on operators of other libraries --------------------------------------------------------------------

INSIDE = {
    "low": ("bf16", torch.bfloat16, torch.bfloat16),
    "fp32": ("fp32", torch.float32, torch.float32),
    "fp32_math": ("fp32", torch.float32, torch.bfloat16),
    "promote": ("fp32", torch.float32, torch.float32),
    "native": ("mixed", None, torch.float32),
}


@pytest.mark.parametrize("name", ["mezzo_tests::any_dtype", "mezzo_tests::*", "torch.ops.mezzo_tests.any_dtype"])
@pytest.mark.parametrize("treatment", INSIDE)
def test_a_rule_on_an_operator_holds_however_it_is_called(treatment, name):
    x, y = torch.ones(3, dtype=torch.bfloat16), torch.ones(3)
    _, inside, gives = INSIDE[treatment]
    policy = Policy.parse(f"O1,bf16,{treatment}={name}")
    assert policy.explain("mezzo_tests::any_dtype").treatment == treatment
    for call in operators(any_dtype):
        RAN.clear()
        with mezzo.autocast(policy, "cpu"):
            out = call(x, y)
        assert list(RAN) == [(inside or x.dtype, inside or y.dtype)]
        assert out.dtype == gives
        RAN.clear()
        with mezzo.autocast("O1,bf16", "cpu"):  # which no rule names
            call(x, y)
        assert list(RAN) == [(x.dtype, y.dtype)]


def test_a_rule_bans_an_operator_and_one_of_a_module_is_of_that_module():
    model = nn.Sequential(Inner(any_dtype), Inner(any_dtype))
    with region(model, "O1,bf16,fp32=mezzo_tests::any_dtype@1"):
        RAN.clear()
        model(torch.ones(2, 4))
        assert list(RAN) == [(torch.bfloat16,) * 2, (torch.float32,) * 2]
    banned = mezzo.autocast("O1,bf16,ban=mezzo_tests::any_dtype", "cpu")
    with banned, refused(UnsupportedError, "mezzo_tests::any_dtype is banned"):
        any_dtype(torch.ones(3), torch.ones(3))


def test_an_autocast_kernel_of_its_own_is_kept_where_no_rule_names_it():
    x = torch.ones(3, dtype=torch.bfloat16)
    for policy, inside in (("O1,bf16", torch.float32), ("O1,bf16,fp32=mezzo_tests::autocasting", torch.float32)):
        RAN.clear()
        with mezzo.autocast(policy, "cpu"):
            autocasting(x, x)
        assert list(RAN) == [(inside, inside)]
    with mezzo.autocast("O1,bf16,low=mezzo_tests::autocasting", "cpu"), refused(UnsupportedError, "has no kernel in"):
        autocasting(x, x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_rule_on_an_operator_holds_in_compiled_code(backend):
    fc = nn.Linear(4, 4)

    def run(x):
        h = fc(x)
        return any_dtype(h, h)

    def inside(x):
        with mezzo.autocast("O1,bf16,fp32=mezzo_tests::any_dtype", "cpu"):
            return run(x)

    x = torch.rand(2, 4)
    want = inside(x)
    assert want.dtype == torch.float32
    assert torch.equal(torch.compile(inside, backend=backend, fullgraph=True)(x), want)
    with mezzo.autocast("O1,bf16,fp32=mezzo_tests::any_dtype", "cpu"):
        assert torch.equal(torch.compile(run, backend=backend, fullgraph=True)(x), want)


def test_torchvision_s_operators_compute_in_fp32_and_round_back(torchvision):
    x, boxes = torch.rand(1, 3, 8, 8), torch.rand(2, 5)
    for word, dtype in LOW.items():
        for rois in (boxes, boxes.to(dtype)):
            with mezzo.autocast(f"O1,{word}", "cpu"):
                got = torchvision(x.to(dtype), rois, 1.0, 2, 2, -1, False)
            assert torch.equal(got, roi_align(x.to(dtype).float(), rois.float(), 1.0, 2, 2, -1, False).to(dtype))
    for device in ("cpu", "cuda"):
        assert Policy.O1("bfloat16").explain("torchvision::roi_align", device_type=device).treatment == "fp32_math"


def test_a_number_that_only_fp32_holds_is_not_written_into_16_bits_as_infinity():
    scores, mask = torch.zeros(2, 2, dtype=torch.float16), torch.ones(2, dtype=torch.bool)
    with mezzo.autocast("O1,dtype=float16,emulate=true", "cpu"):
        assert torch.equal(scores.masked_fill(mask, -1e9), torch.full((2, 2), -1e9))
        with pytest.raises(RuntimeError, match="without overflow"):
            scores.masked_fill_(mask, -1e9)
    assert torch.equal(scores, torch.zeros(2, 2, dtype=torch.float16))
