"""MasterWeights around any torch optimizer, against the same optimizer on FP32 weights."""

import copy
import weakref

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MasterWeights, PolicyError, StateError
from mezzo.optim.masters import masters_of

LOW = [torch.float16, torch.bfloat16]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
}


def params_of(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(5, 4), (7,)]]


def set_gradients(params, step, dtype):
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        gradient = torch.randn(param.shape, generator=generator).to(dtype)
        param.grad = (
            gradient.to(param.dtype) if getattr(param, "grad_dtype", None) is None else gradient.to(param.grad_dtype)
        )


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_equal_the_optimizer_on_fp32_weights_bit_for_bit(name, dtype):
    params = params_of(dtype)
    reference = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = OPTIMIZERS[name](params)
    masters, plain = MasterWeights(optimizer), OPTIMIZERS[name](reference)
    for step in range(12):
        set_gradients(params, step, dtype)
        set_gradients(reference, step, dtype)
        (masters.step if step % 2 else optimizer.step)()  # both spellings do the whole thing
        plain.step()
        for param, wide in zip(params, reference, strict=True):
            assert torch.equal(masters.master_of(param), wide)
            assert torch.equal(param, wide.to(dtype))
        optimizer.zero_grad()
        assert all(param.grad is None for param in (*params, *masters.masters().values()))


def test_an_update_below_half_a_unit_in_the_last_place_is_kept():
    param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    bare = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters, plain = MasterWeights(torch.optim.AdamW([param], lr=1e-3)), torch.optim.AdamW([bare], lr=1e-3)
    for _ in range(100):
        for each in (param, bare):
            each.grad = None
            each.float().sum().backward()
        masters.step()
        plain.step()
    assert bare.item() == 1.0  # what torch does today, without a word
    assert param.item() == pytest.approx(0.9, abs=0.005)


def test_originals_are_taken_over_without_a_copy():
    wide = torch.randn(4)
    param = nn.Parameter(wide.half())
    masters = MasterWeights(torch.optim.SGD([param], lr=1.0), originals={param: wide})
    assert masters.master_of(param).data_ptr() == wide.data_ptr()


def test_state_the_optimizer_already_holds_moves_exactly():
    param = nn.Parameter(torch.randn(4))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    param.grad = torch.randn(4)
    optimizer.step()
    momentum = optimizer.state[param]["momentum_buffer"]
    original, param.data = param.data, param.data.half()
    param.grad = None
    masters = MasterWeights(optimizer, originals={param: original})
    assert param not in optimizer.state
    assert optimizer.state[masters.master_of(param)]["momentum_buffer"] is momentum


def test_fp32_parameters_stay_where_they_are():
    low, wide = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([low, wide], lr=0.5)
    masters = MasterWeights(optimizer)
    assert optimizer.param_groups[0]["params"][1] is wide is masters.master_of(wide)
    low.grad, wide.grad = torch.ones(2), torch.ones(2)
    masters.step()
    assert torch.equal(wide, torch.full((2,), 0.5))
    masters.zero_grad()
    assert wide.grad is None


def test_zero_grad_may_keep_the_gradients_as_zeros():
    param = nn.Parameter(torch.ones(2).half())
    masters = MasterWeights(torch.optim.SGD([param], lr=1.0), grad_dtype="param")
    param.grad = torch.ones(2).half()
    masters.optimizer.zero_grad(set_to_none=False)
    assert torch.equal(param.grad, torch.zeros(2).half())


