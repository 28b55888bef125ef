"""Where two models part: planted differences are found, in the module that has them, as far apart as float64 says."""

import copy
import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import mezzo
from mezzo.errors import PolicyError, StateError, UnsupportedError
from mezzo.formats import BF16, FP16
from mezzo.numerics import Distance, LogProbs, parity
from mezzo.numerics.distances import CHUNK, log_probs, measured

from ..support.refusals import refused
from ..support.releases import torchscript

pytestmark = pytest.mark.usefixtures("emulating")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.act, self.factor = nn.ReLU(inplace=True), 1.0

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value) * self.factor
        hidden = self.proj(attended)
        self.act(hidden)  # in place, and what it returns is not used
        return x + hidden


class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(32, 16), nn.Sequential(Block(), Block())
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.drop(self.blocks(self.embed(ids))))


def net(seed=0, **kwargs):
    torch.manual_seed(seed)
    return Net(**kwargs)


def batch(*shape):
    return torch.randint(32, shape or (3, 8), generator=torch.Generator().manual_seed(1))


def paths(result, by="by_itself"):
    return {row.path for row in result.rows if getattr(row, by).differs}


def distance_by_hand(first, second, fmt=BF16):
    """The same in Python's floats, element by element."""
    steps = [
        abs(one - two) / fmt.spacing(max(-fmt.max, min(one, fmt.max)))
        for one, two in zip(first.double().flatten().tolist(), second.double().flatten().tolist(), strict=True)
    ]
    return max(steps), *(sum(values) / len(steps) for values in (steps, [s > 0 for s in steps], [s > 1 for s in steps]))


# What is measured -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_distances_are_counted_in_spacings_at_the_first_models_values(fmt):
    torch.manual_seed(0)
    first = torch.cat(
        [torch.randn(500) * 2.0 ** torch.arange(-30, 20).repeat(10), torch.tensor([0.0, -1.0, 2.0**-140])]
    )
    second = first * (1 + torch.randn(503) * 2.0**-6)
    second[::5] = first[::5]
    result = Distance.of(measured(first, second, fmt).tolist(), first.shape)
    assert (result.largest, result.mean, result.share, result.beyond) == pytest.approx(
        distance_by_hand(first, second, fmt), rel=1e-12
    )
    steps = (first - second).abs().double() / fmt.spacings(first.clamp(-fmt.max, fmt.max))
    assert result.at == (steps.argmax().item(),)


def test_what_is_not_finite_is_equal_to_itself_alone():
    inf, nan = math.inf, math.nan
    first = torch.tensor([[inf, -inf, nan], [1.0, inf, nan], [1.0, 2.0, 3.0]])
    second = torch.tensor([[inf, -inf, nan], [inf, -inf, 0.0], [1.0, 2.0, 3.0 + 2.0**-6]])
    result = Distance.of(measured(first, second, BF16).tolist(), first.shape)
    assert result == Distance(largest=inf, mean=1 / 9, share=4 / 9, beyond=3 / 9, at=(1, 0), not_finite=(2, 2))


def test_integers_complex_numbers_and_nothing():
    assert Distance.of(measured(torch.tensor([1, 7]), torch.tensor([1, 4]), BF16).tolist(), (2,)).largest == 3.0
    one, two = torch.tensor([1.0 + 1.0j]), torch.tensor([1.0 + 1.0078125j])
    assert Distance.of(measured(one, two, BF16).tolist(), (1,)).largest == 1.0
    empty = torch.empty(3, 0)
    assert not Distance.of(measured(empty, empty, BF16).tolist(), empty.shape).differs


def test_the_largest_is_found_in_any_part_of_a_large_tensor():
    first = torch.ones(CHUNK + 10)
    second = first.clone()
    second[5], second[CHUNK + 7] = 1 + 2.0**-7, 1 + 2.0**-5
    result = Distance.of(measured(first, second, BF16).tolist(), first.shape)
    assert (result.largest, result.at, result.share * first.numel()) == (4.0, (CHUNK + 7,), 2.0)


# Planted differences --------------------------------------------------------------------------------------

MODULES = {
    "linear": (lambda: nn.Linear(6, 6), "weight"),
    "norm": (lambda: nn.LayerNorm(6), "weight"),
    "conv": (lambda: nn.Conv1d(4, 4, 3, padding=1), "weight"),
    "recurrent": (lambda: nn.GRU(6, 6, batch_first=True), "weight_hh_l0"),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), "in_proj_weight"),
    "batch norm": (lambda: nn.BatchNorm1d(4), "weight"),
}


