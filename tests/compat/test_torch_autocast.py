"""`autocast` with torch's signature: the dtypes of torch's own region, whatever is nested, decorated or compiled."""

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo.compat.torch import GradScaler, autocast, contexts, custom_bwd, custom_fwd
from mezzo.compat.torch.cuda import amp

LOW = (torch.float16, torch.bfloat16)
A, B, VECTOR = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
#: Ops of every list of torch's, those that it does not list, and some that C++ composes.
OPS = {
    "linear": lambda: functional.linear(A, B, VECTOR),
    "matmul": lambda: A @ B,
    "addmm": lambda: torch.addmm(A, A, B),
    "baddbmm": lambda: torch.baddbmm(A[None], A[None], B[None]),
    "conv2d": lambda: functional.conv2d(A[None, None], B[None, None, :2, :2]),
    "attention": lambda: functional.scaled_dot_product_attention(A[None], B[None], A[None]),
    "softmax": lambda: functional.softmax(A @ B, 0),
    "layer_norm": lambda: functional.layer_norm(A @ B, (4,)),
    "rms_norm": lambda: functional.rms_norm(A @ B, (4,)),
    "gelu": lambda: functional.gelu(A @ B),
    "exp": lambda: torch.exp(A @ B),
    "sum": lambda: (A @ B).sum(),
    "cross_entropy": lambda: functional.cross_entropy(A @ B, torch.tensor([0, 1, 2, 3])),
    "mse_loss": lambda: functional.mse_loss(A @ B, B),
    "cat": lambda: torch.cat([A @ B, A]),
    "stack": lambda: torch.stack([A @ B, A]),
    "add": lambda: A @ B + A,
    "pool": lambda: functional.avg_pool1d(A @ B, 2),
    "interpolate": lambda: functional.interpolate((A @ B)[None, None], scale_factor=2.0),
    "float64": lambda: A.double() @ B.double(),
    "integers": lambda: torch.arange(4) @ torch.arange(4),
}


@pytest.mark.parametrize("dtype", [*LOW, None])
def test_every_op_has_the_dtype_that_it_has_in_torchs_region(dtype):
    for name, op in OPS.items():
        with torch.autocast("cpu", dtype=dtype):
            wanted = op()
        with autocast("cpu", dtype=dtype):
            result = op()
        assert result.dtype == wanted.dtype, name
        torch.testing.assert_close(result, wanted, msg=name)


def test_the_signature_is_torchs():
    theirs = inspect.signature(torch.amp.autocast_mode.autocast.__init__).parameters
    mine = inspect.signature(autocast).parameters
    assert [(p.name, p.kind) for p in mine.values()] == [(p.name, p.kind) for p in list(theirs.values())[1:]]
    assert [p.default for p in mine.values()] == ["cuda", None, True, None]  # torch.cuda.amp's programs name no device
    for name in ("__init__", "scale", "unscale_", "step", "update", "get_scale", "set_growth_factor", "state_dict"):
        theirs, mine = (
            inspect.signature(getattr(scaler, name)).parameters for scaler in (torch.amp.GradScaler, GradScaler)
        )
        assert [(p.name, p.default, p.kind) for p in mine.values()] == [
            (p.name, p.default, p.kind) for p in theirs.values()
        ]
    theirs, mine = (inspect.signature(scaler).parameters for scaler in (torch.cuda.amp.GradScaler, amp.GradScaler))
    assert list(mine) == list(theirs)
    public = {name for name in vars(torch.amp.GradScaler) if not name.startswith("_")}
    assert public <= {*dir(GradScaler)}
    assert (custom_fwd, custom_bwd) == (torch.amp.custom_fwd, torch.amp.custom_bwd)


@pytest.mark.parametrize("outer, inner", [(autocast, autocast), (torch.autocast, autocast), (autocast, torch.autocast)])
def test_regions_in_regions_of_either_kind(outer, inner):
    with outer("cpu", dtype=torch.bfloat16):
        assert (A @ B).dtype == torch.bfloat16
        with inner("cpu", enabled=False):
            assert (A @ B).dtype == torch.float32
            assert not torch.is_autocast_enabled("cpu")
            with outer("cpu", dtype=torch.float16):
                assert (A @ B).dtype == torch.float16
            assert (A @ B).dtype == torch.float32
        with inner("cpu", dtype=torch.float16):
            assert (A @ B).dtype == torch.float16
        assert (A @ B).dtype == torch.bfloat16
    assert (A @ B).dtype == torch.float32