@pytest.mark.parametrize("driver", ["masters", "session"])
@pytest.mark.parametrize("dtype", LOW)
def test_zeroed_gradients_keep_weights_in_the_step(dtype, driver):
    """As in torch: momentum and decay move a weight that the next loss does not reach, unless its gradient is None."""
    for set_to_none in (False, True):
        wide = nn.ParameterList([torch.full((3,), 1.0), torch.full((3,), 2.0)])
        low = nn.ParameterList([param.detach().clone() for param in wide])
        plain, optimizer = (torch.optim.SGD(of.parameters(), 0.125, 0.5, weight_decay=0.25) for of in (wide, low))
        if driver == "masters":
            masters = MasterWeights(optimizer.__class__(low.to(dtype).parameters(), 0.125, 0.5, weight_decay=0.25))
            backward, step, zero, value_of = torch.Tensor.backward, masters.step, masters.zero_grad, masters.master_of
        else:
            amp = mezzo.MixedPrecision(low, optimizer, f"O2,dtype={dtype},loss_scale=none".replace("torch.", ""))
            backward, step, zero, value_of = amp.backward, amp.step, amp.zero_grad, masters_of(optimizer).master_of
        for used in (wide, low), (wide[:1], low[:1]), (wide[:1], low[:1]):
            for params, back in zip(used, (torch.Tensor.backward, backward), strict=True):
                back(sum(param.float().sum() for param in params))
            plain.step()
            step()
            for param, of in zip(low, wide, strict=True):
                assert torch.equal(value_of(param), of)
            plain.zero_grad(set_to_none)
            zero(set_to_none)
        assert (wide[1].grad is None) == set_to_none


@pytest.mark.parametrize("grad_dtype, expected", [("float32", torch.float32), ("param", torch.float16)])
def test_grad_dtype_says_in_what_micro_batches_are_summed(grad_dtype, expected):
    param = nn.Parameter(torch.ones(1).half())
    MasterWeights(torch.optim.SGD([param], lr=1.0), grad_dtype=grad_dtype)
    for value in (2048.0, 1.0):  # 2049 is not an FP16 number
        (param * value).sum().backward()
    assert param.grad.dtype == expected
    assert param.grad.item() == (2049.0 if expected == torch.float32 else 2048.0)


def test_schedulers_and_new_groups_keep_working():
    first, second = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(3).bfloat16())
    optimizer = torch.optim.SGD([first], lr=1.0)
    masters = MasterWeights(optimizer)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for param in (first, second):
        param.grad = torch.ones_like(param, dtype=torch.float32)
    optimizer.step()
    scheduler.step()
    assert (first[0].item(), second[0].item()) == (0.0, 0.5)
    assert masters.master_of(second).dtype == torch.float32
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


@pytest.mark.parametrize("room", [1, 40, 1 << 24])
def test_gradients_cast_together_are_those_cast_one_by_one(monkeypatch, room):
    shapes = [(5, 4), (7,), (), (0, 3), (64,), (3, 1, 5), (8, 8), (2, 6), (1,), (65,)]
    kinds = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.bfloat16]
    params = [nn.Parameter(torch.ones(shape, dtype=kinds[i % 5])) for i, shape in enumerate(shapes)]
    generator = torch.Generator().manual_seed(0)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 2.0**-14).to(param.dtype)  # FP16: subnormals too
    params[0].grad.view(-1)[:4] = torch.tensor([float("inf"), float("-inf"), -0.0, 2.0**-133])
    params[6].grad = params[6].grad.t()  # goes alone: not contiguous
    params[8].grad = torch._neg_view(-params[8].grad)  # its memory holds other values than it has
    expected = [param.grad.float() for param in params]
    copies = []
    plain = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: copies.append(len(of)) or plain(to, of))
    monkeypatch.setattr("mezzo.optim.gathering._LAUNCHING", "cpu")
    monkeypatch.setattr("mezzo.optim.gathering._TOGETHER", room)
    masters = MasterWeights(torch.optim.SGD(params, lr=0.1), grad_dtype="param")
    masters.gather()
    found = [masters.master_of(param).grad for param in params]
    for param, gradient, wanted in zip(params, found, expected, strict=True):
        assert param.grad is None
        assert (gradient.dtype, gradient.shape, gradient.stride()) == (torch.float32, wanted.shape, wanted.stride())
        assert torch.equal(gradient.view(torch.int32), wanted.view(torch.int32))
        assert gradient.storage_offset() % 64 == 0
    assert sum(copies) == len(params) - 2  # one without elements has nothing to copy
    assert (len(copies) == len(params) - 2) == (room == 1)
    # Each is a tensor of its own: autograd would refuse neighbours of one version.
    versions = [gradient._version for gradient in found]
    found[1].add_(1)
    assert [gradient._version for gradient in found] == [each + (i == 1) for i, each in enumerate(versions)]
    assert all(torch.equal(found[i], expected[i]) for i in (0, 2, 4))
    # A second micro-batch is added to them.
    for param in params:
        param.grad = torch.ones_like(param)
    masters.gather()
    assert torch.equal(found[4], expected[4] + 1)


