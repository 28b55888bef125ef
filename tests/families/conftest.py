"""The scripts of ``examples/families``, as a stranger's: by path."""

import functools
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

    @functools.cache
    def load(name):
        spec = importlib.util.spec_from_file_location(f"family_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if name == "numbers_mt":
            module.NUM_TRAIN, module.NUM_TEST = 800, 200  # it takes seconds to spell ten times as many
        return module

    return load


@pytest.fixture(scope="session")
def classifier(load_family):
    """What digits_gan judges drawn digits by."""
    script = load_family("digits_gan")
    images, labels, *_ = script.load()
    return script.MLPClassifier((64,), random_state=0).fit(images.flatten(1).numpy(), labels.numpy())


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
