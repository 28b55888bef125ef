"""docs_lm: the text, its split, and the metric."""

import numpy as np
import pytest
import torch
from torch import nn


@pytest.fixture(scope="module")
def script(load_family):
    return load_family("docs_lm")


@pytest.fixture(scope="module")
def text(script):
    return torch.tensor(list(script.divide(script.topics)[1].encode()), dtype=torch.uint8)


def test_no_paragraph_is_on_both_sides_and_none_is_lost(script):
    sides = [[p.strip("\n") for p in side.split("\n\n")] for side in script.divide(script.topics)]
    train, held_out = map(set, sides)
    assert [len(train), len(held_out)] == [len(side) for side in sides]
    assert not train & held_out
    assert {p.strip("\n") for topic in script.topics.values() for p in topic.split("\n\n")} <= train | held_out | {""}


def test_every_tenth_topic_in_alphabetical_order_is_held_out(script):
    topics = {f"t{number:02}": f"text {number}" for number in reversed(range(25))}
    train, held_out = script.divide(topics)
    assert held_out == "text 0\n\n\ntext 10\n\n\ntext 20"
    assert train.split("\n\n\n") == [f"text {n}" for n in range(25) if n % 10]


class Constant(nn.Module):
    """Scores that do not depend on the text."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def forward(self, text):
        return self.scores.expand(*text.shape, 256)


def test_bits_per_byte_of_models_whose_score_is_known(script, text):
    assert script.bits_per_byte(Constant(torch.zeros(256)), text, "cpu") == pytest.approx(8.0, abs=1e-5)
    # byte frequencies of exactly the scored bytes give their entropy
    end = (len(text) - 1) // 64 * 64
    shares = np.bincount(text.numpy()[1 : end + 1], minlength=256) / end
    entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()
    scores = torch.from_numpy(np.log(np.maximum(shares, 1e-30))).float()
    assert script.bits_per_byte(Constant(scores), text, "cpu") == pytest.approx(entropy, abs=1e-4)
