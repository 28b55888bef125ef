"""No policy means one thing in every style: O1 in the fast format of the machine."""

import contextlib
import importlib

import pytest
import torch

import mezzo
from mezzo.cast.device import decide

from .programs import net

pytestmark = pytest.mark.usefixtures("emulating", "anew")


def parts():
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def five_lines(hf, tmp_path):
    return mezzo.MixedPrecision(*parts())


def attached(hf, tmp_path):
    return mezzo.attach(*parts())


def lightnings(hf, tmp_path):
    pytest.importorskip("lightning", reason="needs lightning")
    return importlib.import_module("mezzo.integrations.lightning").MezzoPrecision()


def accelerates(hf, tmp_path):
    return hf.attach(hf.accelerate.Accelerator(cpu=True), *parts())


def transformers(hf, tmp_path):
    return hf.plug(hf.of.Trainer(net(), hf.of.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])))


@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", [five_lines, attached, lightnings, accelerates, transformers])
def test_no_policy_is_o1_in_the_machines_fast_format(hf, tmp_path, monkeypatch, caplog, style, fast):
    monkeypatch.setattr(decide, "fast_format", lambda device_types: fast)
    with caplog.at_level("INFO", "mezzo.cast.device.decide"):
        trained = style(hf, tmp_path)
    with contextlib.closing(trained) if hasattr(trained, "close") else contextlib.nullcontext():
        assert trained.policy == mezzo.Policy.O1(fast)
    assert [record.getMessage().split(", in")[0] for record in caplog.records if "no policy" in record.msg] == [
        f"no policy is given: {mezzo.Policy.O1(fast)}"
    ]
