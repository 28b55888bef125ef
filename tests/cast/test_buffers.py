"""Buffers that a forward pass writes are FP32 from the first one in training mode on; what is only read stays low."""

import contextlib
import copy
import itertools
import operator

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import mezzo

POLICIES = ["O2,dtype=bfloat16,emulate=true", "O2,dtype=float16,emulate=true", "O3,dtype=bfloat16,emulate=true"]
BEYOND = 60000.0  # twice as much is infinite in FP16


class Counted(nn.Module):
    """A layer that counts in one way or another; ``step`` is exact in FP32 and in no 16-bit format."""

    def __init__(self, write):
        super().__init__()
        self.lin, self.write = nn.Linear(4, 4), write
        self.register_buffer("sum", torch.tensor([BEYOND, 255.0, 0.001, 1 / 3]))
        self.register_buffer("table", torch.linspace(0, 1, 4))

    def forward(self, x):
        if self.training:
            self.write(self)
        return self.lin(x) + self.table


STEP = torch.tensor([BEYOND, 1.0, 2.0**-20, 1.0])
WRITES = {
    "operator": lambda m: setattr(m, "sum", operator.iadd(m.sum, STEP)),
    "method": lambda m: m.sum.add_(STEP),
    "alias": lambda m: m.sum.mul_(1.0).add_(STEP),
    "data": lambda m: m.sum.data.mul_(1.0).add_(STEP),
    "copy": lambda m: m.sum.copy_(m.sum + STEP),
    "parts": lambda m: (m.sum[:2].add_(STEP[:2]), operator.iadd(m.sum[2:], STEP[2:])),
    "item": lambda m: operator.setitem(m.sum, ..., m.sum + STEP),
    "out": lambda m: torch.add(m.sum, STEP, out=m.sum),
    "assignment": lambda m: setattr(m, "sum", m.sum + STEP),
    "average": lambda m: setattr(m, "sum", (m.sum / 2 + (m.sum + STEP * 2) / 2).detach().to(m.sum.dtype)),
    "float": lambda m: setattr(m, "sum", (m.sum.float() + STEP).type_as(m.sum)),
    "helper": lambda m: dict(m.named_buffers())["sum"].lerp_(m.sum + 2 * STEP, 0.5),
    "cast": lambda m: m.sum.lerp_((m.sum + 2 * STEP).to(m.sum.dtype), 0.5),
}
SET_DATA = {"setting data": lambda m: setattr(m.sum, "data", m.sum.data + STEP)}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_buffer_that_a_pass_writes_is_as_in_fp32(write, caplog):
    x = torch.ones(2, 4)
    for policy in POLICIES:
        plain = Counted(write)
        model = nn.Sequential(copy.deepcopy(plain))
        handle = mezzo.prepare(model, policy)
        low = handle.policy.dtype
        assert model[0].sum.dtype == model[0].table.dtype == low
        model.eval()
        model(x)
        assert model[0].sum.dtype == low  # a pass in training mode tells
        model.train()
        caplog.clear()
        for _ in range(3):
            plain(x)
            model(x)
            assert model[0].sum.dtype == torch.float32
            torch.testing.assert_close(model[0].sum, plain.sum, rtol=2e-7, atol=0, msg=policy)
        assert model[0].table.dtype == low
        (said,) = caplog.messages
        assert "buffers that a forward pass writes" in said
        assert 'policy.keep_fp32(params=["0.sum"]), the text fp32_param=0.sum' in said
        assert torch.equal(model.state_dict()["0.sum"], model[0].sum)
        expected = model[0].sum.clone()
        handle.remove()
        assert torch.equal(model[0].sum, expected)
        assert model[0].table.dtype == torch.float32


