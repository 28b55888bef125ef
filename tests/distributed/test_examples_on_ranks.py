"""Examples for several processes, as torchrun runs them: they train, one of them prints, and ranks end alike."""

import contextlib
import io
import os
import re
import runpy
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from .ranks import on_ranks

ROOT = Path(__file__).parents[2]
#: By example: for how many processes its first lines say it is.
EXAMPLES = {
    path.name: int(command[1])
    for path in sorted(ROOT.glob("examples/*.py"))
    if (command := re.search(r"torchrun --nproc-per-node (\d+)", path.read_text()))
}


def run(name, port, folder):
    """Run an example on this rank; return what it prints."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert not dist.is_initialized()
    return printed.getvalue()


def ran(name, count, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return on_ranks(count, run, name, port, str(folder), backend=None)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if count > 2 else name
        for name, count in EXAMPLES.items()
        if name.startswith("train")
    ],
)
def test_examples_run_on_ranks(name, tmp_path):
    first, *others = ran(name, EXAMPLES[name], tmp_path)
    assert "loss" in first
    assert {*others} == {""}


@pytest.mark.slow
def test_the_example_of_resuming_goes_on_at_another_size(tmp_path):
    printed = [ran("resume_sharded.py", count, tmp_path)[0] for count in (2, 4, 1)]
    assert [text.partition(":")[0] for text in printed] == [
        "steps 1 to 20 on 2 ranks", "steps 21 to 40 on 4 ranks", "steps 41 to 60 on 1 ranks"
    ]  # fmt: skip
    losses = [float(text.split()[-1]) for text in printed]
    assert losses[0] > losses[1] > losses[2]
