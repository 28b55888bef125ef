"""docs-lm: the text, its split, its reference line, and the model's sense of time."""

import hashlib
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.errors import UnsupportedError
from mezzo.recipes.docs_lm import CONTEXT, DOCS_LM, ByteGPT, as_bytes, bigram_entropy, divide

#: By fingerprint of the topics, which change with Python's documentation: bytes of both sides, split, entropy.
KNOWN = {
    # CPython 3.11.7
    "6c7d68cee92383c2d38e91c095bc7f45b93d936d39b8d4c5fe1b718baf09dc63": {
        "bytes": (349824, 24326),
        "split": "6288edf23d9a46e0a593a6be5b305d6355a519158654a88a8cf38a176cae2ca7",
        "entropy": 3.5050,
    },
}


@pytest.fixture(scope="module")
def topics():
    from pydoc_data.topics import topics

    return topics


@pytest.fixture(scope="module")
def split():
    return DOCS_LM.load()


def test_golden_facts_of_the_text(topics, split):
    whole = "".join(f"{title}\0{topics[title]}\0" for title in sorted(topics))
    known = KNOWN.get(hashlib.sha256(whole.encode()).hexdigest())
    if known is None:
        pytest.skip(f"no golden facts written down for the documentation of Python {sys.version.split()[0]}")
    assert (len(split.train[0]), len(split.held_out[0])) == known["bytes"]
    assert split.sha256() == known["split"]
    assert bigram_entropy(split.held_out[0]) == pytest.approx(known["entropy"], abs=5e-5)


def test_no_paragraph_is_on_both_sides(topics):
    train, held_out = divide(topics)
    paragraphs = [[p.strip("\n") for p in text.split("\n\n")] for text in (train, held_out)]
    both = set(paragraphs[0]) & set(paragraphs[1])
    assert all(len(side) == len(set(side)) for side in paragraphs)
    assert both == set()


def test_no_paragraph_is_lost(topics):
    train, held_out = divide(topics)
    kept = {p.strip("\n") for text in (train, held_out) for p in text.split("\n\n")}
    assert {p.strip("\n") for text in topics.values() for p in text.split("\n\n")} <= kept | {""}


def test_divide_holds_out_every_tenth_topic_in_alphabetical_order():
    topics = {f"t{number:02}": f"text {number}" for number in reversed(range(25))}
    train, held_out = divide(topics)
    assert held_out == "text 0\n\n\ntext 10\n\n\ntext 20"
    assert train.split("\n\n\n") == [f"text {n}" for n in range(25) if n % 10]


def test_entropy_agrees_with_a_matrix_of_counts(split):
    text = split.held_out[0].numpy().astype(np.int64)
    counts = np.zeros((256, 256))
    np.add.at(counts, (text[:-1], text[1:]), 1.0)
    joint = counts / counts.sum()
    first = joint.sum(1)
    # H(next | first) = H(first, next) − H(first)
    entropy = (
        -(joint[joint > 0] * np.log2(joint[joint > 0])).sum() + (first[first > 0] * np.log2(first[first > 0])).sum()
    )
    assert bigram_entropy(split.held_out[0]) == pytest.approx(entropy, rel=1e-9)
    assert DOCS_LM.references(split) == {"bigram entropy of the held-out text": pytest.approx(entropy, rel=1e-9)}


def test_entropy_is_a_bound_that_a_bigram_model_of_the_training_text_respects(split):
    counts = np.ones((256, 256))
    train, text = (side[0].numpy().astype(np.int64) for side in (split.train, split.held_out))
    np.add.at(counts, (train[:-1], train[1:]), 1.0)
    probabilities = counts / counts.sum(1, keepdims=True)
    bits = -np.log2(probabilities[text[:-1], text[1:]]).mean()
    assert bigram_entropy(split.held_out[0]) < bits < 1.15 * bigram_entropy(split.held_out[0])


def test_targets_are_the_inputs_one_byte_later(split):
    inputs, following = next(DOCS_LM.batches(split, 0))
    assert inputs.shape == following.shape == (16, CONTEXT)
    assert torch.equal(inputs[:, 1:], following[:, :-1])
    text = bytes(split.train[0].tolist())
    for given, last in zip(inputs, following[:, -1], strict=True):
        assert bytes([*given.tolist(), int(last)]) in text


def test_the_model_does_not_look_ahead():
    model = DOCS_LM.build(0).eval()
    text = torch.randint(256, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 256
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40], after[:, 40])
    assert not torch.allclose(before[:, 63], after[:, 63])


def test_the_model_looks_back_and_knows_positions():
    model = DOCS_LM.build(0).eval()
    text = torch.full((1, CONTEXT), 65)
    changed = text.clone()
    changed[0, 0] = 66
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert not torch.allclose(before[0, 63], after[0, 63])
    assert not torch.allclose(before[0, 10], before[0, 11])


class Constant(nn.Module):
    """Scores that do not depend on the text."""

    def __init__(self, scores):
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, text):
        return self.scores.expand(*text.shape, 256)


def test_bits_per_byte_of_models_whose_score_is_known(split):
    with torch.no_grad():
        assert DOCS_LM.evaluate(Constant(torch.zeros(256)), split) == pytest.approx(8.0, abs=1e-5)  # float32 logits
        # byte frequencies of exactly the scored bytes give their entropy
        text = split.held_out[0].numpy()
        end = (len(text) - 1) // CONTEXT * CONTEXT
        shares = np.bincount(text[1 : end + 1], minlength=256) / end
        entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()
        scores = torch.from_numpy(np.log(np.maximum(shares, 1e-30))).float()
        assert DOCS_LM.evaluate(Constant(scores), split) == pytest.approx(entropy, abs=1e-4)
        assert math.isnan(DOCS_LM.evaluate(Constant(torch.full((256,), torch.nan)), split))


def test_dimensions_are_multiples_of_eight():
    assert all(size % 8 == 0 for param in ByteGPT().parameters() for size in param.shape)


def test_as_bytes_is_utf8():
    assert as_bytes("aé").tolist() == [97, 0xC3, 0xA9]


def test_a_python_without_its_documentation_is_told_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UnsupportedError, match=r"the recipe docs-lm needs the module pydoc_data\.topics\n  why"):
        DOCS_LM.load()
