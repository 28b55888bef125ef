"""Nothing kills a process on a processor that claims AMX and dies of it: whole programs in that trap, rebuilt."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def run(program, trap, cache, **environment):
    """Run a program in the trap; a death is reported with what it printed last."""
    unset = {key: value for key, value in os.environ.items() if not key.endswith("MAX_CPU_ISA")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**unset, "XDG_CACHE_HOME": str(cache), "LD_PRELOAD": str(trap), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    """Build the trap, and make sure that it kills."""
    compiler = shutil.which("cc")
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64" or compiler is None:
        pytest.skip("the trap is rebuilt on Linux on x86-64, with a C compiler")
    library = tmp_path_factory.mktemp("trap") / "trap.so"
    source = Path(__file__).with_name("trap.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    product = "import torch; x = torch.ones(256, 256, dtype=torch.bfloat16); x @ x"
    if run(product, library, library.parent).returncode != -signal.SIGILL:
        pytest.skip("needs a processor with AMX, or with AVX512-FP16 and a kernel that lets CPUID fault")
    return library


# What the probe finds in the trap, without its seconds; that it finds this is tested below.
PREFIX = """
    import os, sys, unittest.mock
    import torch
    from torch import nn
    from torch.nn import functional as F
    import mezzo
    from mezzo.cast.device import probing
    from mezzo.cast.device.report import FORMATS, DeviceReport, FormatSupport

    def told(dtype):
        status = {torch.bfloat16: "crashes", torch.float16: "native"}.get(dtype, "unsupported")
        cases = {"gemm": status, "matmul": status, "attention": status}
        return FormatSupport(dtype=dtype, cases=cases, speeds={"gemm": 2.0} if status == "crashes" else {}, detail="")

    found = DeviceReport(device_type="cpu", name="", formats={d: told(d) for d in FORMATS}, needs_isa_limit=True)
    probing.cpu_report = lambda name: (found, False)

    def session(model, level="O1", kind=torch.optim.SGD):
        return mezzo.MixedPrecision(model, kind(model.parameters(), lr=0.1), f"{level},dtype=bfloat16" + EMULATE)

    def region():
        return mezzo.autocast("O1,dtype=bfloat16" + EMULATE)

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))

    def loss(model, x):
        return model(x).float().square().mean()

    torch.manual_seed(1)
    x = torch.randn(128, 128)
    low = x.bfloat16()
    EMULATE = sys.argv[1] if sys.argv[1:] else ""