def test_it_decorates_functions_and_enters_again():
    @autocast("cpu", dtype=torch.bfloat16)
    def product(x, depth=0):
        return product(x, depth + 1) if depth < 3 else x @ x

    assert product(A).dtype == torch.bfloat16
    assert (A @ B).dtype == torch.float32
    entered = autocast("cpu", torch.bfloat16)
    for _ in range(2):
        with entered:
            assert (A @ B).dtype == torch.bfloat16

    class Net(nn.Linear):
        @autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x):
            return super().forward(x)

    assert Net(4, 4)(A).dtype == torch.bfloat16


@pytest.mark.parametrize("inside", [False, True])
def test_it_is_compiled_whole(inside):
    def product(x):
        if not inside:
            return (x @ x).exp()
        with autocast("cpu", dtype=torch.bfloat16):
            y = x @ x
            with autocast("cpu", enabled=False):
                return y.float().exp() + x @ x

    compiled = torch.compile(product, backend="eager", fullgraph=True)
    with autocast("cpu", dtype=torch.bfloat16):
        output, wanted = compiled(A), product(A)
    assert output.dtype == wanted.dtype
    assert torch.equal(output, wanted)


@pytest.mark.parametrize("before", [False, True])
def test_torchs_cache_of_weights_is_on_or_off_as_asked(before):
    weight = torch.randn(4, 4, requires_grad=True)
    torch.set_autocast_cache_enabled(before)
    try:
        for wanted in (True, False, None):
            with autocast("cpu", dtype=torch.bfloat16, cache_enabled=wanted):
                assert torch.is_autocast_cache_enabled() == (before if wanted is None else wanted)
                (A @ weight).sum().backward()
            assert torch.is_autocast_cache_enabled() == before
        with pytest.raises(KeyError), autocast("cpu", cache_enabled=not before):
            raise KeyError
        assert torch.is_autocast_cache_enabled() == before
    finally:
        torch.set_autocast_cache_enabled(True)


def test_formats_that_torch_does_not_cast_to_disable_it_as_in_torch(recwarn):
    """Scripts choose among three dtypes by name, FP32 among them, and enter the region in any case."""
    dtype = torch.float32
    warnings.simplefilter("always")
    contexts._say.cache_clear()
    with autocast("cpu", dtype=dtype, enabled=False):
        pass
    assert not recwarn
    for _ in range(2):
        with autocast("cpu", dtype=dtype):
            assert (A @ B).dtype == torch.float32
    (warned,) = recwarn
    assert f"autocast is disabled: {dtype} is not a format that it casts to" in str(warned.message)


def test_for_cuda_on_a_machine_without_it_is_disabled_and_says_so(recwarn, monkeypatch):
    warnings.simplefilter("always")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    contexts._say.cache_clear()
    for disabled in (autocast("cuda"), amp.autocast(), amp.autocast(enabled=True, dtype=torch.bfloat16)):
        with disabled:
            assert (A @ B).dtype == torch.float32
    (warned,) = recwarn
    assert "autocast is disabled: CUDA is not available" in str(warned.message)
    for made in (GradScaler(), amp.GradScaler(2.0**8)):
        assert not made.is_enabled()
        assert isinstance(made, GradScaler)
    assert "GradScaler is disabled: CUDA is not available" in str(recwarn[1].message)


@pytest.mark.parametrize("low", LOW)
def test_the_spellings_of_torch_cuda_amp_work_after_a_changed_import(low, monkeypatch):
    """What they were given, as CUDA's region would get it: by name, by place, and without a device."""
    given = []

    def region_of(policy, device_type):
        given.append((policy, device_type))
        return plain("O1,lists=device", "cpu")

    plain = contexts.cast.autocast
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(contexts.cast, "autocast", region_of)
    monkeypatch.setattr(region_of, "of", plain.of, raising=False)
    places = (autocast, mezzo.compat.torch.amp.autocast)
    for old in (*places, amp.autocast, mezzo.compat.torch.cuda.amp.autocast):
        for args, options in (
            ((), {"dtype": low}),
            ((True, low), {}),
            ((True, low, False), {}),
            ((True,), {"dtype": low}),
        ):
            made = old(*args, **options)
            policy, device = given.pop()
            assert (device, f"dtype={low}".replace("torch.", "") in policy) == ("cuda", True)
            assert made.region.caches in ((False,) if len(args) == 3 else (True, None))
        for off in (old(False), old(enabled=False), old(False, low)):
            assert isinstance(off, torch.autocast)
    assert autocast().region == autocast("cuda").region
    assert not given[2:]


# Half of the pair ---------------------------------------------------------------------------------------------
