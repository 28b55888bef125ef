"""The scripts of ``examples/families``, as a stranger's: by path."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "families"


@pytest.fixture(scope="session")
def load_family():
    """Return a script as a module, its ``main`` not run."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"family_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def run_family():
    """Run a script in a process of its own, which does not see mezzo, and return its lines on stdout."""

    def run(name, *arguments):
        command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run