@pytest.mark.parametrize("write", (WRITES | SET_DATA).values(), ids=[*WRITES, *SET_DATA])
def test_the_rule_that_the_warning_names_says_so_beforehand(write, caplog):
    for policy, in_region in itertools.product(POLICIES, (True, False)):
        plain = Counted(write)
        model = copy.deepcopy(plain)
        handle = mezzo.prepare(model, f"{policy},fp32_param=sum")
        for _ in range(3):
            assert model.sum.dtype == torch.float32
            plain(torch.ones(2, 4))
            with handle.autocast() if in_region else contextlib.nullcontext():
                model(torch.ones(2, 4))
            torch.testing.assert_close(model.sum, plain.sum, rtol=2e-7, atol=0, msg=policy)
    assert not caplog.messages


@pytest.mark.parametrize("policy", POLICIES)
def test_operands_that_a_program_casts_to_the_buffers_dtype_meet_it_in_every_pass(policy):
    """Of functions that promote nothing; what is rounded by the program stays so."""
    index = torch.tensor([0, 1])

    def write(module):
        ones = torch.ones(2, dtype=module.sum.dtype)
        module.sum.scatter_add_(0, index, ones)
        module.sum.index_add_(0, index, ones)
        module.sum.index_put_((index,), ones, accumulate=True)
        torch.lerp(module.sum, torch.ones(4, dtype=module.sum.dtype), 0.0, out=module.sum)
        module.sum[3] = torch.tensor(0.5).to(module.sum.dtype)

    model = Counted(write)
    mezzo.prepare(model, policy)
    for number in range(1, 4):
        model(torch.ones(2, 4))
        assert model.sum.dtype == torch.float32
        assert model.sum[:2].tolist() == [BEYOND + 3 * number, 255.0 + 3 * number]
        assert model.sum[3] == 0.5


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_program_holds_of_a_buffer_keeps_its_dtype_and_has_its_numbers(policy):
    def write(module):
        alias = module.sum.to(module.lin.weight.dtype)  # the buffer itself
        module.sum.mul_(0.5)
        part = alias[2:]
        assert alias.dtype == module.lin.weight.dtype
        module.seen = functional.linear(torch.ones(1, 4, dtype=alias.dtype), alias[None]), part.clone()
        part.add_(1.0)

    model = Counted(write)
    mezzo.prepare(model, policy)
    model(torch.ones(2, 4))
    value = torch.tensor([BEYOND, 255.0, 0.001, 1 / 3])
    torch.testing.assert_close(model.seen[1].float(), value[2:] / 2, rtol=0.01, atol=0)
    torch.testing.assert_close(model.seen[0].float().reshape(()), value.sum() / 2, rtol=0.01, atol=0)
    torch.testing.assert_close(model.sum, value / 2 + torch.tensor([0.0, 0.0, 1.0, 1.0]), rtol=1e-6, atol=0)


class Cached(nn.Module):
    """Builds its mask anew for longer inputs."""

    def __init__(self):
        super().__init__()
        self.lin, self.length = nn.Linear(8, 8), 0
        self.register_buffer("mask", torch.zeros(4, 4))

    def forward(self, x):
        q = self.lin(x)
        if self.length < len(x):
            self.length = len(x)
            self.mask = torch.full((len(x), len(x)), float("-inf")).triu(1).to(q.dtype)
        return functional.scaled_dot_product_attention(q, q, q, attn_mask=self.mask)


def test_a_table_that_is_built_anew_is_what_the_program_makes_it(caplog):
    for policy, length in itertools.product(POLICIES, (4, 6)):
        model = Cached()
        handle = mezzo.prepare(model, policy)
        for _ in range(3):
            model(torch.ones(length, 8)).sum().backward()
        assert model.mask.dtype == handle.policy.dtype
        handle.remove()
    assert not caplog.messages


