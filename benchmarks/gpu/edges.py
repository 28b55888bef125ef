"""Every test that needs a GPU, run with pytest, as a table of what became of each."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from .plan import Plan

ROOT = Path(__file__).parents[2]
#: In a dry run: all of its tests want a GPU, so that none takes time here.
ONE_FILE = "tests/session/test_session_gpu.py"
#: Warnings are shown, not raised: another torch warns of other things.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-W", "default", "--tb=short")


def measure(plan: Plan) -> dict[str, Any]:
    """The quick ones."""
    return _run(plan, "gpu and not slow")


def measure_slow(plan: Plan) -> dict[str, Any]:
    """Those that compile models, and the like."""
    return _run(plan, "gpu and slow")


def _run(plan: Plan, marked: str) -> dict[str, Any]:
    workers = ["-n", "8"] if not plan.dry and importlib.util.find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        where = [ONE_FILE if plan.dry else "tests", "-m", marked, f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *OPTIONS, *workers, *where]
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)
        if not report.exists():
            raise RuntimeError(f"pytest wrote no report and exited with {done.returncode}")
        return counted(report.read_text())


def counted(report: str) -> dict[str, Any]:
    """Sum up a JUnit report."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed, skipped = [], {}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if wrong is not None:
            failed.append({"test": name, "message": (wrong.get("message") or "").strip()[:600]})
        elif (left := case.find("skipped")) is not None:
            reason = left.get("message") or ""
            skipped[reason] = skipped.get(reason, 0) + 1
    return {"passed": len(cases) - len(failed) - sum(skipped.values()), "failed": failed, "skipped": skipped}
