"""Optimizers of other libraries: wrappers that have not called ``super().__init__``, and numbers of their own."""

import contextlib
from typing import ClassVar

import pytest
import pytorch_optimizer
import torch
from torch import nn

import mezzo
from mezzo import PolicyError

from .loops import INF, LOW, assert_near, assert_same, loss_of, network, on_disk

WRAPPED = {
    "Lookahead": lambda params: pytorch_optimizer.Lookahead(torch.optim.AdamW(params, lr=1e-2, eps=1e-4), k=3),
    "Lookahead of mezzo's": lambda params: pytorch_optimizer.Lookahead(mezzo.optim.AdamW(params, lr=1e-2, eps=1e-4)),
    "OrthoGrad": lambda params: pytorch_optimizer.OrthoGrad(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    "Magma": lambda params: pytorch_optimizer.Magma(torch.optim.AdamW(params, lr=1e-2, eps=1e-4)),
    "both": lambda params: pytorch_optimizer.Lookahead(pytorch_optimizer.OrthoGrad(torch.optim.SGD(params, lr=0.1))),
    "Prodigy": lambda params: pytorch_optimizer.Prodigy(params),
    "DAdaptAdam": lambda params: pytorch_optimizer.DAdaptAdam(params),
}
STEPS, BAD, SAVED = 8, 2, 4


def begun(style, make, policy):
    model = network()
    optimizer = make(model.parameters())
    begin = {"five lines": mezzo.MixedPrecision, "attach": mezzo.attach}.get(style, lambda *_: None)
    return model, optimizer, begin(model, optimizer, policy)


def trained(style, make, policy=None):
    """The weights after some steps, one of which overflows; between two of them all comes from a checkpoint."""
    model, optimizer, amp = begun(style, make, policy)
    for number in range(STEPS):
        loss = loss_of(model, number, amp)
        amp.backward(loss) if style == "five lines" else loss.backward()
        before = [param.detach().clone() for param in model.parameters()]
        if number == BAD and amp is not None:
            model[0].bias.grad[0] = INF
        torch.manual_seed(number)  # of optimizers that draw
        if number != BAD or amp is not None:
            (amp if style == "five lines" else optimizer).step()
        if number == BAD:
            assert_same(before, [param.detach() for param in model.parameters()])
        optimizer.zero_grad()
        if number == SAVED and amp is not None:
            scale = float(amp.loss_scale)
            with contextlib.closing(amp):
                saved = on_disk(model, optimizer, *([amp] if style == "five lines" else []))
            model, optimizer, amp = begun(style, make, policy)
            for part, state in zip((model, optimizer, amp), saved, strict=style == "five lines"):
                part.load_state_dict(state)
            assert float(amp.loss_scale) == scale
    with contextlib.closing(amp) if amp is not None else contextlib.nullcontext():
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", WRAPPED)
def test_they_train_skip_and_are_saved(name, policy):
    right = trained("plain", WRAPPED[name])
    for style in ("five lines", "attach"):
        weights = trained(style, WRAPPED[name], policy)
        assert_near(weights, right, list(network().parameters()), share=0.1)


def test_their_own_steps_are_refused_beside_the_five_lines():
    model, optimizer, amp = begun("five lines", WRAPPED["OrthoGrad"], LOW[0])
    amp.backward(loss_of(model, 0, amp))
    with pytest.raises(mezzo.StateError, match="behind the session's back"):
        optimizer.step()


class Growing(torch.optim.AdamW):
    """An option of its own beside torch's."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.param_groups[0]["growth_rate"] = INF


@pytest.mark.parametrize("options", [{}, {"lr": INF}, {"weight_decay": float("nan")}])
def test_of_torchs_own_options_alone_it_is_known_what_infinity_does(options):
    model, optimizer, amp = begun("five lines", lambda params: Growing(params), "O0")
    optimizer.param_groups[0].update(options)
    amp.backward(loss_of(model, 0, amp))
    with pytest.raises(PolicyError, match="every weight would be NaN") if options else contextlib.nullcontext():
        amp.step()


class Asked(torch.Tensor):
    """A class of a program's that is asked for each function of torch's."""

    functions: ClassVar[set] = set()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.functions.add(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_asks_a_class_of_parameters_for_its_functions_as_torch_does(fused):
    functions = []
    for has_session in (False, True):
        model = nn.Linear(3, 2)
        for name, param in [*model.named_parameters()]:
            setattr(model, name, nn.Parameter(param.detach().as_subclass(Asked)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        amp = mezzo.MixedPrecision(model, optimizer, "O0") if has_session else None
        for _ in range(2):
            loss = model(torch.ones(4, 3)).as_subclass(torch.Tensor).sum()
            amp.backward(loss) if has_session else loss.backward()
            Asked.functions.clear()
            (amp or optimizer).step()
            functions.append({*Asked.functions})
            optimizer.zero_grad()
    plain, plain_again, first, again = functions
    assert torch.is_complex in plain_again
    assert plain <= first
    assert plain_again <= again
