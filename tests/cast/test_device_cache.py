"""What is known about a CPU is kept on disk, and nothing that lies there can do harm."""

import json
import os

import pytest
import torch

from mezzo import files
from mezzo.cast.device import probing as probe_cache
from mezzo.cast.device.report import FORMATS, DeviceReport, FormatSupport


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    return tmp_path / "mezzo"


CPU = probe_cache.Processor(name="a CPU", digest="0123")

REPORT = DeviceReport(
    device_type="cpu",
    name="a CPU",
    formats={
        dtype: FormatSupport(
            dtype=dtype, cases={"gemm": "native"}, speeds={"gemm": 2.0}, detail="slowest: gemm"
        )
        for dtype in FORMATS
    },
    needs_isa_limit=False,
)  # fmt: skip


def test_a_stored_report_is_found_again_and_lies_in_one_file(cache):
    assert probe_cache.load(CPU) is None
    probe_cache.store(CPU, REPORT)
    assert probe_cache.load(CPU) == REPORT
    (file,) = cache.iterdir()
    assert file.name.startswith("device-")
    assert file.suffix == ".json"
    probe_cache.store(CPU, REPORT)
    assert list(cache.iterdir()) == [file], "nothing is left beside it"


DAMAGES = [
    lambda report: report.update(formats=[]),
    lambda report: report["formats"].pop(1),
    lambda report: report.update(device_type="cuda"),
    lambda report: report.update(needs_isa_limit=True),
    lambda report: report["formats"][0].update(cases={"gemm": "crashes"}),
    lambda report: report["formats"][0].update(cases={"a case of another version": "native"}),
    lambda report: report["formats"][0].update(speeds={"gemm": -1.0}),
    lambda report: report["formats"][0].update(status="unsupported"),
    lambda report: report["formats"][0].update(speed_ratio=float("nan")),
    lambda report: report.clear(),
]


def test_a_report_that_no_probe_has_written_is_as_good_as_none(cache, caplog):
    probe_cache.store(CPU, REPORT)
    (file,) = cache.iterdir()
    whole = file.read_text()
    for number, damage in enumerate(DAMAGES):
        stored = json.loads(whole)
        damage(stored["report"])
        file.write_text(json.dumps(stored))
        with caplog.at_level("INFO"):
            assert probe_cache.load(CPU) is None, number
    assert caplog.text.count("ignoring the stored device report: ") == len(DAMAGES)
    for text in ("null", "[]", "3", '"report"', "{}", '{"key": 1, "report": []}'):
        file.write_text(text)
        assert probe_cache.load(CPU) is None


@pytest.mark.parametrize("change", ["processor", "torch", "probe", "setting", "older setting"])
def test_another_machine_torch_probe_or_setting_is_another_entry(monkeypatch, change):
    probe_cache.store(CPU, REPORT)
    cpu = CPU
    match change:
        case "processor":
            cpu = probe_cache.Processor(name="a CPU", digest="4567")
        case "torch":
            monkeypatch.setattr(torch, "__version__", "9.9.9")
        case "probe":
            monkeypatch.setattr(probe_cache, "PROBE_VERSION", probe_cache.PROBE_VERSION + 1)
        case "setting":
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        case "older setting":
            monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert probe_cache.load(cpu) is None


def damaged(text: str) -> list[str]:
    stored = json.loads(text)
    another_key = {**stored, "key": {**stored["key"], "cpu": "another"}}
    another_word = json.loads(text)
    another_word["report"]["formats"][0]["status"] = "splendid"
    nested = {**stored, "report": [stored["report"]]}
    texts = ["", text[: len(text) // 2], "[]", "null", "{}", "\x00\x01"]
    return [*texts, json.dumps(another_key), json.dumps(another_word), json.dumps(nested)]


def test_a_file_that_is_not_right_is_ignored_with_a_line_in_the_log(cache, caplog):
    probe_cache.store(CPU, REPORT)
    (file,) = cache.iterdir()
    for text in damaged(file.read_text()):
        caplog.clear()
        file.write_text(text)
        with caplog.at_level("INFO"):
            assert probe_cache.load(CPU) is None
        (record,) = caplog.records
        assert record.name == "mezzo.cast.device.probing"
        assert record.getMessage().startswith("ignoring the stored device report: ")
        probe_cache.store(CPU, REPORT)
        assert probe_cache.load(CPU) == REPORT, "and it is replaced by the next report"


def test_bytes_that_are_no_text_are_ignored(cache):
    probe_cache.store(CPU, REPORT)
    (file,) = cache.iterdir()
    for harm in (b"\xff\xfe\xfa", b"[" * 100_000):
        file.write_bytes(harm)
        assert probe_cache.load(CPU) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("whose", ["file", "folder", "cache home"])
def test_a_report_that_another_user_could_have_written_is_not_read(cache, caplog, whose):
    probe_cache.store(CPU, REPORT)
    (file,) = cache.iterdir()
    os.chown({"file": file, "folder": cache, "cache home": cache.parent}[whose], 12345, -1)
    with caplog.at_level("INFO"):
        assert probe_cache.load(CPU) is None
    assert "ignoring the stored device report: [Errno 13] it belongs to another user, 12345" in caplog.text


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level("INFO"):
        probe_cache.store(CPU, REPORT)
        assert probe_cache.load(CPU) is None
    assert caplog.records[0].getMessage().startswith("the device report could not be stored: ")


def test_a_failure_in_the_middle_leaves_the_old_report_and_no_litter(monkeypatch, cache):
    probe_cache.store(CPU, REPORT)

    def refuse(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", refuse)
    newer = DeviceReport(device_type="cpu", name="newer", formats=REPORT.formats, needs_isa_limit=False)
    probe_cache.store(CPU, newer)
    assert probe_cache.load(CPU) == REPORT
    assert len(list(cache.iterdir())) == 1


def test_the_folder_follows_the_xdg_specification(monkeypatch, tmp_path):
    assert files.cache_folder() == tmp_path / "mezzo"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/path")
    assert files.cache_folder() == tmp_path / "home" / ".cache" / "mezzo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder() == tmp_path / "home" / ".cache" / "mezzo"


def test_a_user_without_a_home_folder_probes_every_time(monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(files.Path, "home", homeless)
    with caplog.at_level("INFO"):
        probe_cache.store(CPU, REPORT)
        assert probe_cache.load(CPU) is None
    assert len(caplog.records) == 2


def test_the_processor_has_a_name_and_a_stable_digest():
    first = probe_cache.processor()
    assert first == probe_cache.processor()
    assert first.name
    assert len(first.digest) == 20