"""

# Each is a way in which a product reaches oneDNN without mezzo.
WAYS = """
    def backward_inside_a_region():
        for begin in (lambda: region(), lambda: session(net()).autocast()):
            model = net()
            with begin():
                loss(model, x).backward()
            with begin():
                torch.autograd.grad(loss(model, x), list(model.parameters()))

    def backward_of_the_session_inside_its_region():
        model = net()
        amp = session(model)
        with amp.autocast():
            amp.backward(loss(model, x))

    def backward_twice():
        y = x.clone().requires_grad_()
        with region():
            (slope,) = torch.autograd.grad(loss(net(), y), y, create_graph=True)
            slope.square().sum().backward()

    def checkpoints():
        from torch.utils.checkpoint import checkpoint
        for reentrant in (False, True):
            with region():
                checkpoint(net(), x.clone().requires_grad_(), use_reentrant=reentrant).float().sum().backward()

    def scripted():
        for model in (torch.jit.script(net()), torch.jit.trace(net(), x)):
            amp = session(model)
            with amp.autocast():
                value = loss(model, x)
            amp.backward(value)
            amp.step()
            with region():
                loss(model, x).backward()

    def functional_transforms():
        from torch import func
        model, at = net(), dict(net().named_parameters())
        of = lambda params, x: func.functional_call(model, params, (x,)).float().square().mean()
        with region():
            func.grad(of)(at, x)
            func.vmap(func.grad(of), (None, 0))(at, torch.randn(2, 128, 128))
            func.jvp(lambda x: of(at, x), (x,), (x,))
            func.jacrev(lambda x: model(x).float().sum(0)[:2])(x)
            func.hessian(lambda y: of(at, y * x))(torch.ones(1, 1))

    def functions_and_hooks_of_the_users():
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, a):
                ctx.save_for_backward(a)
                return a @ a
            @staticmethod
            def backward(ctx, gradient):
                (a,) = ctx.saved_tensors
                return gradient.to(a.dtype) @ a.T
        y = x.clone().requires_grad_()
        y.register_hook(lambda gradient: gradient @ gradient.T)
        for operand in (y, y.bfloat16()):
            with region():
                Product.apply(operand).float().sum().backward()
            with region():
                value = Product.apply(operand).float().sum()
            value.backward()

    def outside_any_region():
        for level in ("O2", "O3"):
            model = net()
            amp = session(model, level, mezzo.optim.AdamW)
            model[0](low).sum().backward()
            F.linear(low, model[0].weight)
            with torch.no_grad():
                F.linear(low, model[0].weight)
            model[0].weight @ model[0].weight
            F.scaled_dot_product_attention(*[low.view(1, 2, 64, 128)[..., :64]] * 3)
            F.conv2d(low.view(1, 64, 16, 16), low.view(16, 64, 4, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x @ x

    def threads():
        import threading
        model = net()
        def work():
            with region():
                loss(model, x).backward()
            F.linear(low, model[0].weight.bfloat16())
        started = [threading.Thread(target=work) for _ in range(2)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    def layers():
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            with region():
                kind(128, 128, bidirectional=True)(x[None])[0].float().sum().backward()
        with region():
            nn.LSTMCell(128, 128)(x)[0].float().sum().backward()
            nn.MultiheadAttention(128, 2)(x[None], x[None], x[None])[0].float().sum().backward()
            encoder = nn.TransformerEncoderLayer(128, 2, 128, batch_first=True)
            encoder(x[None]).float().sum().backward()
            with torch.no_grad():
                encoder.eval()(x[None])

    def optimizers_that_multiply():
        model = nn.Linear(128, 128, bias=False)
        amp = session(model, "O1", torch.optim.Muon)
        with amp.autocast():
            value = loss(model, x)
        amp.backward(value)
        with region():
            amp.step()

    def graphs():
        model = torch.compile(net(), backend="aot_eager")
        with region():
            loss(model, x).backward()

    for way in (backward_inside_a_region, backward_of_the_session_inside_its_region, backward_twice, checkpoints,
                scripted, functional_transforms, functions_and_hooks_of_the_users, outside_any_region, threads,
                layers, optimizers_that_multiply, graphs):
        print(way.__name__, flush=True)
        way()
    print("alive", torch.backends.mkldnn.enabled)
"""

TOO_LATE = "\n    torch.bmm(x[None], x[None])  # oneDNN has read its environment\n"


@pytest.mark.parametrize("emulate", ["", ",emulate=true"])
def test_where_the_limit_comes_too_late_no_product_reaches_onednn(trap, tmp_path, emulate):
    program = f"import sys; sys.argv[1:] = [{emulate!r}]\n" + textwrap.dedent(PREFIX + TOO_LATE + WAYS)
    done = run(program, trap, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.splitlines()[-1] == "alive False"
    assert done.stderr.count("oneDNN is switched off in this process") == 1
    assert (
        "  where  every bfloat16 product on the CPU, inside mezzo's regions and outside\n"
        "  why    bfloat16 crashes on this CPU unless ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 is set before oneDNN's first "
        "use, and in this process that is too late or cannot be known: a copy of this process that tried it was killed "
        "by an illegal instruction (SIGILL); torch's own kernels take its place, and are slower\n"
        "  write  ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 python …\n"
    ) in done.stderr


def test_where_the_limit_comes_in_time_onednn_stays_on_for_all_of_them(trap, tmp_path):
    done = run(textwrap.dedent(PREFIX + WAYS), trap, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.splitlines()[-1] == "alive True"
    assert "oneDNN" not in done.stderr


def test_an_environment_that_is_put_back_does_not_take_the_limit_away(trap, tmp_path):
    program = """
    with unittest.mock.patch.dict(os.environ):
        session(net())
        print(os.environ["ONEDNN_MAX_CPU_ISA"])
    print("ONEDNN_MAX_CPU_ISA" in os.environ)
    low @ low
    amp = session(model := net())
    print(amp.emulated)
    with amp.autocast():
        value = loss(model, x)
    amp.backward(value)
    print("alive", torch.backends.mkldnn.enabled)
    """
    done = run(textwrap.dedent(PREFIX + program), trap, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.split() == ["AVX512_CORE_FP16", "False", "False", "alive", "True"]


def test_a_limit_of_the_users_own_that_is_put_back_is_kept_as_well(trap, tmp_path):
    program = """
    with unittest.mock.patch.dict(os.environ, ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16"):
        session(net())
    low @ low
    print("alive", torch.backends.mkldnn.enabled)
    """
    done = run(textwrap.dedent(PREFIX + program), trap, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.split() == ["alive", "True"]


def test_a_refused_policy_leaves_onednn_as_it_is(trap, tmp_path):
    program = """
    EMULATE = ",emulate=false"
    try:
        session(net())
    except mezzo.errors.UnsupportedError as error:
        print(str(error).splitlines()[-1])
    print(torch.backends.mkldnn.enabled)
    """
    done = run(textwrap.dedent(PREFIX + TOO_LATE + program), trap, tmp_path)
    assert done.stdout.split("\n")[:2] == ["         ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 python …", "True"], done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_the_probe_finds_the_trap_and_its_cure(trap, tmp_path):
    program = """
    import torch
    from mezzo.cast.device import arithmetic, probe
    found = probe("cpu")
    print(found.needs_isa_limit, found.formats[torch.bfloat16].status, found.formats[torch.float16].status)
    print(arithmetic(torch.bfloat16).action)
    x = torch.ones(256, 256, dtype=torch.bfloat16)
    x @ x
    """
    done = run(program, trap, tmp_path)
    assert done.stdout.split() == ["True", "crashes", "native", "limit"], done.stderr
    assert done.returncode == 0
