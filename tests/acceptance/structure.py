"""What a session is made of changes: parameters replaced and moved, groups written by hand, hooks, new optimizers."""

import copy

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from .edits import names
from .loop import MOST_CALLS, Loop, Share, drawn, needs, passes
from .oracle import Group
from .rules import LR
from .subject import array
from .twins import rule

#: Ways to write the same groups once more.
SAME = ("list", "reversed", "dict", "groups", "apart")


def is_clear(self):
    """No gradient anywhere: what a step has left is known by where it lies."""
    return not any(group.gradients for group in self.oracle.groups)


class Structure(Loop):
    """What a program does to models and optimizers that a session knows, and tells nobody of."""

    def stored_now(self, name):
        """The dtype of the high half of a parameter, where the one that stands there now has two."""
        is_whole = type(self.subject.param(name)) is torch.nn.Parameter
        return "" if is_whole else self.config.stored(name)[2]

    # Parameters --------------------------------------------------------------------------------------------------

    @needs("structure")
    @rule(name=names, values=st.integers(0, 99), trains=st.booleans(), keeps_state=st.booleans())
    def replace_parameter(self, name, values, trains, keeps_state):
        """Another parameter takes the place of one, in its module and in its optimizer's group."""
        weight, old, optimizer = self.oracle.weights[name], self.subject.param(name), self.subject.owner(name)
        group = self.oracle.owner(name)
        trains = trains or not self.driver.has("freezing")
        rows, columns = self.config.shapes[name]
        few = drawn(values, True)[: min(rows, 3) * columns].reshape(-1, columns) + 0.25
        new = torch.nn.Parameter(torch.from_numpy(np.resize(few, (rows, columns))).to(old.dtype), requires_grad=trains)
        for module in self.subject.modules_of(name):
            module.weight = new
        weight.exact, weight.trains, weight.half = array(new), trains, self.stored_now(name)
        if optimizer is not None:
            for options in optimizer.param_groups:
                options["params"] = [new if member is old else member for member in options["params"]]
            state = optimizer.state.pop(old, None)
            if keeps_state and state is not None:
                optimizer.state[new] = state
            else:
                weight.states, weight.count = {}, 0
        if group is not None and name in group.gradients:
            group.touch()
            del group.gradients[name]

    @needs("structure")
    @rule(how=st.sampled_from(["model", "part", "to"]))
    def move(self, how):
        """All memory is another, as after ``model.to(device)``."""
        model = self.subject.model
        if how == "to":
            model.to("cpu")
        else:
            (model if how == "model" else model.second)._apply(torch.clone)
        for name, weight in self.oracle.weights.items():
            weight.half = self.stored_now(name)

    @needs("structure")
    @precondition(lambda self: not self.oracle.is_open)
    @rule(name=names, assigns=st.booleans(), factor=st.sampled_from([1.0, 0.5, -1.0]))
    def load_weights(self, name, assigns, factor):
        """``assign=True`` writes into the parameters that are there, which optimizers know."""
        weight, module = self.oracle.weights[name], self.subject.model.get_submodule(name.partition(".")[0])
        state = {key: value * factor for key, value in module.state_dict().items()}
        before = module.weight
        if assigns and not self.driver.has("session"):
            return  # which is torch's own there, and takes parameters from their optimizers
        module.load_state_dict(state, assign=assigns)
        assert module.weight is before, "an optimizer knows another parameter"
        weight.half, value = self.stored_now(name), weight.exact * factor
        weight.exact = array(module.weight)
        assert (np.abs(weight.exact - value) <= weight.grid).all(), f"{name}: {weight.exact} was loaded from {value}"

    # Groups ------------------------------------------------------------------------------------------------------

    @needs("structure")
    @rule(number=st.integers(0, 1), how=st.sampled_from(SAME))
    def write_groups(self, number, how):
        """The same parameters in other lists, in another order, or in more groups."""
        optimizer = self.subject.optimizers[number % len(self.subject.optimizers)]
        last = optimizer.param_groups[-1]
        if how == "list":
            last["params"] = list(last["params"])
        elif how == "reversed":
            last["params"].reverse()
        elif how == "dict":
            optimizer.param_groups[-1] = dict(last)
        elif how == "groups":
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        elif len(last["params"]) > 1:
            optimizer.param_groups.append({**last, "params": [last["params"].pop()]})

    @needs("structure")
    @precondition(is_clear)
    @rule(name=names)
    def leave_group(self, name):
        """An optimizer gives up a parameter, with its state: ``state_dict()`` of torch's takes no other."""
        optimizer, group, param = self.subject.owner(name), self.oracle.owner(name), self.subject.param(name)
        if optimizer is None or len(group.members) == 1 or param.grad is not None:
            return
        for options in optimizer.param_groups:
            options["params"] = [other for other in options["params"] if other is not param]
        optimizer.param_groups = [options for options in optimizer.param_groups if options["params"]]
        optimizer.state.pop(param, None)
        self.oracle.weights[name].states, self.oracle.weights[name].count = {}, 0
        self.subject.members[self.subject.optimizers.index(optimizer)].remove(name)
        group.members.remove(name)
        del group.lr[name]

    @needs("structure")
    @precondition(is_clear)
    @rule(name=names, number=st.integers(0, 1), first=st.booleans(), apart=st.booleans())
    def join_group(self, name, number, first, apart):
        """A parameter that no optimizer has, or that another one has, joins a list, or comes as a group."""
        number %= len(self.oracle.groups)
        optimizer, group, param = self.subject.optimizers[number], self.oracle.groups[number], self.subject.param(name)
        if group is self.oracle.owner(name) or param.grad is not None:
            return
        self.leave_group(name)
        if self.oracle.owner(name) is not None:
            return
        if apart or self.config.library == "fused":
            optimizer.add_param_group({"params": [param]})
            group.lr[name] = LR
        else:
            params = optimizer.param_groups[-1]["params"]
            params.insert(0 if first else len(params), param)
            group.lr[name] = next(iter(group.lr.values()))
        self.subject.members[number].append(name)
        group.members.append(name)

    @needs("adding")
    @precondition(lambda self: is_clear(self) and len(self.oracle.groups) == 1)
    @precondition(lambda self: self.oracle.owner("late.weight") is None)
    @rule()
    def add_optimizer(self):
        """One that is made later, for what no other has."""
        param = self.subject.param("late.weight")
        if param.grad is not None:
            return
        optimizer = self.config.optimizer([param])
        self.subject.optimizers.append(optimizer)
        self.subject.members.append(["late.weight"])
        self.subject.plain = self.subject.marks() | self.subject.plain
        self.amp.add(optimizer)
        self.oracle.groups.append(Group(["late.weight"], self.config.rule, {"late.weight": LR}))

    @needs("structure")
    @precondition(lambda self: self.driver.train is None)
    @rule(number=st.integers(0, 1))
    def reload_state(self, number):
        """An optimizer's state as it would come from a file; an attached session's comes with it."""
        self.update_if_it_waits()
        self.clear("session")
        optimizer = self.subject.optimizers[number % len(self.subject.optimizers)]
        state = copy.deepcopy(optimizer.state_dict())
        if "mezzo" in state:
            self.oracle.commit()
        optimizer.load_state_dict(state)
        if "mezzo" in state:
            self.oracle.loaded(self.oracle)

    # Hooks -------------------------------------------------------------------------------------------------------

    @needs("structure")
    @precondition(lambda self: self.window_calls() < MOST_CALLS and self.driver.may_add(self.oracle))
    @rule(batch=passes, name=names, hooked=st.sampled_from(["tensor", "module", "accumulated"]))
    def pass_with_a_hook(self, batch, name, hooked):
        """Added before a pass, and removed after it: what it makes of a gradient counts once."""
        param, before, seen = self.subject.param(name), self.oracle.copy(), []
        weight = self.oracle.weights[name]
        value, gradients, finite = self.loss({**batch, "kind": "plain", "is_coarse": True})
        if not value.requires_grad or not gradients or not weight.trains:
            self.oracle = before
            return
        if hooked == "tensor":
            hook = param.register_hook(lambda gradient: -gradient)
            gradients = {**gradients, name: -gradients[name]}
        elif hooked == "module":
            module = self.subject.model.get_submodule(name.partition(".")[0])
            hook = module.register_full_backward_pre_hook(lambda *_: seen.append(name))
        else:
            hook = param.register_post_accumulate_grad_hook(lambda leaf: seen.append(array(leaf.grad)))
        groups = self.driver.groups(self.oracle, self.oracle.groups, gradients.keys())
        try:
            if hooked == "module":  # whose hooks a graph gets when it is made
                self.oracle = before
                value, gradients, finite = self.loss({**batch, "kind": "plain", "is_coarse": True})
                groups = self.driver.groups(self.oracle, self.oracle.groups, gradients.keys())
            self.driver.backward(value, None)
        finally:
            hook.remove()
        self.oracle.begin(groups)
        self.oracle.accumulate(groups, gradients, finite=finite)
        self.is_planned()
        if hooked == "accumulated" and self.oracle.owner(name) in groups and self.oracle.is_plain:
            (gradient,) = seen
            expected = self.oracle.owner(name).gradients[name]
            assert np.array_equal(gradient, expected, equal_nan=True), f"a hook sees {gradient}, and not {expected}"

    @needs("structure", "session")
    @precondition(lambda self: self.window_calls() < MOST_CALLS and self.config.level != "O3")
    @rule(batch=passes, number=st.integers(0, 1))
    def step_with_a_hook_behind(self, batch, number):
        """A hook after a step sees what was updated."""
        self.backward(batch, None)
        number %= len(self.oracle.groups)
        group, optimizer, seen = self.oracle.groups[number], self.subject.optimizers[number], {}
        if group.window is None or not group.gradients or group.window.assigned:
            return

        def looks(*_):
            seen.update({name: array(self.subject.param(name)) for name in group.members})

        handle = optimizer.register_step_post_hook(looks)
        try:
            self.take_step([group], lambda: self.driver.step(self.chosen(number)[1]))
        finally:
            handle.remove()
        for name, value in seen.items():
            exact = self.oracle.weights[name].exact
            assert np.array_equal(value, exact), f"{name} in a hook after a step: {value}, and not {exact}"
        self.clear("session")

    # Another model, which shares a weight -------------------------------------------------------------------------

    @needs("beside")
    @precondition(lambda self: self.config.beside and self.window_calls() < MOST_CALLS)
    @precondition(lambda self: self.driver.may_add(self.oracle))
    @rule(batch=passes)
    def pass_of_the_other_model(self, batch):
        """A model of the same session, that reads a weight of the first."""
        before, name = self.oracle.copy(), "second.weight"
        share = Share(self.config, {**batch, "kind": "plain", "is_coarse": True}, self.oracle.next_scale())
        with self.driver.region():
            outputs = {name: self.subject.model.beside[0](share.x)}
            value = (share.factors[name] * (outputs[name] - outputs[name].detach())).sum()
        self.check_outputs(outputs, share.widths)
        if not value.requires_grad:
            self.oracle = before
            return
        groups = self.driver.groups(self.oracle, self.oracle.groups, {name})
        self.driver.backward(value, None)
        self.oracle.begin(groups)
        self.oracle.accumulate(groups, {name: share.gradients[name]}, finite=True)
        self.is_planned()