class Stored(nn.Module):
    """Hands statistics of its own to batch norm."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        x = self.lin(x)
        return functional.batch_norm(x, self.mean, self.var, None, None, self.training, 0.01)


def test_running_statistics_that_a_program_hands_to_batch_norm_are_fp32():
    torch.manual_seed(0)
    plain = Stored()
    model = copy.deepcopy(plain)
    mezzo.prepare(model, POLICIES[0])
    model.eval()
    model(torch.randn(8, 4))
    assert model.mean.dtype == torch.bfloat16
    model.train()
    for _ in range(20):
        x = torch.randn(8, 4) + 3
        model(x), plain(x)
    assert model.mean.dtype == model.var.dtype == torch.float32
    torch.testing.assert_close(model.mean, plain.mean, rtol=0.01, atol=0.002)


def test_a_session_counts_through_steps_checkpoints_and_close():
    def session():
        model = nn.Sequential(Counted(WRITES["operator"]), nn.BatchNorm1d(4))
        return model, mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), POLICIES[0])

    def step(model, amp):
        with amp.autocast():
            loss = model(torch.randn(4, 4)).square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()

    model, amp = session()
    for _ in range(4):
        step(model, amp)
    assert model[0].sum[1] == 255 + 4
    other, amp_2 = session()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    amp_2.load_state_dict(copy.deepcopy(amp.state_dict()))
    assert other[0].sum.dtype == torch.bfloat16  # stored low, with every bit of it beside
    step(other, amp_2)
    assert other[0].sum[1] == 255 + 5
    amp.close()
    assert model[0].sum[1] == 255 + 4


def test_a_write_outside_a_pass_is_no_pass_s():
    model = Counted(lambda module: None)
    handle = mezzo.prepare(model, POLICIES[0])
    model(torch.ones(2, 4))
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    with torch.no_grad():
        model.table.mul_(2.0)
    with handle.autocast():
        model(torch.ones(2, 4))
    assert model.sum.dtype == model.table.dtype == torch.bfloat16


def test_what_is_first_written_later_is_fp32_from_there_on(caplog):
    passes = []

    def late(module):
        passes.append(None)
        if len(passes) > 2:
            module.sum += STEP

    model, x = Counted(late), torch.ones(2, 4)
    mezzo.prepare(model, POLICIES[0])
    model(x), model(x)
    assert model.sum.dtype == torch.bfloat16
    model(x)
    assert model.sum.dtype == torch.float32
    before = model.sum.clone()
    model(x)
    assert torch.equal(model.sum, before + STEP)
    assert len(caplog.messages) == 1


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Counted(WRITES["method"]), Counted(WRITES["assignment"])

    def first(self, x):
        return self.a(x)

    def forward(self, x):
        return self.b(self.a(x))


def test_parts_that_are_called_by_themselves_are_watched_too(caplog):
    model = Both()
    mezzo.prepare(model, POLICIES[1])
    model.first(torch.ones(2, 4))
    assert (model.a.sum.dtype, model.b.sum.dtype) == (torch.float32, torch.float16)
    model(torch.ones(2, 4))
    assert (model.a.sum[0], model.b.sum[0]) == (3 * BEYOND, 2 * BEYOND)
    caplog.clear()
    model = Both()
    mezzo.prepare(model, POLICIES[0])
    model(torch.ones(2, 4))
    assert "the text fp32_param=a.sum+b.sum" in caplog.messages[0]  # one cure, of all that were written


def test_other_tensors_in_the_places_of_buffers_are_the_caller_s():
    model = Counted(WRITES["method"])
    mezzo.prepare(model, POLICIES[0])
    exact, others = model.state_dict()["sum"], {"sum": torch.zeros(4), "table": torch.zeros(4)}
    functional_call(model, others, (torch.ones(2, 4),))
    assert torch.equal(others["sum"], STEP)
    assert model.sum.dtype == torch.bfloat16
    model(torch.ones(2, 4))
    assert torch.equal(model.sum, exact + STEP)  # in FP32, the first update too


class Codebook(nn.Module):
    """A product reads it, and its average is written in the same pass."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("codes", torch.eye(4))

    def forward(self, x):
        hidden = self.lin(x)
        scores = hidden @ self.codes.to(hidden.dtype)
        self.codes.data.mul_(0.99).add_(0.01)
        return scores


