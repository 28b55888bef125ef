"""What a program does to models and optimizers between two steps is in the plan of the next: each against plain torch.

Row by row what tests/acceptance/structure.py draws in sequences: the weights are those of the same program in FP32,
and right after a pass and a step the plan in force is the one that would be made then.
"""

import contextlib
import functools

import pytest
import torch
from torch import nn

import mezzo
from mezzo.session.grad_scaler import SessionScaler
from mezzo.session.session import engine_of

from .loops import assert_near, batch

STYLES = {
    "five lines": "O2,fp16,emulate=true,loss_scale=dynamic(init=1024)",
    "attach": "O2,fp16,emulate=true,loss_scale=dynamic(init=1024)",
    "attach in bfloat16": "O2,bf16,emulate=true",
}
LIBRARIES = {
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


class Program:
    """Two optimizers over three layers, of which the last is nobody's yet; in plain torch where no style is given."""

    def __init__(self, style, library):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            self.values = [torch.randn(8, 8) for _ in range(2)]
        self.first, self.second, self.third = self.model
        self.make = LIBRARIES[library]
        self.optimizers = [self.make(self.first.parameters()), self.make(self.second.parameters())]
        begin = mezzo.MixedPrecision if style == "five lines" else mezzo.attach
        self.style, self.amp = style, style and begin(self.model, self.optimizers, STYLES[style])
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}

    def step(self, number):
        with self.amp.autocast() if self.style == "five lines" else contextlib.nullcontext():
            loss = self.model(batch(number)[0]).square().mean()
        self.amp.backward(loss) if self.style == "five lines" else loss.backward()
        self.is_planned()
        if self.style == "five lines":
            self.amp.step()
        else:
            for optimizer in self.optimizers:
                optimizer.step()
        self.is_planned(writes=True)
        for part in (self.amp or self.model, self.model):
            part.zero_grad()

    def is_planned(self, *, writes=False):
        if self.amp is not None:
            differences = engine_of(self.amp).plan.differences(engine_of(self.amp).planned())
            assert not [text for text in differences if writes or not ("deciding" in text or "writers" in text)]

    def group(self, number=0):
        return self.optimizers[number].param_groups[-1]

    def ended(self):
        values = {name: value.clone() for name, value in self.model.state_dict().items()}
        if self.amp is not None:
            self.amp.close()
        return values


# Each row does the same to a program under mezzo and to one in plain torch.


def a_group_is_added(program):
    program.optimizers[0].add_param_group({"params": list(program.third.parameters())})


def a_list_grows(program):
    program.group()["params"] += program.third.parameters()


def a_list_shrinks(program):
    del program.group()["params"][0]


def another_list(program):
    program.group()["params"] = [program.first.bias, program.third.weight]


def a_parameter_goes_to_another_optimizer(program):
    """To the front of the next: all of them one after the other are as before."""
    program.group(1)["params"].insert(0, program.group()["params"].pop())


def a_parameter_is_replaced(program):
    program.first.weight = nn.Parameter(program.values[0].clone())
    program.group()["params"][0] = program.first.weight


def a_plain_parameter_is_replaced(program):
    """By one of the same class, dtype and shape."""
    program.first.bias = nn.Parameter(program.values[0][0].clone())
    program.group()["params"][1] = program.first.bias


def tensors_are_swapped(program):
    """What torch.utils offers to put another tensor in the place of one, whoever holds it."""
    state = program.optimizers[0].state
    entry = state.pop(program.first.weight, None)
    torch.utils.swap_tensors(program.first.weight, nn.Parameter(program.values[0].clone()))
    if entry is not None:
        state[program.first.weight] = entry


def other_memory(program):
    program.first.weight.data = program.values[0].clone()


def memory_moves(program):
    program.model._apply(torch.clone)


def weights_are_assigned(program):
    """Under mezzo into the parameters that are there; plain torch's optimizers would have to be given the new ones."""
    values = {"weight": program.values[0].clone(), "bias": torch.zeros(8)}
    program.first.load_state_dict(values, assign=program.amp is not None)


def a_layer_is_frozen(program):
    program.first.weight.requires_grad = False


