"""The migration page's programs: as their systems teach them and by hand they train alike."""

import re
from pathlib import Path

import pytest
import torch

import mezzo

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()


def programs(section):
    """The Python blocks of a section of the page."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def trained(program):
    """Run a program from seed 0: its FP32 weights at the start, how far they went, its last loss, its stats."""
    torch.manual_seed(0)
    names = {"__name__": "__snippet__"}
    first, rest = program.split("\nbatches = ")
    exec(compile(first, "snippet", "exec"), names)
    before = flat(names["model"])
    exec(compile(f"batches = {rest}", "snippet", "exec"), names)
    stats = None
    if isinstance(amp := names.get("amp"), mezzo.MixedPrecision):
        stats = amp.stats()
        amp.close()  # the masters' values
    return before, flat(names["model"]) - before, names["loss"].item(), stats


def flat(model):
    return torch.cat([param.detach().flatten().clone() for param in model.parameters()])


@pytest.mark.parametrize("section", ["torch.amp", "apex"])
def test_both_programs_of_a_section_take_the_same_steps(section):
    theirs, by_hand = programs(section)[:2]
    before, moved, loss, _ = trained(theirs)
    same, mine, own_loss, stats = trained(by_hand)
    assert torch.equal(before, same)
    assert stats.steps > stats.skipped == 0
    assert moved.norm() > 0.01
    assert (moved - mine).norm() < 0.02 * moved.norm()  # FP16 has 11 bits, and sums are taken in other orders
    assert loss == pytest.approx(own_loss, rel=2e-3)
