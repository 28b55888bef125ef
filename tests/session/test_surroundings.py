"""What a session leaves as it finds it: everything of the process that is not its models and optimizers."""

import subprocess
import sys

#: Run alone: in a test process others have changed what is looked at. The optimizer is there before: building one makes
#: torch import sympy, which adds a warnings filter of its own.
PROGRAM = """
import logging, os, random, signal, sys, threading, warnings
import numpy, torch

def surroundings():
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn
    return {
        "warnings": (list(warnings.filters), warnings.showwarning),
        "environment": {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"},  # see cast/device.py
        "directory": os.getcwd(),
        "random": (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()),
        "root logger": (logging.root.level, list(logging.root.handlers), logging.root.filters, logging.root.disabled),
        "threads": [thread.name for thread in threading.enumerate()],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGILL)],
        "interpreter": (sys.excepthook, sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), list(sys.path)),
        "defaults": (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "products": (cuda.allow_tf32, cuda.allow_fp16_reduced_precision_reduction, cpu.enabled,
                     cuda.allow_bf16_reduced_precision_reduction, torch.backends.cudnn.allow_tf32),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "subnormal": torch.tensor(1e-40).mul(1).item(),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
    }

def compare(before, when):
    now = surroundings()
    assert before == now, when + ": " + str({k: (before[k], now[k]) for k in now if before[k] != now[k]})

alone = surroundings()
import mezzo
compare(alone, "import")
for optim, policy in ((mezzo.optim, "O2,dtype=bfloat16"), (torch.optim, "O1")):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    optimizer = optim.AdamW(model.parameters())
    before = surroundings()
    amp = mezzo.MixedPrecision(model, optimizer, policy, max_grad_norm=1.0, on_overflow="explain")
    compare(before, "session")
    for number in range(2):
        with amp.autocast():
            loss = model(torch.ones(2, 8)).square().mean()
        amp.backward(loss)
        amp.unscale_()
        amp.step()
        amp.zero_grad()
        compare(before, "step")
    amp.load_state_dict(amp.state_dict())
    amp.close()
    compare(before, "close")
"""


def test_a_first_session_changes_nothing_of_the_process():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
