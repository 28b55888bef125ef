"""Nothing kills a process on a processor that claims AMX and dies of it: whole programs in that trap.

The trap is rebuilt where a processor lets that be.
"""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Minutes: each question to the processor is a signal. What follows from a report is in test_device.py.
pytestmark = pytest.mark.slow


class Trap:
    """Programs in the trap, which share what the probe has found; a death is reported with what it printed last."""

    limit = "AVX512_CORE_FP16"

    def __init__(self, folder, library):
        self._environment = {"XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library)}

    def run(self, program, **environment):
        unset = {key: value for key, value in os.environ.items() if not key.endswith("MAX_CPU_ISA")}
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=unset | self._environment | environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip


def rebuilt(folder):
    """Make the trap of a C library that is loaded first, or say nothing."""
    compiler, library = shutil.which("cc"), folder / "trap.so"
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64" or compiler is None:
        return None
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, HERE / "trap.c", "-ldl"], check=True)
    return Trap(folder, library)


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    """Make the trap, and make sure that it kills."""
    made = rebuilt(tmp_path_factory.mktemp("trap"))
    product = "import torch; x = torch.ones(256, 256, dtype=torch.bfloat16); x @ x"
    if made is None or made.run(product).returncode != -signal.SIGILL:
        pytest.skip("needs Linux on x86-64, a C compiler, and AMX, or AVX512-FP16 and a kernel that lets CPUID fault")
    return made


PREFIX = """
    import os, sys, unittest.mock
    import torch
    from torch import nn
    from torch.nn import functional as F
    import mezzo
    from mezzo.cast.device import arithmetic, fast_format, probe, probing

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
    EMULATE = ",emulate=false"
"""

# Each is a way in which a product reaches oneDNN: these all from inside regions.
WAYS = """
    def backward_inside_a_region():
        for begin in (lambda: region(), lambda: session(net()).autocast()):
            model = net()
            with begin():
                loss(model, x).backward()
                torch.autograd.grad(loss(model, x), list(model.parameters()))

    def backward_twice():
        y = x.clone().requires_grad_()
        with region():
            (slope,) = torch.autograd.grad(loss(net(), y), y, create_graph=True)
            slope.square().sum().backward()

    def checkpoints():
        from torch.utils.checkpoint import checkpoint
        for reentrant in (False, True):
            model = net()
            amp = session(model)
            with amp.autocast():
                value = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant).float().sum()
            amp.backward(value)

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

    def graphs():
        model = torch.compile(net(), backend="aot_eager")
        with region():
            loss(model, x).backward()

    def the_five_lines():
        for level in ("O1", "O2", "O3"):
            model = net()
            amp = session(model, level)
            with amp.autocast():
                value = loss(model, x)
            amp.backward(value)
            amp.step()

    def a_step_of_muon():
        model = net()
        loss(model, x).backward()  # in FP32, outside any region: the optimizer's products alone are in BF16
        mezzo.optim.Muon(model.parameters(), lr=0.1, adamw={}).step()

    for way in (the_five_lines, backward_inside_a_region, backward_twice, checkpoints, functional_transforms, layers,
                 graphs, a_step_of_muon):
        print(way.__name__, flush=True)
        way()
    print("alive", torch.backends.mkldnn.enabled)
"""

TOO_LATE = "\n    torch.bmm(x[None], x[None])  # oneDNN has read its environment\n"


def test_the_probe_finds_the_trap_and_its_cure(trap):
    program = """
    found = probe("cpu")
    print(found.needs_isa_limit, found.formats[torch.bfloat16].status, found.formats[torch.float16].status)
    print(arithmetic(torch.bfloat16, "cpu", False)["products"].action, fast_format({"cpu"}))
    low @ low
    """
    done = trap.run(PREFIX + program)
    assert done.stdout.split() == ["True", "dead", "right", "limit", "torch.bfloat16"], done.stderr
    assert done.returncode == 0


def test_where_the_limit_comes_too_late_products_are_emulated_and_one_warning_says_so(trap):
    refused = """
    try:
        session(net())
    except mezzo.errors.UnsupportedError as error:
        print(str(error).splitlines()[-1].strip())
    print("ONEDNN_MAX_CPU_ISA" in os.environ)
    """
    done = trap.run(PREFIX + TOO_LATE + refused + 'EMULATE = ""\n' + WAYS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"ONEDNN_MAX_CPU_ISA={trap.limit} python …", "False"], "what is refused changes nothing"
    assert lines[-1] == "alive True", "oneDNN stays on for all else"
    warned = (
        "bfloat16 products are emulated on this cpu\n"
        "  where  every region of mezzo's in this process; do not compute in the format outside them\n"
        "  why    bfloat16 kills the process on this CPU (another process that tried it was killed by SIGILL; right "
        f"with ONEDNN_MAX_CPU_ISA={trap.limit}), and this process has used oneDNN before that was set\n"
        f"  write  ONEDNN_MAX_CPU_ISA={trap.limit} python …\n"
    )
    assert done.stderr.count(warned) == done.stderr.count("emulated") == 1


def test_where_the_limit_comes_in_time_nothing_dies(trap):
    """mezzo's, or as the warning says to set it."""
    for program, environment in ((PREFIX, {}), (PREFIX + TOO_LATE, {"ONEDNN_MAX_CPU_ISA": trap.limit})):
        done = trap.run(program + WAYS, **environment)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
        assert done.stdout.splitlines()[-1] == "alive True"
        assert "oneDNN" not in done.stderr