def a_layer_thaws(program):
    program.third.requires_grad_(True)
    program.optimizers[1].add_param_group({"params": list(program.third.parameters())})


def state_is_cleared(program):
    program.optimizers[0].state.clear()


def halved(optimizer, *_):
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)


def a_hook_before_steps(program):
    program.optimizers[0].register_step_pre_hook(halved)


def a_hook_of_a_parameter(program):
    program.first.weight.register_hook(lambda gradient: gradient * -0.5)


def another_step(program):
    """A program's own, around the one that is there."""
    optimizer, plain = program.optimizers[1], program.optimizers[1].step

    def step(*args, **kwargs):
        halved(optimizer)
        return plain(*args, **kwargs)

    optimizer.step = step


def no_longer_fused(program):
    for group in program.optimizers[0].param_groups:
        if group.get("fused"):
            group["fused"] = False


def an_optimizer_joins(program):
    added = program.make(program.third.parameters())
    if program.amp is not None:
        program.amp.add(added)
    program.optimizers.append(added)


ROWS = [
    a_group_is_added, a_list_grows, a_list_shrinks, another_list, a_parameter_goes_to_another_optimizer,
    a_parameter_is_replaced, a_plain_parameter_is_replaced, tensors_are_swapped, other_memory, memory_moves,
    weights_are_assigned, a_layer_is_frozen, a_layer_thaws, state_is_cleared, a_hook_before_steps,
    a_hook_of_a_parameter, another_step, no_longer_fused, an_optimizer_joins,
]  # fmt: skip


#: What plain torch has no call for, or another one.
LACKS = {"five lines": {an_optimizer_joins}, "attach": {another_step}, "attach in bfloat16": {another_step}}
CASES = [(style, library) for style in STYLES for library in LIBRARIES if library == "mezzo" or "bfloat" not in style]


@pytest.mark.filterwarnings("ignore:(?s).*carry the loss scale")
@pytest.mark.parametrize(
    "row, style, library",
    [(row, *case) for row in ROWS for case in CASES if row not in LACKS[case[0]]],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_next_step_knows(row, style, library):
    mine, plain = Program(style, library), Program(None, library)
    for program in (mine, plain):
        for number in range(2):
            program.step(number)
        row(program)
        for number in range(2, 5):
            program.step(number)
    values, true = mine.ended(), plain.ended()
    for name, start in plain.start.items():
        if torch.equal(true[name], start):
            assert torch.equal(values[name], start), f"{name} has moved"
        else:
            assert_near([values[name]], [true[name]], [start], share=0.1)


def test_a_step_with_a_closure_goes_by_what_optimizers_share_then():
    """Two that have come to share a parameter have one window, of which nothing is left after the step of either."""
    mine, plain = Program("five lines", "SGD"), Program(None, "SGD")
    for program in (mine, plain):
        program.step(0)
        program.group()["params"].append(program.second.bias)
        if program.amp:
            program.amp.step(program.optimizers[1], closure=functools.partial(evaluated, program, 1))
        else:
            program.optimizers[1].step(functools.partial(evaluated, program, 1))
        for part in (program.amp or program.model, program.model):
            part.zero_grad()
        program.step(2)
    values, true = mine.ended(), plain.ended()
    for name in plain.start:
        if not torch.equal(true[name], plain.start[name]):
            assert_near([values[name]], [true[name]], [plain.start[name]], share=0.1)


def evaluated(program, number):
    """A closure's loss, with its gradients."""
    program.model.zero_grad()
    with program.amp.autocast() if program.amp else contextlib.nullcontext():
        loss = program.model(batch(number)[0]).square().mean()
    program.amp.backward(loss) if program.amp else loss.backward()
    return loss


def test_a_scaler_over_a_session_tells_its_plan():
    """Gradients of a framework's loop are FP32, which a session in the five lines may have in 16 bits."""
    program = Program("five lines", "mezzo")
    assert engine_of(program.amp).plan.windows[0].halves
    SessionScaler(program.amp)
    program.is_planned(writes=True)
    assert not engine_of(program.amp).plan.windows[0].halves
    program.ended()
