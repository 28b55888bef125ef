"""Evidence on what others have: parts that TorchScript runs, nested and sparse tensors, inference mode.

The oracle is the same computation written plainly: on the rows of the nested tensor, on the dense matrix, uncompiled.
"""

import pytest
import torch
from torch import nn

import mezzo
from mezzo import UnsupportedError, numerics, plan
from mezzo.overflow import Replay, locate
from mezzo.trace.measure import is_finite, range_of
from mezzo.trace.probes import lost_integers

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
]

ROWS = torch.linspace(-1, 1, 56).reshape(7, 8)


def jagged(x):
    return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)


def padded(x):
    return torch.nested.as_nested_tensor([x[:1], x[1:]])


class Net(nn.Module):
    """Two layers, and between them a part; the rows may be a nested tensor inside, or leave by a sparse product."""

    def __init__(self, part=None, given=None, inference=False, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.part = inner if part is None else part(inner)
        self.given, self.inference, self.sparse = given, inference, sparse

    def forward(self, x):
        if self.sparse:
            x = torch.eye(len(x)).to_sparse() @ x
        with torch.inference_mode(self.inference):
            h = self.first(x if self.given is None else self.given(x))
        h = self.last(self.part(h.clone() if self.inference else h))
        return h if self.given is None else torch.cat(h.unbind())


WAYS = {
    "scripted": {"part": torch.jit.script},
    "traced": {"part": lambda part: torch.jit.trace(part, torch.ones(2, 8))},
    "jagged": {"given": jagged},
    "nested": {"given": padded},
    "inference": {"inference": True},
    "sparse": {"sparse": True},
}


def step(model, scale, policy="O1,fp16,emulate=false"):
    def fn():
        with mezzo.autocast(policy, "cpu"):
            return model(ROWS * scale).float().square().mean()

    return fn


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale, loss_scale", [(1.0, 1.0), (1e6, 1.0), (1.0, 2.0**40)])
def test_the_same_culprit_as_of_the_plain_model(way, scale, loss_scale):
    """None where all is finite; the same kind, phase, dtype and numbers, forward and backward."""
    plain = Net()
    expected = locate(step(plain, scale), plain, loss_scale=loss_scale)
    model = Net(**WAYS[way])
    overflow = locate(step(model, scale), model, loss_scale=loss_scale)
    assert (overflow is None) == (expected is None)
    if overflow is not None:
        facts = [
            (overflow.kind, overflow.phase, overflow.tensor.dtype, overflow.tensor.num_inf)
            for overflow in (overflow, expected)
        ]
        assert facts[0] == facts[1]
        assert overflow.needed == pytest.approx(expected.needed, rel=1e-3)
        assert overflow.tensor.largest == pytest.approx(expected.tensor.largest, rel=1e-2)
        assert str(overflow)


@pytest.mark.parametrize("part", ["scripted", "traced"])
def test_a_number_that_a_scripted_part_makes(part):
    """It is the part's, and the cure is none that TorchScript knows nothing of."""
    model = Net(**WAYS[part])
    with torch.no_grad():
        dict(model.named_parameters())["part.0.weight"].mul_(1e6)
    overflow = locate(step(model, 1.0), model, policy="O1,fp16")
    assert (overflow.phase, overflow.module, overflow.tensor.dtype) == ("forward", "part", "float16")
    assert "no rule reaches inside TorchScript" in overflow.cause
    assert overflow.cure == 'policy = mezzo.Policy.parse("O1,dtype=bfloat16")'


@pytest.mark.parametrize("way", [way for way in WAYS if way != "sparse"])
def test_a_step_is_replayed(way):
    """Of a scripted model, too, whose calls are kept as those of others."""
    overflows = []
    for model in (Net(), Net(**WAYS[way])):
        replay = Replay(model, region=lambda: mezzo.autocast("O1,fp16,emulate=false", "cpu"))
        (step(model, 1e6)() * 65536).backward()
        report = replay.locate(65536.0)
        overflows.append((report.kind, report.phase, report.tensor.dtype, report.tensor.num_inf))
        replay.remove()
    assert overflows[0] == overflows[1]


def test_a_model_that_is_scripted_as_a_whole():
    model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    assert locate(step(model, 1.0), model) is None
    assert locate(step(model, 1e6), model).tensor.num_inf == 52
    replay = Replay(model, region=lambda: mezzo.autocast("O1,fp16,emulate=false", "cpu"))
    (step(model, 1e6)() * 65536).backward()
    assert replay.locate(65536.0).tensor.num_inf == 52
    replay.remove()


@pytest.mark.parametrize("make", [jagged, padded, torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr,
                                  torch.Tensor.to_sparse_csc, lambda x: x.to_sparse_bsr((1, 2))])  # fmt: skip
def test_numbers_are_measured_in_any_layout(make):
    """Those that it holds: of rows without a zero all."""
    for x, finite in ((ROWS + 2, True), (torch.where(ROWS > 0.9, torch.inf, 2 - ROWS), False)):
        inner = make(x)
        assert is_finite(inner) == finite
        mine, plain = range_of(inner, "x"), range_of(x, "x")
        assert (mine.smallest, mine.largest, mine.num_inf, mine.num_nan) == (
            plain.smallest, plain.largest, plain.num_inf, plain.num_nan
        )  # fmt: skip
    integers = torch.arange(1.0, 561.0).reshape(70, 8)
    if make in (jagged, padded):
        assert lost_integers(make(integers), torch.bfloat16) == lost_integers(integers, torch.bfloat16) is not None


@pytest.mark.parametrize("way", ["jagged", "nested", "inference"])
def test_explain_and_tune_meet_them(way):
    model = Net(**WAYS[way])
    explained = mezzo.explain(model, ROWS, policy="O1,bf16")
    if way == "inference":  # whose functions are taken apart as those of others are
        assert explained.answer.headline == mezzo.explain(Net(), ROWS, policy="O1,bf16").answer.headline
    assert str(explained)
    tuned = numerics.tune(model, lambda m, x: m(x).square().mean(), [ROWS, ROWS / 2], dtype="bfloat16")
    assert tuned.policy.dtype == torch.bfloat16


# Sizes that numbers decide --------------------------------------------------------------------------------------------


class Chosen(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.first, self.last, self.choose = nn.Linear(8, 8), nn.Linear(8, 4), choose

    def forward(self, x):
        return self.choose(self, x, (x[:, 0] > 0).nonzero().squeeze(-1))


def branching(model, x, chosen):
    return model.last(model.first(x)[chosen]) if chosen.numel() else model.last(model.first(x))


def longer(model, x, chosen):
    h = model.first(x)[x[:, 0] > -10]
    return model.last(h * 2) if h.shape[0] > 2 else model.last(h)


PLANNED = {
    "chosen": lambda model, x, chosen: model.last(model.first(x)[chosen]),
    "mask": lambda model, x, chosen: model.last(model.first(x)[x[:, 0] > 0]),
    "number": lambda model, x, chosen: model.last(model.first(x)[: int((x > 0).sum()) % 3 + 1]),
    "jagged": lambda model, x, chosen: model.last(model.first(jagged(x)).relu()).values(),
}


@pytest.mark.parametrize("choose", [branching, longer])
def test_a_branch_on_a_size_that_numbers_decide_is_no_graph(choose):
    """In mezzo's words, with the program's line; never Dynamo's own."""
    with pytest.raises(UnsupportedError, match="Chosen cannot be captured as one graph") as caught:
        plan.plan(Chosen(choose), ROWS, policy="O1,bf16")
    line = choose.__code__.co_firstlineno
    where = str(caught.value).partition("where  ")[2].splitlines()[0]
    assert where.startswith(__file__)
    assert line < int(where.rpartition(":")[2]) <= line + 2


@pytest.mark.parametrize("choose", PLANNED)
def test_what_needs_no_branch_is_planned(choose):
    assert str(plan.plan(Chosen(PLANNED[choose]), ROWS, policy="O1,bf16"))
