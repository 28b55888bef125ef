"""Facts of the machine and the installation: what a result was measured on, and what a bug report says."""

import dataclasses
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils import collect_env

import mezzo
from mezzo import machine
from mezzo.cast.device import decide
from mezzo.documents import jsonable
from mezzo.machine import VARIABLES, environment


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


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Two GPUs and a driver, as torch would speak of them."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(collect_env, "get_nvidia_driver_version", lambda run: "580.1")
    cpu = decide._reports["cpu"]
    monkeypatch.setitem(decide._reports, "cuda", dataclasses.replace(cpu, device_type="cuda", name="NVIDIA H200"))


@pytest.mark.parametrize("matmul, convolution", [("tf32", "none"), ("ieee", "tf32")])
def test_a_gpu_states_whether_tf32_is_on(monkeypatch, on_a_gpu, matmul, convolution):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=matmul))
    monkeypatch.setattr(torch.backends.cudnn, "conv", SimpleNamespace(fp32_precision=convolution))
    facts = machine.describe(torch.device("cuda"))
    assert (facts["gpu"], facts["device"]) == ("NVIDIA H200", "cuda")
    assert (facts["tf32_matmul"], facts["tf32_convolution"]) == (matmul == "tf32", convolution == "tf32")


def test_every_switch_for_tf32_is_read():
    """In a process of its own: torch's older names cannot be read any more once its newer ones are set."""
    code = """
import torch
from mezzo.machine import tf32

torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = True, False
assert tf32() == {"products": True, "convolutions": False}, tf32()
torch.set_float32_matmul_precision("highest")
assert tf32() == {"products": False, "convolutions": False}, tf32()
torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
assert tf32() == {"products": True, "convolutions": True}, tf32()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_default_device_is_the_accelerator_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert machine.default_device() == torch.device("cpu")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: cuda)
    assert machine.default_device() == cuda


# The environment of a bug report --------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Metadata of an installed mezzo, as a build backend writes them; scipy is there and nothing else."""

    def install(*requirements, extras=("plan", "report", "all", "dev")):
        lines = [*(("Provides-Extra", extra) for extra in extras), *(("Requires-Dist", each) for each in requirements)]
        told = SimpleNamespace(get_all=lambda name: [value for key, value in lines if key == name] or None)
        monkeypatch.setattr(metadata, "metadata", lambda name: told)

        def version(name):
            if name not in ("scipy", "numpy", "pytest"):
                raise metadata.PackageNotFoundError(name)
            return "1.2"

        monkeypatch.setattr(metadata, "version", version)

    return install


def row(found, name):
    (text,) = (line[len(name) :].strip() for line in str(found).splitlines() if line.startswith(f"{name} "))
    return text


def test_a_bug_report_says_what_runs_where():
    found = environment()
    assert row(found, "mezzo") == mezzo.__version__
    assert row(found, "torch") == f"{torch.__version__}, built for no CUDA"
    assert row(found, "python") == platform.python_version()
    assert f"numpy {numpy.__version__}" in row(found, "packages")
    assert torch.backends.cpu.get_cpu_capability() in row(found, "processor")
    assert row(found, "cpu bfloat16") == "right, products 1× as fast as in FP32;"
    assert not any(line.startswith(("GPU", "driver", "TF32")) for line in str(found).splitlines())


def test_json_holds_the_same(installed):
    installed("scipy>=1.12; extra == 'plan'")
    found = environment()
    told = json.loads(json.dumps(jsonable(found.to_dict()), allow_nan=False))
    assert set(told) == {field.name for field in dataclasses.fields(found)}
    assert told["devices"] == [decide._reports["cpu"].to_dict()]
    assert told["machine"] == machine.describe(torch.device("cpu"))
    assert told["extras"]["plan"] == {"scipy": "1.2"}


def test_each_gpu_is_named_with_the_driver(on_a_gpu):
    found = environment()
    assert (row(found, "GPU 0"), row(found, "GPU 1")) == ("NVIDIA H200, capability 9.0, 141 GiB",) * 2
    assert (row(found, "driver"), row(found, "TF32")) == ("580.1", "products off, convolutions on")
    assert "built for CUDA 13.0" in row(found, "torch")
    assert row(found, "cuda bfloat16").startswith("right")
    assert json.loads(json.dumps(found.to_dict()))["gpus"][1]["memory_bytes"] == 141 * 2**30


def test_variables_that_matter_are_shown_and_no_other(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CXX", "")
    found = environment()
    assert found.variables == {"OMP_NUM_THREADS": "1", "CXX": ""}
    assert row(found, "OMP_NUM_THREADS") == "1"
    assert "hf_secret" not in str(found) + json.dumps(found.to_dict())


def test_the_home_folder_is_not_named(monkeypatch, tmp_path):
    home = tmp_path / "jane.doe"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("CXX", f"{home}/no-such-compiler")
    found = environment()
    assert found.variables["XDG_CACHE_HOME"] == os.path.join("~", "cache")
    assert found.compiler == "no C++ compiler for optimizer kernels"
    assert "jane.doe" not in str(found) + json.dumps(found.to_dict())


def test_no_value_moves_the_cursor(monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "\x1b[31m\nfake  line")
    assert row(environment(), "PYTHONWARNINGS") == r"\x1b[31m\nfake  line"


def test_extras_are_those_of_the_installed_metadata(installed):
    installed(
        "torch>=2.11",
        'scipy>=1.12; extra == "plan"',
        "plotly>=6.0 ; extra=='report'",
        "jinja2[i18n]>=3.1; python_version > '3' and extra == 'report'",
        "pytest>=8; extra == 'dev'",
        "scipy>=1.12; extra == 'all'",
        "mezzo[plan]; extra == 'all'",
    )
    found = environment()
    assert found.extras == {"plan": {"scipy": "1.2"}, "report": {"plotly": None, "jinja2": None}}
    assert row(found, "[report]") == "plotly absent, jinja2 absent"


def test_our_own_extras_are_found():
    """The environment of the tests is an installed mezzo."""
    extras = environment().extras
    assert extras["recipes"]["scikit-learn"] == metadata.version("scikit-learn")
    assert not {"dev", "all", "demo", "docs"} & set(extras)


def test_a_mezzo_that_is_only_on_the_path_says_so(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", absent)
    found = environment()
    assert found.extras == {}
    assert row(found, "extras") == "unknown: mezzo is on the path, and not installed"


def test_a_user_without_a_home_has_an_environment(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert row(environment(), "mezzo") == mezzo.__version__
