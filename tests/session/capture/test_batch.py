"""The batch of a captured step: what is unlike the example is refused by name."""

import pytest
import torch

import mezzo
from mezzo import PolicyError

from ...support.tables import thinned
from .loops import Loop, batch, everything


def nested(loop):
    def train_step(batch, scale, *rest):
        return loop.train_step(batch["x"], batch["y"][0], torch.ones(()) * scale)

    x, y, _ = batch(0)
    return train_step, ({"x": x, "y": [y, "name"]}, 2.0, x)


WRONG = {
    r"batch\['x'\] is not like(?s:.*)float32 \[16, 8\] on cpu → float32 \[8, 8\](?s:.*)drop_last": lambda b, s, x: (
        {**b, "x": x[:8]},
        s,
        x,
    ),
    r"batch\['y'\]\[0\] is not like(?s:.*)int64 \[16\] on cpu → int32": lambda b, s, x: (
        {**b, "y": [b["y"][0].int(), "name"]},
        s,
        x,
    ),
    r"batch\['x'\] is not like(?s:.*)on cpu → float32 \[16, 8\] on meta": lambda b, s, x: (
        {**b, "x": x.to("meta")},
        s,
        x,
    ),
    r"batch\['x'\] is not like(?s:.*)→ None": lambda b, s, x: ({**b, "x": 3}, s, x),
    r"batch\['y'\]\[1\] is not what it was(?s:.*)'name' → 'other'": lambda b, s, x: (
        {**b, "y": [b["y"][0], "other"]},
        s,
        x,
    ),
    r"scale is not what it was in the example(?s:.*)2\.0 → 3\.0(?s:.*)torch\.tensor\(3\.0\)": lambda b, s, x: (
        b,
        3.0,
        x,
    ),
    r"scale is not what it was(?s:.*)2\.0 → 2$": lambda b, s, x: (b, 2, x),
    r"batch has another structure(?s:.*)→ \{'x'": lambda b, s, x: ({"x": x}, s, x),
    r"captured with 3 argument\(s\), and called with 2(?s:.*)batch, scale, rest\[0\]": lambda b, s, x: (b, s),
    r"rest\[0\] is not like the example(?s:.*), requires_grad": lambda b, s, x: (b, s, x.clone().requires_grad_()),
    r"2 problems(?s:.*)scale is not what(?s:.*)rest\[0\] is not": lambda b, s, x: (b, 5.0, x[:1]),
}


@pytest.mark.parametrize("match, graph", thinned(WRONG, [True, False], every=2))
def test_a_batch_unlike_the_example_is_refused(match, graph):
    loop = Loop()
    train_step, example = nested(loop)
    captured = loop.captured(train_step, example) if graph else mezzo.capture(train_step, *example)
    before, _ = everything(loop)
    with pytest.raises(PolicyError, match=match.replace("→ None", "→ 3").replace("→ 2$", "→ 2\n")):
        captured(*WRONG[match](*example))
    assert str(before) == str(everything(loop)[0])
    captured(*example)


def test_what_is_no_train_step_is_refused():
    with pytest.raises(
        PolicyError, match=r"a train step is a function, not Tensor(?s:.*)mezzo\.capture\(train_step, x, y\)"
    ):
        mezzo.capture(torch.ones(1), torch.ones(1))
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        mezzo.capture(lambda x, y: None, torch.ones(1))
