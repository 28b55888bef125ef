"""The migration page's programs: as their systems teach them and by hand they train alike."""

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()


def programs(section):
    """The Python blocks of a section of the page."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def trained(program):
    """Run a program from seed 0: the weights it began with and those it ended with, and its names."""
    torch.manual_seed(0)
    names = {"__name__": "__snippet__"}
    first, rest = program.split("\nbatches = ")
    exec(compile(first, "snippet", "exec"), names)
    before = [param.detach().clone() for param in names["model"].parameters()]
    exec(compile(f"batches = {rest}", "snippet", "exec"), names)
    return before, [param.detach().float() for param in names["model"].parameters()], names


@pytest.mark.parametrize("section", ["torch.amp"])
def test_both_programs_of_a_section_take_the_same_steps(section):
    theirs, by_hand = programs(section)[:2]
    before, after, names = trained(theirs)
    same, mine, own = trained(by_hand)
    assert all(map(torch.equal, before, same))
    assert own["amp"].stats().steps > own["amp"].stats().skipped == 0
    for old, new, other in zip(before, after, mine, strict=True):
        moved = (new - old).norm()
        assert moved > 0
        assert (new - other).norm() < 0.02 * moved, section  # FP16 has 11 bits, and sums are taken in other orders
    assert names["loss"].item() == pytest.approx(own["loss"].item(), rel=2e-3)
