"""What the walks over ops share: a child process that a crash ends with a name, and what is within a format's rounding.

A child prints the name of what it is about to run on standard error, and at its end, as JSON, what fell.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def fallen(module, *arguments):
    """Run a walk in a child process; return what fell there, as ``{(op, form): words}``."""
    here = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.cast.{module}", *arguments],
        cwd=here, env={**os.environ, "PYTHONPATH": f"{here / 'src'}{os.pathsep}{here}", "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    last = [line for line in ran.stderr.splitlines() if line.startswith("running ")][-1:]
    assert ran.returncode == 0, f"the process died of {ran.returncode} while {last}\n{ran.stderr[-2000:]}"
    return {(name, form): words for name, form, words in json.loads(ran.stdout.splitlines()[-1])}


def running(name):
    print("running", name, file=sys.stderr, flush=True)


def results(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def off(got, want, low):
    """Say how far a result is off in units of a format's spacing at the largest value; nothing where it is not."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} for {tuple(want.shape)}"
    got, want = (
        tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach() for tensor in (got, want)
    )
    if not (want.is_floating_point() or want.is_complex()):
        return "" if torch.equal(got.to(want.dtype), want) else "not equal"
    if want.is_complex():
        got, want = (torch.view_as_real(tensor.to(torch.complex128).resolve_conj()) for tensor in (got, want))
    got, want = got.double(), want.double()
    info = torch.finfo(low)
    is_beyond = want.abs() > info.max * (1 - info.eps)
    differs = ~((got == want) | (got.isnan() & want.isnan()) | is_beyond)
    if not differs.any():
        return ""
    finite = want[want.isfinite() & ~is_beyond].abs()
    largest = max(float(finite.max()) if finite.numel() else 0.0, 1e-3)
    units = float(((got - want).abs()[differs] / (largest * info.eps)).nan_to_num(torch.inf).max())
    return f"{units:.1f} units" if units > 1 else ""


def units(words):
    return float(words.split()[0]) if words.endswith("units") else float("inf")


def print_as_json(fell):
    print(json.dumps(fell))
