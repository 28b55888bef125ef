"""What is added to torch's errors about dtypes: the two tensors, the module, the rule, and what to write."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import mezzo


class Body(nn.Module):
    """A part of a model that does one thing between two layers."""

    def __init__(self, does):
        super().__init__()
        self.first, self.last, self.does = nn.Linear(8, 8), nn.Linear(8, 8), does
        self.register_buffer("angles", torch.arange(8.0), persistent=False)
        self.register_buffer("codes", torch.eye(8))

    def forward(self, x):
        return self.last(self.does(self, self.first(x)))


def masked(self, h):
    scores = h @ h.T + torch.full((4, 4), -1e9).triu(1)
    weights = scores.softmax(-1)
    return weights @ h


def rotary(self, h):
    q = k = (h * self.angles.cos())[None]
    v = h[None]
    return functional.scaled_dot_product_attention(q, k, v)[0]


def computed(self, h):
    return functional.linear(h, self.angles.cos()[:, None] * torch.eye(8))


def tied(self, h):
    wide = h.float()
    return torch.matmul(wide, self.first.weight)


def codebook(self, h):
    distances = torch.cdist(h.float(), self.codes)
    return h + distances


def filled(self, h):
    out = torch.zeros(4, 8)
    out[torch.arange(4)] = h
    return out


def scattered(self, h):
    return torch.zeros(4, 8).scatter_add(0, torch.zeros(4, 8, dtype=torch.long), h)


def two_computed(self, h):
    return torch.einsum("bi,ij->bj", self.first(h), self.angles.cos() * torch.eye(8))


#: What does it, what the note says of its tensors, and whether casts at ops cure it as well.
CASES = [
    (masked, ["weights is float32 [4, 4]", "h is {low} [4, 8]"], True),
    (rotary, ["q is float32 [1, 4, 8]", "v is {low} [1, 4, 8]", "q.to(v.dtype), k.to(v.dtype)"], True),
    (computed, ["h is {low} [4, 8]", "(self.angles.cos()[:, None] * torch.eye(8)) is computed there"], True),
    (tied, ["wide is float32 [4, 8]", "self.first.weight is {low} [8, 8], the model's part.first.weight"], True),
    (codebook, ["h.float() is computed there", "self.codes is {low} [8, 8], the model's part.codes"], True),
    (two_computed, ["self.first(h).to(torch.{low}), (self.angles.cos() * torch.eye(8)).to(torch.{low})"], True),
    (filled, ["out[torch.arange(4)] = h", "out is float32 [4, 8]", "h.to(out.dtype)"], False),
    (scattered, ["torch.zeros(4, 8) is computed there", "h is {low} [4, 8]"], True),
]


def note_of(call, errors=(RuntimeError, ValueError)):
    with pytest.raises(errors) as error:
        call()
    (note,) = error.value.__notes__
    assert note.startswith("mezzo: ")
    return note


@pytest.mark.parametrize("policy", ["O2,dtype=float16", "O3,dtype=bfloat16"])
@pytest.mark.parametrize("does, says, by_op", CASES, ids=[does.__name__ for does, *_ in CASES])
def test_the_note_names_both_tensors_the_module_and_the_rule_and_its_cures_work(policy, does, says, by_op):
    def run(policy):
        model = nn.ModuleDict({"part": Body(does)})
        model.forward = lambda x: model["part"](x)
        with mezzo.prepare(model, policy).autocast():
            out = model(torch.ones(4, 8))
        assert out.dtype == torch.float32
        out.sum().backward()

    policy = mezzo.Policy.parse(policy)
    low = str(policy.dtype).removeprefix("torch.")
    note = note_of(lambda: run(policy))
    assert re.search(r"test_mismatch.py:\d+: .*\n", note)
    assert f"in part, of which no rule speaks: the level {policy.level} holds" in note
    assert 'policy.keep_fp32(modules=["part"]), the text fp32_module=part' in note
    for each in says:
        assert each.format(low=low) in note
    assert low in note.splitlines()[0]
    run(policy.keep_fp32(modules=["part"]))
    assert ("autocast=true" in note) == by_op
    if by_op and policy.level == "O2":
        assert "policy.evolve(autocast=True), the text autocast=true" in note
        run(policy.evolve(autocast=True))


ALONE = [torch.linalg.inv, torch.linalg.slogdet, torch.linalg.pinv, torch.linalg.svd, torch.fft.rfft,
         functools.partial(torch.quantile, q=0.5)]  # fmt: skip
PAIRS = [torch.complex, torch.polar, torch.linalg.lstsq]


class Part(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.is_cured = function, False

    def forward(self, h):
        other = h.float() if self.is_cured else h
        if self.is_cured:
            h = h.float()
        self.function(h) if self.function in ALONE else self.function(h, other)
        return h


def test_what_torch_has_no_kernel_for_is_to_be_given_fp32():
    for function in (*ALONE, *PAIRS):
        model = nn.Sequential(nn.Linear(4, 4), Part(function))
        mezzo.prepare(model, "O2,dtype=bfloat16")
        note = note_of(lambda: model(torch.eye(4)), (RuntimeError, NotImplementedError))  # noqa: B023
        assert note.startswith("mezzo: torch has no kernel in bfloat16 for this"), function
        assert ("write  h.float();" if function in ALONE else "write  h.float(), other.float();") in note
        model[1].is_cured = True
        model(torch.eye(4))


# Buffers ------------------------------------------------------------------------------------------------


def averaged(self, h):
    near = h @ self.codes
    self.codes.mul_(0.99)
    return near


def contrasted(self, h):
    """Momentum contrast: the operands stand in a list, and one is a copy of the buffer."""
    scores = torch.einsum("nc,ck->nk", [h, self.codes.clone().detach()])
    self.codes[:, :4] = h.detach().T
    return scores


def test_a_buffer_that_is_fp32_since_a_pass_writes_it_is_named_as_such():
    """One that is only assigned may stay low."""

    def run(does, policy):
        model = Body(does)
        mezzo.prepare(model, policy)
        for _ in range(2):
            model(torch.ones(4, 8))
        return model.codes.dtype

    note = note_of(lambda: run(averaged, "O2,dtype=float16"))
    assert "self.codes is float32 [8, 8], the model's codes, in float32 since" in note
    note = note_of(lambda: run(contrasted, "O2,dtype=bfloat16"))
    assert "self.codes.clone().detach() is float32 [8, 8], the model's codes, in float32 since a forward pass" in note
    assert "h is bfloat16 [4, 8]" in note
    assert "the text low_param=codes" in note
    assert run(contrasted, "O2,dtype=bfloat16,low_param=codes") == torch.bfloat16
    assert run(contrasted, "O2,dtype=bfloat16,autocast=true") == torch.float32


# Where it fails -----------------------------------------------------------------------------------------


def test_weights_that_are_used_outside_their_module_are_explained_where_the_region_ends():
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8))
    handle = mezzo.prepare(model, "O2,dtype=bfloat16")

    def loss():
        with handle.autocast():
            hidden = model(torch.arange(5))
            return hidden @ model[0].weight.T

    note = note_of(loss)
    assert all(words in note for words in ("hidden is float32 [5, 8]", "model[0].weight.T", "hidden.to("))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_a_parameter_that_came_after_the_preparation_is_to_be_there_before():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.utils.weight_norm(nn.Linear(8, 8))), torch.ones(4, 8)
    handle = mezzo.prepare(model, "O2,dtype=bfloat16")
    model(x)

    def fails(call):
        note = note_of(call)
        assert "write  mezzo.prepare, or the session, after the model got that parameter;" in note
        assert "or dict(model.named_parameters()) as what functional_call is given" in note

    nn.utils.remove_weight_norm(model[1])
    fails(lambda: model(x))
    handle.remove()
    handle = mezzo.prepare(model, "O2,dtype=bfloat16")
    assert model(x).dtype == torch.float32
    fails(lambda: functional_call(model, model.state_dict(), x))
    assert functional_call(model, dict(model.named_parameters()), x).dtype == torch.float32
    model[1] = nn.Linear(8, 3)
    fails(lambda: model(x))
    handle.remove()
    mezzo.prepare(model, "O2,dtype=bfloat16")
    assert model(x).dtype == torch.float32


def test_an_island_is_named_by_its_rule_and_other_errors_are_left_alone():
    model = nn.ModuleDict({"part": Body(lambda self, h: functional.linear(h, torch.eye(8).bfloat16()))})
    model.forward = lambda x: model["part"](x)
    mezzo.prepare(model, "O2,dtype=bfloat16,fp32_module=part")
    assert "of which the rule fp32_module=part speaks" in note_of(lambda: model(torch.ones(4, 8)))
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 3))
    assert not hasattr(error.value, "__notes__")


class Island(nn.Module):
    """A part that computes in FP32 under torch.amp: autocast is off, and the input widened."""

    def __init__(self, part):
        super().__init__()
        self.body, self.part = nn.Linear(4, 4), part

    def forward(self, x):
        h = self.body(x)
        with torch.autocast("cpu", enabled=False):
            wide = h.float()[:, None]
            return self.part(*[wide] * (3 if isinstance(self.part, nn.MultiheadAttention) else 1))


PARTS = [lambda: nn.Linear(4, 4), lambda: nn.Conv1d(1, 1, 1), lambda: nn.LayerNorm(4), lambda: nn.GRU(4, 4),
         lambda: nn.MultiheadAttention(4, 1)]  # fmt: skip


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("rule", ["", ",fp32_module=part"])
def test_a_program_s_own_fp32_island_runs(level, rule):
    """Low where its weights are low, FP32 under O1 or with a rule."""
    for build in PARTS:
        model = Island(build())
        with mezzo.prepare(model, f"{level},dtype=bfloat16,emulate=true{rule}").autocast():
            model(torch.ones(2, 4))