def test_a_table_that_autograd_has_saved_may_be_written_through_data():
    torch.manual_seed(0)
    plain = Codebook()
    model = copy.deepcopy(plain)
    mezzo.prepare(model, POLICIES[0])
    x = torch.randn(2, 4)
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    torch.testing.assert_close(model.codes, plain.codes, rtol=1e-6, atol=0)
    torch.testing.assert_close(model.lin.weight.grad.float(), plain.lin.weight.grad, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_counts_from_the_second_pass_on():
    torch.compiler.reset()
    model = Counted(lambda module: module.sum.add_(1.0))
    handle = mezzo.prepare(model, "O2,dtype=bfloat16,emulate=false")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(4):
        with handle.autocast():
            compiled(torch.ones(2, 4))
    assert model.sum.dtype == torch.float32
    assert model.sum[1] in (256 + 3, 255 + 4)


# Frozen weights -----------------------------------------------------------------------------------------


class Student(nn.Module):
    """A student and the average of its weights, as in BYOL."""

    def __init__(self):
        super().__init__()
        self.net, self.teacher = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, x):
        return (self.net(x) - self.teacher(x)).square().mean()

    @torch.no_grad()
    def follow(self):
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.mul_(0.99).add_(other, alpha=0.01)


@pytest.mark.parametrize("rule, follows, times", [("", True, 1), (",fp32_module=teacher", True, 0), ("", False, 0)])
def test_a_teacher_that_stands_still_in_16_bits_is_named_once(rule, follows, times, caplog):
    torch.manual_seed(0)
    model = Student()
    handle = mezzo.prepare(model, POLICIES[0] + rule)
    for number in range(8):
        if number % 3 == 0:
            model.load_state_dict(model.state_dict())  # which writes frozen weights, too
        with handle.autocast():
            model(torch.ones(2, 8))
        if follows:
            model.follow()
    said = [text for text in caplog.messages if text.startswith("frozen weights")]
    assert len(said) == len(caplog.messages) == times
    assert all('policy.keep_fp32(modules=["teacher"]), the text fp32_module=teacher' in text for text in said)


# What stays low -----------------------------------------------------------------------------------------


def rotate_half(x):
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


def turned(t, table):
    pairs = torch.view_as_complex(t.float().reshape(*t.shape[:-1], 4, 2)) * table
    return torch.view_as_real(pairs).flatten(-2).type_as(t)


class Attention(nn.Module):
    """Attention of several styles, each with its persistent tables."""

    def __init__(self, style):
        super().__init__()
        self.style, self.qkv, self.out = style, nn.Linear(8, 24), nn.Linear(8, 8)
        angles = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001]).repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))
        self.register_buffer("causal", torch.ones(6, 6).tril())

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if "rotary" in self.style:
            q, k = (t * self.cos + rotate_half(t) * self.sin for t in (q, k))
        if "complex" in self.style:
            table = torch.complex(self.cos[:, :4].float(), self.sin[:, :4].float())
            q, k = turned(q, table), turned(k, table)
        if "fused" in self.style:
            return self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask))
        scores = q @ k.mT / 8**0.5
        is_filled = "filled" in self.style
        scores = scores.masked_fill(self.causal == 0, float("-inf")) if is_filled else scores + self.mask
        return self.out(scores.softmax(-1) @ v)


@pytest.mark.parametrize("policy", POLICIES)
def test_tables_and_masks_stay_low_so_that_operands_agree(policy):
    for style in ("rotary fused", "rotary additive", "complex fused", "additive", "filled"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(8), Attention(style))
        by_hand = copy.deepcopy(model)
        low = mezzo.prepare(model, policy).policy.dtype
        by_hand.to(low)
        x = torch.randn(2, 6, 8)
        out, expected = model(x), by_hand(x.to(low))
        assert {buffer.dtype for buffer in model.buffers()} == {low}
        torch.testing.assert_close(out, expected.float(), rtol=0.05, atol=0.02, msg=style)
        out.square().mean().backward()
        assert all(param.grad.dtype == low and param.grad.isfinite().all() for param in model.parameters())
