"""Accumulation, memory and closing: what a session holds, and what it gives back."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo import MixedPrecision, Policy, StateError

from .small_nets import POLICIES, backward, batch, session, train

# Accumulation --------------------------------------------------------------------------------------------


def test_micro_batches_are_summed_in_fp32():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    policy = Policy.O2("bfloat16", emulate=True)
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), policy)
    for value in [256.0] + [1.0] * 8:  # in BF16 256 + 1 is 256
        amp.backward((model.weight * value).float().sum())
    amp.step()
    assert next(amp.master_params()).item() == -264.0


@pytest.mark.parametrize("policy", [p for p in POLICIES if not p.startswith("O3")])
def test_accumulated_steps_equal_one_large_batch(policy):
    def run(parts):
        model = nn.Linear(16, 3)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        x = torch.linspace(-1, 1, 128).reshape(8, 16)
        for part in x.chunk(parts):
            with amp.autocast():
                loss = model(part).float().square().sum()
            amp.backward(loss)
        amp.step()
        return torch.cat([p.detach().flatten() for p in amp.master_params()])

    dtype = Policy.parse(policy).dtype
    torch.testing.assert_close(run(4), run(1), rtol=0, atol={torch.float32: 1e-5}.get(dtype, 0.05))


def test_habitual_calls_clear_model_and_master_gradients():
    model, optimizer, amp = session("O2,dtype=bfloat16,emulate=true")
    backward(amp, model, 0)
    backward(amp, model, 1)
    optimizer.zero_grad()
    assert all(p.grad is None for p in (*model.parameters(), *amp.master_params()))


# Memory --------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that are alive, and their peak, seen after every op."""

    def __init__(self, tensors):
        super().__init__()
        self.sizes = {}
        self.note(tensors)
        self.start = self.peak = self.now()

    def now(self):
        return sum(self.sizes.values())

    def note(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.note(leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.peak = max(self.peak, self.now())
        return out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options, temporaries", [({"fused": True}, 0), ({"foreach": False}, 3)])
def test_bytes_of_o2_with_adamw_and_full_masters(dtype, options, temporaries):
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    count, largest = 8 * 256 * 256, 256 * 256
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    amp = MixedPrecision(model, optimizer, f"O2,dtype={dtype},emulate=true")
    for last in (False, True):
        with amp.autocast():
            loss = model(torch.ones(1, 256)).square().mean()
        amp.backward(loss)
        del loss
        if not last:
            amp.step()
            amp.zero_grad()
    held = [*model.parameters(), *amp.master_params()]
    held += [tensor.grad for tensor in held if tensor.grad is not None]
    held += [value for state in optimizer.state.values() for value in state.values()]
    live = LiveBytes(held)
    held.clear()
    assert 16 * count <= live.start <= 16 * count + 1024  # 2 + 2 gradient + 4 master + 8 moments; step counters
    with live:
        amp.step()
    # What torch's own single-tensor AdamW allocates for one parameter is the optimizer's, and named here.
    assert 18 * count <= live.peak <= 18 * count + 4 * largest * max(1, temporaries) + 1024
    assert live.now() <= 14 * count + 1024  # the gradients are gone


# Closing -------------------------------------------------------------------------------------------------


def test_close_gives_fp32_weights_with_the_masters_values():
    model, optimizer, amp = session("O2,dtype=bfloat16,emulate=true")
    train(amp, model, range(3))
    masters = [m.detach().clone() for m in amp.master_params()]
    amp.close()
    amp.close()
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    for mine, wide in zip(model.parameters(), masters, strict=True):
        assert torch.equal(mine, wide)
    x, y = batch(0)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"step\(\) after close\(\)"):
        amp.step()


def test_several_models_and_optimizers():
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(second.parameters(), lr=0.1)]
    amp = MixedPrecision([first, second], optimizers, "O2,dtype=bfloat16,emulate=true")
    with amp.autocast():
        loss = second(first(torch.ones(2, 4))).square().mean()
    amp.backward(loss)
    before = [p.detach().clone() for p in amp.master_params()]
    amp.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, amp.master_params(), strict=True))
    assert len(list(amp.master_params(optimizers[1]))) == 2


def test_sparse_gradients():
    model = nn.Embedding(10, 3, sparse=True)
    with torch.no_grad():
        model.weight.zero_()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "O1,emulate=true", max_grad_norm=100.0)
    amp.backward(model(torch.tensor([1, 1, 4])).sum())
    step = amp.step()
    assert step.grad_norm.item() == pytest.approx((3 * 4 + 3) ** 0.5)
    assert model.weight[1].tolist() == [-2.0] * 3
