"""Where the logits are the largest activation: their bytes, the cure, and what is none."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo

POLICIES = [f"{level},{dtype},emulate=true" for level in ("O1", "O2") for dtype in ("bf16", "fp16")]


class Head(nn.Module):
    def __init__(self, classes=1000, width=16):
        super().__init__()
        self.body, self.head = nn.Linear(16, width), nn.Linear(width, classes)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


class WithLoss(Head):
    """The loss is the model's own: of the hidden rows, the head and the targets."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return self.loss(hidden, self.head, targets_of(hidden))


def targets_of(output):
    return torch.zeros(output.shape[:-1], dtype=torch.long)


def cross_entropy(output):
    return functional.cross_entropy(output.flatten(0, -2), targets_of(output).flatten())


def findings(model, rows=64, *, policy=POLICIES[0], loss=None, shape=None):
    x = torch.randn(shape or (rows, 16))
    all_findings = mezzo.explain(model, x, policy=policy, loss=loss).findings
    return [finding for finding in all_findings if finding.kind == "logits"]


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_are_named_with_their_bytes(policy):
    (finding,) = findings(Head(), policy=policy, loss=cross_entropy)
    # The product in 16 bits; its cast, the log-softmax, its gradient, that of the cast in FP32; and in 16 bits.
    size = 64 * 1000
    assert f"64×1,000, {4 * size / 1024:.3g} KiB in FP32, {20 * size / 1024**2:.3g} MiB with casts" in finding.text
    assert finding.text.endswith("(hidden, head.weight, target, rows=32), which holds 32 rows at a time")
    assert finding.where.startswith("head linear")


def test_many_rows_need_no_size_of_a_chunk():
    (finding,) = findings(Head(), loss=cross_entropy, shape=(4, 512, 16))
    assert "2,048×1,000" in finding.text
    assert finding.text.endswith("(hidden, head.weight, target), which holds 1,024 rows at a time")


def test_the_loss_is_known_by_any_name():
    for loss in (
        lambda output: functional.nll_loss(torch.log_softmax(output, -1), targets_of(output)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ):
        target = () if not isinstance(loss, nn.Module) else (torch.zeros(64, dtype=torch.long),)
        assert len(findings(Head(), loss=lambda output, loss=loss, target=target: loss(output, *target))) == 1
    assert len(findings(Head(), policy="O0", loss=cross_entropy)) == 1


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(1000, 16), nn.Linear(16, 16)

    def forward(self, x):
        tokens = x.long().abs()[..., 0]
        return cross_entropy(self.body(self.embed(tokens)) @ self.embed.weight.mT)


def test_a_head_that_is_an_embedding_is_named():
    assert [len(findings(Tied(), policy=policy)) for policy in POLICIES] == [1] * len(POLICIES)


def in_chunks_by_hand(hidden, head, target):
    return sum(cross_entropy(head(part)) for part in hidden.split(64))


def test_after_the_cure_there_is_none():
    cured = WithLoss(lambda hidden, head, target: mezzo.linear_cross_entropy(hidden, head.weight, target, rows=64))
    for policy in POLICIES:
        assert len(findings(WithLoss(lambda hidden, head, _: cross_entropy(head(hidden))), 256, policy=policy)) == 1
        assert findings(cured, 256, policy=policy) == []
    assert findings(WithLoss(in_chunks_by_hand), 256) == []


class Scores(nn.Module):
    """Scores of 64 by 64, the largest tensor, which is a product of no weight."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        x = self.body(x)
        return x @ x.mT


class Deep(Head):
    """As many layers as asked for, of some width; and the head."""

    def __init__(self, layers, width):
        super().__init__(classes=100, width=width)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        return self.head(self.layers(torch.relu(self.body(x))))


def distilled(output):
    return functional.kl_div(
        torch.log_softmax(output, -1), torch.full_like(output, 1e-3).float(), reduction="batchmean"
    )


@pytest.mark.parametrize(
    "model, loss",
    [
        pytest.param(Head(4, 256), cross_entropy, id="few classes"),
        pytest.param(Scores(), lambda scores: torch.softmax(scores, -1).square().sum(), id="scores of attention"),
        pytest.param(Scores(), cross_entropy, id="a contrast of rows"),
        pytest.param(Deep(0, 300), cross_entropy, id="a larger activation"),
        pytest.param(Deep(30, 90), cross_entropy, id="many others"),
        pytest.param(Head(), lambda output: output.float().square().mean(), id="another loss"),
        pytest.param(Head(), lambda output: torch.log_softmax(output, 0).mean(), id="another dimension"),
        pytest.param(Head(), distilled, id="distillation"),
        pytest.param(Head(), lambda output: cross_entropy(torch.tanh(output)), id="logits with a bound"),
    ],
)
def test_what_is_no_large_logits_is_no_finding(model, loss):
    shape = (2, 64, 4) if isinstance(model, Scores) else (64, 16)
    assert [findings(model, policy=policy, loss=loss, shape=shape) for policy in POLICIES] == [[]] * len(POLICIES)


def test_so_few_rows_are_no_chunks():
    assert findings(Head(), rows=32, loss=cross_entropy) == []
