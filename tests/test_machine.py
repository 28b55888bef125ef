"""Facts of the machine and the installation: what a result was measured on, and what a bug report says."""

import json
import os
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import pytest
import torch
from torch.utils import collect_env

from mezzo import machine
from mezzo.machine import VARIABLES, environment

from .distributed.ranks import on_ranks


def test_the_cpu_is_named_as_the_system_names_it():
    facts = machine.describe(torch.device("cpu"))
    assert facts["torch"] == torch.__version__
    assert facts["python"] == platform.python_version()
    assert facts["threads"] == torch.get_num_threads()
    assert 1 <= facts["cores"] <= os.cpu_count()
    assert facts["device"] == "cpu"
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as info:
            assert facts["cpu"].split()[0] in info.read()
    assert "gpu" not in facts
    assert "tf32_matmul" not in facts


def test_a_gpu_states_whether_tf32_is_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for matmul, convolution in (("tf32", "none"), ("ieee", "tf32")):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=matmul))
        monkeypatch.setattr(torch.backends.cudnn, "conv", SimpleNamespace(fp32_precision=convolution))
        facts = machine.describe(torch.device("cuda"))
        assert (facts["gpu"], facts["device"]) == ("NVIDIA H200", "cuda")
        assert (facts["tf32_matmul"], facts["tf32_convolution"]) == (matmul == "tf32", convolution == "tf32")


def switched():
    switches = []
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = True, False
    switches.append(machine.tf32())
    torch.set_float32_matmul_precision("highest")
    switches.append(machine.tf32())
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    return [*switches, machine.tf32()]


def test_every_switch_for_tf32_is_read():
    """In a process of its own: torch's older names cannot be read any more once its newer ones are set."""
    (switches,) = on_ranks(1, switched, timeout=120, backend=None)
    assert [[*switch.values()] for switch in switches] == [[True, False], [False, False], [True, True]]
    assert [*switches[0]] == ["products", "convolutions"]


def test_the_default_device_is_the_accelerator_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert machine.default_device() == torch.device("cpu")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: cuda)
    assert machine.default_device() == cuda


# The environment of a bug report --------------------------------------------------------------------------------------


@pytest.fixture
def torchs(monkeypatch):
    """torch's own report, which asks programs for seconds: one that names a home folder."""

    class Report(NamedTuple):
        os: str
        pip_packages: tuple[str, ...]

    monkeypatch.setattr(collect_env, "get_env_info", lambda: Report("Linux", (f"/{Path.home()}/site-packages",)))


def test_a_bug_report_says_what_runs_where(torchs):
    variables = environment()
    assert variables["machine"] == machine.describe(torch.device("cpu"))
    assert variables["packages"]["numpy"] == numpy.__version__
    assert set(variables["packages"]) >= {"numpy", "triton", "rich"}
    assert variables["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert variables["torch_collect_env"]["os"] == "Linux"
    assert variables["tf32"] is None
    json.dumps(variables, allow_nan=False)


def test_variables_that_matter_are_shown_and_no_other(torchs, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CXX", "")
    variables = environment()
    assert variables["variables"] == {"OMP_NUM_THREADS": "1", "CXX": ""}
    assert "hf_secret" not in json.dumps(variables)


def test_the_home_folder_is_not_named(torchs, monkeypatch, tmp_path):
    home = tmp_path / "jane.doe"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("CXX", f"{home}/no-such-compiler")
    variables = environment()
    assert variables["variables"]["XDG_CACHE_HOME"] == os.path.join("~", "cache")
    assert variables["compiler"] == "no C++ compiler for kernels"
    assert "jane.doe" not in json.dumps(variables)
