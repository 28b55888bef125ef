"""One helper binds names for a while, and puts back what it found."""

import types

import pytest
import torch
from torch import nn

from mezzo.patches import patch


class Base:
    def inherited(self):
        return "plain"

    @staticmethod
    def static():
        return "plain"


class Below(Base):
    pass


PLACES = ["class", "class below", "object", "module", "part of a model"]


@pytest.mark.parametrize("owner", [Base, Below, Base(), types.ModuleType("made"), nn.Linear(2, 2)], ids=PLACES)
@pytest.mark.parametrize("name", ["inherited", "static", "forward"])
def test_a_name_is_bound_and_what_stood_there_is_put_back(owner, name):
    if not hasattr(owner, name):
        setattr(owner, name, lambda *_: "plain")
    before = dict(vars(owner))
    undo = patch(owner, name, lambda *_: "bound")
    assert getattr(owner, name)() == "bound"
    undo()
    assert dict(vars(owner)) == before
    undo()  # a second time changes nothing
    assert dict(vars(owner)) == before


def test_what_others_have_bound_since_stays():
    model = nn.Linear(2, 2)
    undo = patch(model, "forward", lambda x: x)
    model.forward = theirs = lambda x: x + 1
    undo()
    assert model.forward is theirs
    assert torch.equal(model(torch.zeros(1)), torch.ones(1))