def test_a_sparse_gradient_goes_alone_and_stays_sparse(monkeypatch):
    params = [nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)) for _ in range(3)]
    for number, param in enumerate(params):
        param.grad = torch.full_like(param, 2.0**-number)
    params[1].grad = params[1].grad.to_sparse()
    monkeypatch.setattr("mezzo.optim.gathering._LAUNCHING", "cpu")
    masters = MasterWeights(torch.optim.SGD(params, lr=0.1), grad_dtype="param")
    masters.gather()
    found = [masters.master_of(param).grad for param in params]
    assert [(each.is_sparse, each.dtype) for each in found] == [(i == 1, torch.float32) for i in range(3)]
    assert [each.to_dense().unique().tolist() for each in found] == [[1.0], [0.5], [0.25]]


ODD, EVEN = [(5, 4), (7,), (), (65,)], [(8, 8), (64,), (2, 32), (4, 4, 4)]


@pytest.mark.parametrize(
    "shapes, room, launches",
    [(ODD, 1, 4), (ODD, 21, 2), (ODD, 1 << 24, 1), (EVEN, 1, 4), (EVEN, 65, 2), (EVEN, 1 << 24, 1)],
)
def test_gradients_of_one_kind_are_cast_in_few_launches_that_free_them(monkeypatch, shapes, room, launches):
    params = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
    for place, param in enumerate(params):
        param.grad = torch.full_like(param, 1.0 + place)
    held = [weakref.ref(param.grad) for param in params]
    left = []
    plain = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *given: left.append(sum(each() is not None for each in held)) or plain(*given)
    )
    monkeypatch.setattr("mezzo.optim.gathering._LAUNCHING", "cpu")
    monkeypatch.setattr("mezzo.optim.gathering._TOGETHER", room)
    masters = MasterWeights(torch.optim.SGD(params, lr=0.1), grad_dtype="param")
    masters.gather()
    found = [masters.master_of(param).grad for param in params]
    for place, (param, gradient) in enumerate(zip(params, found, strict=True)):
        assert param.grad is None
        assert torch.equal(gradient, torch.full(param.shape, 1.0 + place))
        assert gradient.data_ptr() % 64 == found[0].data_ptr() % 64
        gradient.add_(1)
        assert gradient._version == 2
    assert len(left) == launches
    assert left == sorted(set(left), reverse=True)  # none waits for all


def test_gradients_in_fp32_move_without_a_copy(monkeypatch):
    monkeypatch.setattr("mezzo.optim.gathering._LAUNCHING", "cpu")
    params = params_of(torch.bfloat16)
    masters = MasterWeights(torch.optim.SGD(params, lr=0.1), grad_dtype="float32")
    gradients = [torch.ones(param.shape) for param in params]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    masters.gather()
    assert all(masters.master_of(param).grad is each for param, each in zip(params, gradients, strict=True))


def test_closures_see_current_weights_and_gradients():
    """LBFGS moves the weights between evaluations of its closure."""
    target = torch.tensor([3.0, -2.0])
    param = nn.Parameter(torch.zeros(2).bfloat16())
    optimizer = torch.optim.LBFGS([param], lr=0.5, max_iter=20)
    masters = MasterWeights(optimizer)

    def closure():
        optimizer.zero_grad()
        loss = (param.float() - target).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        masters.step(closure)
    assert torch.equal(param, target.bfloat16())


def test_outside_edits_are_taken_over_and_precision_is_kept():
    param = nn.Parameter(torch.ones(2).bfloat16())
    masters = MasterWeights(torch.optim.SGD([param], lr=1.0))
    with torch.no_grad():
        masters.master_of(param).fill_(1 + 2**-12)  # rounds to 1.0
    with torch.no_grad():
        param[1] = 5.0  # a loaded checkpoint, a clipped weight
    param.grad = torch.zeros(2)
    masters.step()
    assert masters.master_of(param).tolist() == [1 + 2**-12, 5.0]
    assert param.tolist() == [1.0, 5.0]
    param.data = torch.full((2,), 7.0, dtype=torch.bfloat16)  # given other data altogether
    param.grad = torch.zeros(2)
    masters.step()
    assert masters.master_of(param).tolist() == [7.0, 7.0]


