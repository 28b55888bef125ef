"""Edits of an optimizer's ``state`` and groups: what a program puts there is what the next step goes on from."""

import collections

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from .edits import names
from .loop import Loop
from .rules import LR
from .subject import STATES
from .twins import rule

#: Ways to edit a state, of all weights or of one.
WHOLE = ("clear", "defaultdict")
OF_ONE = ("pop", "empty", "zeros", "step", "update", "half", "zero")


class States(Loop):
    """What torch.optim takes from its users."""

    @rule(number=st.integers(0, 1), how=st.sampled_from(WHOLE))
    def edit_state(self, number, how):
        """All of it."""
        number %= len(self.oracle.groups)
        optimizer = self.subject.optimizers[number]
        if how == "clear":
            optimizer.state.clear()
        else:
            optimizer.state = collections.defaultdict(dict)
        for weight in self.weights_of(self.oracle.groups[number]):
            weight.states, weight.count = {}, 0

    @rule(name=names, how=st.sampled_from(OF_ONE), key=st.integers(0, 1), as_tensor=st.booleans())
    def edit_state_of_one(self, name, how, key, as_tensor):
        optimizer, param, weight = self.subject.owner(name), self.subject.param(name), self.oracle.weights[name]
        if optimizer is None:
            return
        state = optimizer.state.get(param)
        if how in ("pop", "empty"):
            optimizer.state.pop(param, None)
            if how == "empty":
                optimizer.state[param] = {}
            weight.states, weight.count = {}, 0
            return
        key = STATES[self.config.rule][key % len(STATES[self.config.rule])]
        if not state:
            return
        if how == "step":
            if "step" in state:
                is_number = self.config.library == "mezzo" and not as_tensor
                state["step"] = 0 if is_number else torch.zeros_like(torch.as_tensor(state["step"]))
                weight.count = 0
        elif isinstance(state.get(key), torch.Tensor) and state[key].is_floating_point():
            values = weight.states.get(key, np.zeros(self.config.shapes[name]))
            with torch.no_grad():
                if how == "zeros":
                    state[key] = torch.zeros_like(state[key])
                elif how == "update":
                    optimizer.state[param].update({key: state[key] * 0.5})
                else:
                    state[key].mul_(0.5) if how == "half" else state[key].zero_()
            weight.states = {**weight.states, key: values * 0.0 if how in ("zeros", "zero") else values * 0.5}

    @precondition(lambda self: not self.oracle.is_open)
    @rule(number=st.integers(0, 1), forgets=st.booleans())
    def replace_group(self, number, forgets):
        """Remove the last group, and add its parameters again; their state stays unless it is forgotten."""
        number %= len(self.oracle.groups)
        optimizer, group = self.subject.optimizers[number], self.oracle.groups[number]
        taken = optimizer.param_groups.pop()
        members = [
            name for name in group.members if any(self.subject.param(name) is param for param in taken["params"])
        ]
        if forgets:
            for name in members:
                optimizer.state.pop(self.subject.param(name), None)
                self.oracle.weights[name].states, self.oracle.weights[name].count = {}, 0
        optimizer.add_param_group({"params": taken["params"]})
        group.lr.update(dict.fromkeys(members, LR))