class Around(nn.Module):
    """Whatever module in the middle of others."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(6, 6)

    def forward(self, x):
        x = self.first(x)
        y = self.inner(x, x, x, need_weights=False) if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)
        return self.last(y if isinstance(y, torch.Tensor) else y[0])


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("spacings", [1, 5])
def test_a_moved_weight_is_found_in_its_module(name, spacings):
    make, param = MODULES[name]
    torch.manual_seed(3)
    first = Around(make())
    second = copy.deepcopy(first)
    weight = getattr(second.inner, param).data.view(-1)
    weight[0] += spacings * BF16.spacing(weight[0].item())
    x = torch.randn(2, 4, 6)
    result = parity(first, second, x)
    assert result.first.path == "inner"
    assert paths(result) == {"inner"}
    assert paths(result, "in_all") == {"inner", "last", ""}
    first.eval(), second.eval()
    with torch.no_grad():  # the kernels that parity's passes run
        outputs = [
            model.inner(*[model.first(x)] * 3 if name == "attention" else [model.first(x)]) for model in (first, second)
        ]
    one, two = ((y if isinstance(y, torch.Tensor) else y[0]).detach() for y in outputs)
    now = result.first.by_itself
    assert (now.largest, now.mean, now.share, now.beyond) == pytest.approx(distance_by_hand(one, two), rel=1e-9)
    assert result.first.in_all == now


@pytest.mark.parametrize("given", [lambda x: x, lambda x: (x,), lambda x: {"ids": x}], ids=["tensor", "tuple", "dict"])
def test_plain_models_and_any_batch(given):
    first, second = net(), net()
    assert str(mezzo.numerics.parity(first, second, given(batch()))) == "they agree in all that 15 modules returned"
    second.blocks[1].proj.weight.data[3, 4] *= 1.01
    result = mezzo.numerics.parity(first, second, given(batch()))
    assert result.first.path == "blocks.1.proj"
    assert paths(result) == {"blocks.1.proj"}
    assert paths(result, "in_all") == {"", "head", "drop", "blocks", "blocks.1", "blocks.1.proj", "blocks.1.act"}
    assert str(result).startswith("they part in blocks.1.proj: ")


def test_two_plants_are_two_modules():
    first, second = net(), net()
    second.blocks[0].norm.bias.data[2] += 0.25
    second.head.weight.data[5] *= 1.5
    result = parity(first, second, batch())
    assert paths(result) == {"blocks.0.norm", "head"}
    assert result.first.path == "blocks.0.norm"
    alone = net()
    alone.head.weight.data[5] *= 1.5
    head = next(row for row in result.rows if row.path == "head")
    assert head.by_itself == parity(first, alone, batch()).first.by_itself  # as if it were the only one
    assert head.in_all != head.by_itself


def test_code_between_modules_is_the_module_around_them():
    first, second = net(), net()
    second.blocks[0].factor = 1 + 2.0**-8
    result = parity(first, second, batch())
    assert (result.first.path, result.first.before) == ("blocks.0", "blocks.0.proj")
    assert paths(result) == {"blocks.0"}
    assert str(result).startswith("they part in blocks.0 before blocks.0.proj: ")
    second.blocks[0].factor = 1.0
    second.head.register_forward_hook(lambda module, args, output: output * (1 + 2.0**-8))
    assert paths(parity(first, second, batch())) == {"head"}


def test_each_call_of_a_shared_module_has_a_row():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.late = nn.Linear(4, 4), nn.Identity()
            self.again = self.layer

        def forward(self, x):
            return self.again(self.late(self.layer(x)))

    torch.manual_seed(0)
    first, x = Twice(), torch.ones(2, 4)
    second = copy.deepcopy(first)
    second.layer.bias.data += 0.5
    result = parity(first, second, x)
    assert [(row.path, row.call, row.by_itself.differs) for row in result.rows] == [
        ("", 0, False), ("layer", 0, True), ("late", 0, False), ("layer", 1, True),
    ]  # fmt: skip
    assert result.rows[3].name == "layer (call 2)"
    once = copy.deepcopy(first)
    once.late.forward = lambda y: once.layer(y)
    assert parity(first, once, x).unmatched == ("layer was called 2 and 3 times",)


def test_all_tensors_that_a_module_returns():
    class Several(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.shift = shift

        def forward(self, x):
            return {"hidden": x, "more": [x + self.shift, (x > 1).long()], "none": None}

    result = parity(Several(0.0), Several(2.0**-7), torch.ones(3))
    assert [row.output for row in result.rows] == ["['hidden']", "['more'][0]", "['more'][1]"]
    assert [row.by_itself.largest for row in result.rows] == [0.0, 1.0, 0.0]
    assert result.first.name == "the model['more'][0]"


def test_the_program_may_write_into_its_batch_and_its_activations():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.ReLU(inplace=True))

        def forward(self, x):
            x.mul_(3.0)
            self.inner(x)
            return x

    x = torch.tensor([-1.0, 2.0])
    assert paths(parity(Writes(), Writes(), x), "in_all") == set()
    assert x.tolist() == [-1.0, 2.0]


# Policies and regions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_o1_and_o2_are_one_and_o3_parts_where_it_stores_low(dtype):
    model = net(tied=True)
    before = copy.deepcopy(model.state_dict())
    assert not paths(parity(model, model, batch(), policy_a=f"O1,{dtype}", policy_b=f"O2,{dtype}"), "in_all")
    result = parity(model, model, batch(), policy_a=f"O1,{dtype}", policy_b=f"O3,{dtype}")
    low = "bfloat16" if dtype == "bf16" else "float16"
    assert result.first.path == "embed"
    assert result.first.dtypes == ("float32", low)
    assert result.first.by_itself.largest <= 0.5  # of a BF16 spacing, which is what rounding once can do
    assert not result.rows[-1].by_itself.differs  # the head computes in both what it computes
    assert result.rows[0].dtypes == (low, "float32")  # what O3 gives out
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_module_that_hands_on_in_its_dtype_is_no_place_where_models_part():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Identity())
    result = parity(model, copy.deepcopy(model).bfloat16(), {"input": torch.randn(4, 8).bfloat16()}, policy_a="O1,bf16")
    assert paths(result) == set()  # FP32 sums of BF16 operands, rounded once, and the root in FP32
    plain = parity(model, model, torch.randn(4, 8), policy_b="O1,bf16")
    assert paths(plain) == {"0"}


@pytest.mark.parametrize("style", ["prepare", "session", "attach"])
def test_a_model_under_a_policy_runs_in_its_own_region(style):
    model, plain = net(), net()
    optimizer = mezzo.optim.AdamW(model.parameters())
    if style == "prepare":
        handle = mezzo.prepare(model, "O2,bf16")
    elif style == "session":
        handle = mezzo.MixedPrecision(model, optimizer, "O2,bf16")
    else:
        handle = mezzo.attach(model, optimizer, "O2,bf16")
    uses = [list(param.cell.uses) for param in model.parameters() if hasattr(param, "cell")]
    assert uses
    assert not paths(parity(model, plain, batch(), policy_b="O1,bf16"), "in_all")
    assert "head" in paths(parity(model, plain, batch()))
    assert uses == [list(param.cell.uses) for param in model.parameters() if hasattr(param, "cell")]
    with refused(StateError, "under a policy already", "O2,dtype=bfloat16", parts=(plain,)):
        parity(plain, model, batch(), policy_b="O1,bf16")
    handle.remove() if style == "prepare" else handle.close()
    assert not paths(parity(model, plain, batch()), "in_all")


def test_a_session_that_has_changed_runs_in_the_region_of_now():
    model = net()
    amp = mezzo.MixedPrecision(model, mezzo.optim.AdamW(model.parameters()), "O2,bf16")
    amp.change("O1,fp16")
    assert not paths(parity(model, net(), batch(), policy_b="O1,fp16"), "in_all")
    assert "head" in paths(parity(model, net(), batch(), policy_b="O1,bf16"))


def test_compiled_models_run_uncompiled_under_the_paths_of_the_model_inside():
    model = net()
    compiled = torch.compile(model, backend="eager")
    result = parity(compiled, net(), batch())
    assert not paths(result, "in_all")
    assert {"", "blocks.1.proj"} <= {row.path for row in result.rows}


# What stays ---------------------------------------------------------------------------------------------------


def state_of(*models):
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for x in models for m in x.modules()]
    values = [v.clone() for x in models for v in (*x.parameters(), *x.buffers())]
    return hooks, values, [p.grad for x in models for p in x.parameters()]


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_is_left_behind(raises):
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            x = self.norm(self.inner(x)) + self.count + torch.rand(4) + random.random() + np.random.rand()
            if raises and self.fails:
                raise ValueError("no")
            return x

    first, second = Draws(), Draws()
    second.load_state_dict(first.state_dict())
    first.fails, second.fails = False, True
    second.inner.eval()
    first.inner.weight.grad = torch.ones(4, 4)
    before, states = state_of(first, second), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
    if raises:
        with pytest.raises(ValueError, match="no"):
            parity(first, second, torch.ones(2, 4))
    else:
        assert not paths(parity(first, second, torch.ones(2, 4)), "in_all")  # the same numbers were drawn
    after = state_of(first, second)
    assert before[0] == after[0]
    assert all(map(torch.equal, before[1], after[1]))
    assert all(one is two for one, two in zip(before[2], after[2], strict=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])


# Tokens, and what is shown -------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_float64():
    torch.manual_seed(0)
    first, second, tokens = torch.randn(5, 7, 11), torch.randn(5, 7, 11), torch.randint(11, (5, 7))
    tokens[0, :3] = -100
    result = LogProbs.of(log_probs(first, tokens), log_probs(second, tokens))
    pairs = []
    for one, two, token in zip(
        first.view(-1, 11).tolist(), second.view(-1, 11).tolist(), tokens.view(-1).tolist(), strict=True
    ):
        if token >= 0:
            pairs.append([math.log(math.exp(row[token]) / math.fsum(map(math.exp, row))) for row in (one, two)])
    apart = [one - two for one, two in pairs]
    assert result.count == len(pairs) == 32
    assert result.largest == pytest.approx(max(map(abs, apart)), rel=1e-9)
    assert result.mean == pytest.approx(sum(map(abs, apart)) / 32, rel=1e-9)
    assert result.kl == pytest.approx(sum(math.exp(x) - 1 - x for x in apart) / 32, rel=1e-9)
    assert result.kl > 0
    assert result.ratio == pytest.approx(np.quantile(np.exp(apart), [0.05, 0.5, 0.95]), rel=1e-9)


def test_tokens_are_compared_under_the_two_policies():
    model, ids = net(), batch()
    result = parity(model, model, ids, policy_b="O1,bf16", tokens=ids)
    assert result.log_probs.count == 24
    assert 0 < result.log_probs.mean < 0.05
    assert f"; log-probabilities {result.log_probs.mean:.2g} apart" in str(result).splitlines()[0]
    assert parity(model, model, ids, tokens=ids).log_probs == LogProbs(
        count=24, largest=0.0, mean=0.0, kl=0.0, ratio=(1.0, 1.0, 1.0)
    )


def test_the_text_is_short_and_the_data_is_all():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)])
    result = parity(model, model, torch.randn(4, 8), policy_b="O1,bf16")
    lines = str(result).splitlines()
    assert len(lines) <= 12
    assert lines[0].startswith("they part in 0: ")
    assert lines[-1] == f"and {len(paths(result)) - 9} more that part by themselves"
    data = json.loads(json.dumps(result.to_dict()))
    assert len(data["rows"]) == 31
    assert data["first"]["path"] == "0"
    assert data["spacing"] == "bfloat16"


def test_modules_narrow_what_is_watched():
    first, second = net(), net()
    second.blocks[0].qkv.weight.data[0] *= 2.0
    result = parity(first, second, batch(), modules=["blocks.1"])
    assert {row.path for row in result.rows} == {"blocks.1", *(f"blocks.1.{x}" for x in ("norm", "qkv", "proj", "act"))}
    assert result.first is None
    assert str(result).startswith("no watched module parts by itself, and yet blocks.1 differs")
    assert parity(first, second, batch(), modules="blocks.0", spacing=torch.float16).first.path == "blocks.0.qkv"


X = torch.ones(2, 4)
REFUSALS = [
    (lambda: parity(nn.Linear(4, 4), "model", X), PolicyError, ("not a str", "parity(model_a, model_b, batch)")),
    (lambda: parity(nn.Linear(4, 4), nn.Linear(4, 4), [X]), PolicyError, ("the batch is a list", "(batch,)")),
    (lambda: parity(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), X), PolicyError,
     ("other modules", "only the first: none; only the second: 0", "modules=[…]")),
    (lambda: parity(nn.Linear(4, 4), nn.Linear(4, 5), X), PolicyError,
     ("other shapes", "what the model returned: [2, 4] and [2, 5]")),
    (lambda: parity(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), X, modules="1"), PolicyError,
     ("no module matches '1'", "valid: 0")),
    (lambda: parity(nn.Linear(4, 4), nn.Linear(4, 4), X, tokens=torch.ones(3, dtype=torch.int64)), PolicyError,
     ("no logits go with the tokens", "int64 [3]", "[2, 4]")),
    (lambda: parity(nn.Linear(4, 4), nn.Linear(4, 4), X, tokens=torch.ones(2)), PolicyError, ("float32 [2]",)),
    (lambda: parity(nn.Linear(4, 4), nn.Linear(4, 4), X, spacing="bf17"), PolicyError, ("unknown number format",)),
    (lambda: parity(nn.Linear(4, 4), nn.Linear(4, 4), X, spacing="e8m0"), PolicyError, ("format of scales",)),
    (lambda: LogProbs.of(torch.ones(3), torch.ones(4)), PolicyError, ("other tokens", "[3] and [4]")),
    (lambda: parity(nn.Linear(4, 4), nn.LazyLinear(4), X), UnsupportedError, ("without values", "weight")),
    (lambda: parity(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4), X), UnsupportedError, ("to_empty",)),
    (lambda: parity(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4), X), UnsupportedError,
     ("scripted modules cannot be compared",)),
    (lambda: parity(nn.Linear(4, 4), nn.Linear(4, 4), X, policy_a="O5"), PolicyError, ("O5",)),
]  # fmt: skip


@torchscript
@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_what_cannot_be_compared(call, error, words):
    with refused(error, *words):
        call()