@pytest.mark.parametrize("dtype", LOW)
def test_state_round_trips_and_continues_bit_for_bit(dtype, tmp_path):
    def build():
        params = params_of(dtype)
        return params, MasterWeights(OPTIMIZERS["adamw"](params))

    params, masters = build()
    for step in range(20):
        if step == 10:
            torch.save(masters.state_dict(), tmp_path / "state.pt")
        set_gradients(params, step, dtype)
        masters.step()
    again, resumed = build()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(10, 20):
        set_gradients(again, step, dtype)
        resumed.step()
    for mine, theirs in zip(again, params, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(resumed.master_of(mine), masters.master_of(theirs))


def test_a_state_of_another_model_is_refused_and_nothing_loaded():
    masters = MasterWeights(torch.optim.SGD([nn.Parameter(torch.ones(2).half())], lr=1.0))
    other = MasterWeights(torch.optim.SGD([nn.Parameter(torch.zeros(3).half())], lr=1.0))
    before = copy.deepcopy(masters.state_dict())
    with pytest.raises(StateError, match=r"belong to another model(.|\n)*master 0: \(2,\) → \(3,\)"):
        masters.load_state_dict(other.state_dict())
    assert torch.equal(masters.state_dict()["masters"][0], before["masters"][0])


def test_remove_gives_the_parameters_back_with_their_state():
    param = nn.Parameter(torch.ones(2).half())
    optimizer = torch.optim.SGD([param], lr=0.25, momentum=0.9)
    masters = MasterWeights(optimizer)
    param.grad = torch.ones(2)
    masters.step()
    masters.remove()
    assert optimizer.param_groups[0]["params"] == [param]
    assert "momentum_buffer" in optimizer.state[param]
    assert "zero_grad" not in vars(optimizer)
    param.grad = torch.ones(2).half()
    optimizer.zero_grad()
    assert param.grad is None


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: MasterWeights("adam"), PolicyError, "must be a torch.optim.Optimizer, not str"),
        (
            lambda: MasterWeights(torch.optim.SGD(params_of(torch.half), lr=1.0), grad_dtype="fp8"),
            PolicyError,
            "unknown grad_dtype 'fp8'",
        ),
        (
            lambda: MasterWeights(MasterWeights(torch.optim.SGD(params_of(torch.half), lr=1.0)).optimizer),
            StateError,
            "has master weights already",
        ),
        (
            lambda: MasterWeights(torch.optim.SGD(params_of(torch.half), lr=1.0)).master_of(torch.ones(3)),
            StateError,
            "does not update this parameter",
        ),
    ],
)
def test_wrong_use_is_named(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_states_that_are_none_are_named_and_nothing_is_loaded():
    masters = MasterWeights(torch.optim.SGD(params_of(torch.half), lr=1.0))
    for wrong in ({}, None, {"masters": []}):
        with pytest.raises(StateError, match="not the state of MasterWeights"):
            masters.load_state_dict(wrong)


def test_a_parameter_is_added_once():
    param = nn.Parameter(torch.ones(2).half())
    optimizer = torch.optim.SGD([param], lr=1.0)
    masters = MasterWeights(optimizer)
    with pytest.raises(PolicyError, match="updates these parameters already"):
        optimizer.add_param_group({"params": param})
    assert len(optimizer.param_groups) == 1
    other = nn.Parameter(torch.ones(3).half())
    optimizer.add_param_group({"params": (p for p in [other])})
    assert masters.master_of(other).dtype == torch.float32


def test_masters_are_not_copied():
    with pytest.raises(StateError, match="MasterWeights cannot be copied"):
        copy.deepcopy(MasterWeights(torch.optim.SGD(params_of(torch.half), lr=1.0)))


@pytest.mark.parametrize("collection", [set, frozenset])
def test_parameters_without_an_order_are_refused_as_torch_refuses_them(collection):
    masters = MasterWeights(torch.optim.SGD([nn.Parameter(torch.ones(2).half())], lr=0.1))
    with pytest.raises(TypeError, match="ordered collections"):
        masters.optimizer.add_param_group({"params": collection([nn.Parameter(torch.ones(3).half())])})
    assert len(masters.optimizer.param_groups) == 1
    assert len(masters.masters()) == 1
