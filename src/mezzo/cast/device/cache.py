"""Keep what was found out about this CPU on disk, so that the next process need not probe again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mezzo import files
from mezzo.cast.device.probing import isa_setting
from mezzo.cast.device.report import DeviceReport

__all__ = ["PROBE_VERSION", "Processor", "load", "processor", "store"]

logger = logging.getLogger(__name__)

#: Counted up whenever the cases or the meaning of a report change.
PROBE_VERSION = 4

#: What /proc/cpuinfo calls the things that decide which kernels run; the rest varies, like the clock.
IDENTIFYING = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """The CPU, as far as it matters which kernels run on it.

    Args:
        name: What to call it.
        digest: A hash of its model, its flags, and the machine that may hide some of them.
    """

    name: str
    digest: str


def processor() -> Processor:
    """Identify the CPU of this machine.

    Example:
        >>> processor() == processor()
        True
    """
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() in IDENTIFYING:
                facts[key.strip()] = value.strip()
    name = facts.get("model name") or platform.processor() or platform.machine() or "unknown CPU"
    # A cluster shares a home folder among machines, and whether an advertised instruction really works is
    # a matter of the hypervisor, which only these give away.
    for source in ("sys_vendor", "product_name"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            facts[source] = Path("/sys/class/dmi/id", source).read_text().strip()
    facts["platform"] = f"{platform.machine()} {platform.system()} {platform.release()}"
    return Processor(name=name, digest=_digest(facts))


def load(cpu: Processor) -> DeviceReport | None:
    """Read the report of an earlier process, or None if there is none that fits and is as it was written.

    Args:
        cpu: The CPU of this machine.
    """
    key = _key(cpu)
    try:
        stored = json.loads(files.kept(_name(key)))
        if stored["key"] != key or stored["digest"] != _digest(stored["report"]):
            raise ValueError("it was written for another key, or changed since")
        return DeviceReport.from_dict(stored["report"])
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as fault:
        logger.info("ignoring the stored device report: %s", fault)
        return None


def store(cpu: Processor, report: DeviceReport) -> None:
    """Write a report for later processes; if that fails, later processes probe again.

    Args:
        cpu: The CPU of this machine.
        report: What the probe found.
    """
    key, found = _key(cpu), report.to_dict()
    try:
        # Several ranks may finish together: each file appears whole, so a reader sees one whole report.
        files.keep(_name(key), json.dumps({"key": key, "digest": _digest(found), "report": found}, indent=1).encode())
    except (OSError, RuntimeError) as fault:
        logger.info("the device report could not be stored: %s", fault)


def _key(cpu: Processor) -> dict[str, Any]:
    return {"probe": PROBE_VERSION, "torch": torch.__version__, "cpu": cpu.digest, "isa_setting": isa_setting()}


def _name(key: dict[str, Any]) -> str:
    return f"device-{_digest(key)}.json"


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
