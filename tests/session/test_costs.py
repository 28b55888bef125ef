"""What a step costs, counted and not timed: waits of the host and its calls; what a session leaves as it finds it."""

import functools
import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

import mezzo

from ..support.calls import base_and_slope, calls_of
from .loops import EVERY, INF, LOW, O3, Syncs, attached, backward, built, session, spoil, train, train_plainly

FUSED = {
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=1e-3, eps=1e-4),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4, fused=True),
}


@pytest.mark.parametrize(
    "policy, optimizer",
    [
        (EVERY[1], "mezzo"),
        (LOW[0], "AdamW"),
        *((policy, optimizer) for policy in LOW[2:] for optimizer in FUSED),
        (O3[1], "mezzo"),
    ],
)
def test_no_step_waits_for_the_device(policy, optimizer):
    """Clean, accumulated, unscaled, overflowing, and with a loss that is not finite."""
    model, _, amp = session(policy, FUSED[optimizer], max_grad_norm=1.0)
    train(amp, model, 0)
    with Syncs() as syncs:
        for number, event in enumerate("..uXF."):
            backward(amp, model, number)
            backward(amp, model, number + 50)
            if event == "u":
                amp.unscale_()
            if event == "X":
                spoil(model)
            amp.step()
            amp.zero_grad()
    assert syncs.count == 0
    assert amp.stats().steps == 7


@pytest.mark.parametrize("policy", EVERY)
def test_a_plain_loop_waits_no_more_than_the_five_lines(policy):
    for optimizer in ("mezzo", "fused", "SGD"):
        model, made = built(optimizer)
        with attached(model, made, policy):
            train_plainly(model, made, 0)
            with Syncs() as syncs:
                train_plainly(model, made, 1, edit=lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
            assert syncs.count == (optimizer == "SGD")


@pytest.mark.parametrize("policy", EVERY)
def test_optimizers_that_are_asked_by_the_host_wait_once_together(policy):
    model = built()[0]
    pair = [torch.optim.Rprop(model[0].parameters(), lr=1e-3), torch.optim.SGD(model[3].parameters(), lr=0.1)]
    amp = mezzo.MixedPrecision(model, pair, policy)
    for number in range(3):
        backward(amp, model, number)
        if number == 1:
            model[0].bias.grad[0] = INF
        with Syncs() as syncs:
            amp.step()
        amp.zero_grad()
        assert syncs.count == 1


#: By policy and optimizer: functions that a step calls, and of each of its tensors; and
#: more under a scale, where it looks for edits of scaled gradients. They only go down.
OPTIMIZERS = {"split": mezzo.optim.AdamW, "fused AdamW": functools.partial(torch.optim.AdamW, fused=True)}
MOST = {
    ("O1,dtype=bfloat16", "split"): (247, 0.5),
    ("O1,dtype=bfloat16", "fused AdamW"): (172, 0.5),
    ("O1,dtype=float16", "split"): (283, 0.5),
    ("O1,dtype=float16", "fused AdamW"): (208, 0.5),
    ("O2,dtype=bfloat16", "split"): (256, 0.5),
    ("O2,dtype=bfloat16", "fused AdamW"): (292, 0.5),
    ("O2,dtype=float16", "split"): (291, 0.5),
    ("O2,dtype=float16", "fused AdamW"): (326, 0.5),
}

#: By style and policy: functions of mezzo's that a gradient goes through in a backward pass, and in a step. They only
#: go down.
TRIPS = {
    ("attached", "O2,dtype=bfloat16"): (112, 104),
    ("attached", "O2,dtype=float16"): (122, 114),
    ("five lines", "O2,dtype=bfloat16"): (114, 104),
    ("five lines", "O2,dtype=float16"): (124, 120),
}


def calls_of_a_step(policy, optimizer, tensors):
    gc.collect()  # sessions of other tests, each of which a step asks
    model = nn.ParameterList([nn.Parameter(torch.ones(4, 4)) for _ in range(tensors)])
    amp = mezzo.MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), policy, max_grad_norm=1.0)
    for last in (False, False, False, True):
        amp.backward(torch.stack([param.sum() for param in model]).float().sum())
        if not last:
            amp.step()
            amp.zero_grad()
    return calls_of(amp.step)


@pytest.mark.parametrize("policy, optimizer", MOST, ids=map(" / ".join, MOST))
def test_a_tensor_costs_the_host_few_calls_a_step(policy, optimizer):
    base, slope = base_and_slope(functools.partial(calls_of_a_step, policy, optimizer), 8, 40)
    most_base, most_slope = MOST[policy, optimizer]
    assert slope <= most_slope
    assert base + 20 * slope <= most_base + 20 * most_slope, (base, slope)  # of a small model


@pytest.mark.parametrize("style, policy", TRIPS, ids=map(" / ".join, TRIPS))
def test_a_gradient_goes_through_few_functions(style, policy):
    gc.collect()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = mezzo.optim.AdamW(model.parameters())
    is_attached = style == "attached"
    amp = (mezzo.attach if is_attached else mezzo.MixedPrecision)(model, optimizer, f"{policy},emulate=true")
    for _ in range(4):
        with amp.autocast():
            loss = model(torch.ones(8, 64)).square().mean()
        backward = calls_of(loss.backward if is_attached else functools.partial(amp.backward, loss), ["call"])
        step = calls_of(optimizer.step if is_attached else amp.step, ["call"])
        optimizer.zero_grad()
    amp.close()
    most_backward, most_step = TRIPS[style, policy]
    assert backward <= most_backward
    assert step <= most_step


def test_a_session_of_other_models_costs_a_step_few_calls_whatever_its_size():
    gc.collect()
    counts = []
    for tensors in (None, 1, 200):
        other = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(tensors or 0)])
        beside = tensors and mezzo.MixedPrecision(other, torch.optim.SGD(other.parameters(), lr=0.1), "O0")
        model, _, amp = session("O0")
        for number in range(2):
            train(amp, model, number)
        backward(amp, model, 2)
        counts.append(calls_of(amp.step))
        amp.close()
        if beside:
            beside.close()
    alone, small, large = counts
    assert large == small <= alone + 20


# What is left as it is ---------------------------------------------------------------------------------------------

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
    amp = mezzo.MixedPrecision(model, optimizer, policy, max_grad_norm=1.0, on_overflow="locate")
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
