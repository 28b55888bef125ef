"""What a result was measured on."""

import os
import platform

import pytest
import torch

from mezzo import machine


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


@pytest.mark.parametrize("matmul, convolution", [(True, False), (False, True)])
def test_a_gpu_states_whether_tf32_is_on(monkeypatch, matmul, convolution):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cuda, "matmul", type("Flags", (), {"allow_tf32": matmul}))
    monkeypatch.setattr(torch.backends, "cudnn", type("Flags", (), {"allow_tf32": convolution}))
    facts = machine.describe(torch.device("cuda"))
    assert (facts["gpu"], facts["device"]) == ("NVIDIA H200", "cuda")
    assert (facts["tf32_matmul"], facts["tf32_convolution"]) == (matmul, convolution)


def test_the_default_device_is_the_accelerator_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert machine.default_device() == torch.device("cpu")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: cuda)
    assert machine.default_device() == cuda
