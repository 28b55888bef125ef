"""Regions on a CUDA device and torch's flags for accumulation in GEMMs, also while compiled code runs."""

import pytest
import torch

import mezzo

from ..gpus import FAKE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEEN = []


def pairs():
    """For FP16 and BF16: whether GEMMs may accumulate in reduced precision, and whether they may split k."""
    names = [f"_get_cublas_allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16")]
    return [getattr(torch._C, name)() for name in names]


def set_pairs(values):
    for dtype, value in zip(("fp16", "bf16"), values, strict=True):
        getattr(torch._C, f"_set_cublas_allow_{dtype}_reduced_precision_reduction")(*value)


@pytest.fixture
def flags():
    before = pairs()
    yield
    set_pairs(before)


@torch.library.custom_op("mezzo_on_gpu::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    """Write down torch's flags while compiled code runs."""
    SEEN.append(tuple(reduced for reduced, _ in pairs()))
    return x.clone()


@look.register_fake
def _(x):
    return torch.empty_like(x)


def around(x):
    return look(x) @ x


def within(x):
    with mezzo.autocast("O1,dtype=bfloat16", "cuda"):
        return look(x) @ x


def compiled(function):
    """By what users compile with; on a device that computes nothing with tensors of the CPU, which need no compiler."""
    x = torch.ones(16, 16, device="cpu" if FAKE else "cuda")
    return torch.compile(function, backend="aot_eager" if FAKE else "inductor", fullgraph=True), x


@pytest.mark.parametrize("before", [[(True, True), (False, False)], [(False, False), (True, True)]])
def test_a_region_gives_back_what_the_user_said_of_split_k(flags, before):
    set_pairs(before)
    with mezzo.autocast("O1,dtype=bfloat16", "cuda"):
        assert pairs() == [(False, split_k) for _, split_k in before]
    assert pairs() == before


def test_a_region_around_compiled_code_forbids_reduced_accumulation_in_it(flags):
    set_pairs([(True, True), (True, True)])
    run, x = compiled(around)
    SEEN.clear()
    for _ in range(2):
        with mezzo.autocast("O1,dtype=bfloat16", "cuda"):
            run(x)
    assert {*SEEN} == {(False, False)}
    assert pairs() == [(True, True), (True, True)]


def test_a_region_inside_compiled_code_is_refused_unless_it_is_forbidden_already(flags):
    run, x = compiled(within)
    SEEN.clear()
    for _ in range(2):
        set_pairs([(True, True), (True, True)])
        with pytest.raises(
            RuntimeError,
            match=r"(?s)UnsupportedError: a compiled region cannot .*allow_bf16_\w+ is True.*write  torch\.backends\."
            r"cuda\.matmul\.allow_bf16_reduced_precision_reduction = False .*around the .*the text lists=device",
        ):
            run(x)
        assert SEEN == []
    set_pairs([(True, True), (False, True)])
    run(x)
    assert {bf16 for _, bf16 in SEEN} == {False}


def test_emulated_dropout_is_the_same_in_the_backward_pass(computing):
    """Torch draws it on the device, and not by the CPU's generator."""
    value = torch.eye(32, device="cuda", dtype=torch.bfloat16)[None, None].requires_grad_()
    query = torch.zeros_like(value)
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true", "cuda"):
        out = torch.nn.functional.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
        torch.rand(7, device="cuda")  # what happens in between must not matter
    (gradient,) = torch.autograd.grad(out, value, torch.eye(32, device="cuda", dtype=torch.bfloat16)[None, None])
    # Out is the dropped attention itself, and the gradient by an identity is its transpose.
    assert torch.equal(gradient, out.detach().mT)
    assert 0.2 < (out == 0).float().mean() < 0.8
