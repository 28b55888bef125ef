"""Models whose weights lie in halves: saved, loaded, copied, moved, taken apart; beside the same in plain torch."""

import copy
import io
import multiprocessing
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

import mezzo
from mezzo import NumericsError, StateError
from mezzo.weights import Halves
from mezzo.weights.models import in_halves, of_halves

from .values import BF16, FP16, LOW, on_grid

POLICIES = {BF16: "O2,dtype=bfloat16,emulate=true", FP16: "O2,dtype=float16,emulate=true"}

each_dtype = pytest.mark.parametrize("dtype", LOW, ids=str)


class Net(nn.Module):
    """Tied weights, a frozen one, batch norm, a convolution, an embedding, a buffer; values on the 16-bit grid."""

    def __init__(self, seed=0):
        super().__init__()
        self.table, self.body = nn.Embedding(10, 6), nn.Linear(6, 6)
        self.conv, self.norm = nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)
        self.frozen, self.head = nn.Linear(5, 5), nn.Linear(6, 10, bias=False)
        self.register_buffer("mean", torch.arange(5.0) / 7)
        for number, param in enumerate(self.parameters()):
            param.data = on_grid(param.shape, 100 * seed + number)
        self.head.weight = self.table.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens):  # (batch, 3)
        hidden = torch.tanh(self.body(self.table(tokens)))
        seen = self.frozen(self.norm(self.conv(hidden))) - self.mean
        return self.head(hidden).square().mean() + seen.square().mean()


def tokens(seed=0):
    return torch.randint(0, 10, (4, 3), generator=torch.Generator().manual_seed(seed))


def prepared(dtype=BF16, seed=0):
    model = Net(seed)
    return model, mezzo.prepare(model, POLICIES[dtype])


def both(dtype=BF16, seed=0):
    """A plain model, and a prepared one of the same values."""
    return Net(seed), prepared(dtype, seed)[0]


def trained(model, steps=3, optimizer=None, start=0):
    """Train outside of any region, where storage alone differs."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(start, start + steps):
        optimizer.zero_grad()
        model(tokens(number)).backward()
        optimizer.step()
    return optimizer


def assert_same_values(one, two):
    one, two = (side if isinstance(side, dict) else side.state_dict() for side in (one, two))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.dtype == two[name].dtype, name
        torch.testing.assert_close(value, two[name], rtol=0, atol=0, msg=name)


def through_a_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def test_what_lies_where():
    model, handle = prepared()
    for name in ("table", "body", "conv", "frozen", "head"):
        assert isinstance(getattr(model, name).weight, Halves), name
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.ndim < 2:
            assert not of_halves(tensor), name
        assert tensor.dtype in (torch.float32, torch.int64), name
    assert model.head.weight is model.table.weight
    assert not model.frozen.weight.requires_grad
    count = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    sizes = mezzo.weights.halves(model)
    assert (sizes.high, sizes.low, sizes.count) == (2 * count, 2 * count, count)
    assert sizes.plain == 4 * sum(p.numel() for p in model.parameters() if p.ndim < 2)
    handle.remove()
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert_same_values(model, Net())
    assert mezzo.weights.halves(model).high == 0


# Saving and loading -------------------------------------------------------------------------------------------


@each_dtype
def test_state_dicts_hold_plain_fp32_values_and_tied_ones_once(dtype):
    plain, model = both(dtype)
    for net in (plain, model):
        trained(net)
    shown = model.state_dict()
    if dtype == BF16:
        assert_same_values(shown, plain)
    assert {type(value) for value in shown.values()} == {torch.Tensor}
    assert shown["head.weight"].data_ptr() == shown["table.weight"].data_ptr()
    assert type(shown) is type(plain.state_dict())
    assert shown._metadata == plain.state_dict()._metadata
    around, given = nn.Sequential(nn.Identity(), model).state_dict(), {}
    model.state_dict(destination=given, prefix="1.")
    for state_dict in (around, given):
        assert_same_values({key.removeprefix("1."): value for key, value in state_dict.items()}, model)
    kept = model.state_dict(keep_vars=True)
    assert kept["body.weight"] is model.body.weight
    assert torch.equal(model.body.state_dict()["weight"], model.body.weight)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_saved_state_dict_is_loaded_without_mezzo(keep_vars):
    model, _ = prepared()
    trained(model)
    loaded = through_a_file(model.state_dict(keep_vars=keep_vars), weights_only=True)
    assert_same_values({key: value.detach() for key, value in loaded.items()}, model)
    assert not {type(value) for value in loaded.values()} - {torch.Tensor, nn.Parameter}
    plain = Net(seed=1)
    plain.load_state_dict(loaded)
    assert_same_values(plain, model)


@each_dtype
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, mezzo.optim.SGD])
def test_what_is_written_into_a_state_dict_reaches_the_weights(dtype, optimizer):
    """As a loop that averages, or ``dist.broadcast(value, 0)`` over its values, does."""
    plain, model = both(dtype)
    optimizers = [optimizer(net.parameters(), lr=0.1) for net in (plain, model)]
    for number in range(2):
        for net, of in zip((plain, model), optimizers, strict=True):
            with torch.no_grad():
                for value in net.state_dict().values():
                    if value.is_floating_point():
                        value.mul_(0.75 + number)
            trained(net, 1, of, start=number)
    if dtype == BF16:
        assert_same_values(model, plain)
    assert mezzo.weights.halves(model).high
    shown, before = model.state_dict(), model.body.weight.detach().clone()
    trained(model, 1, optimizers[1])  # from here on it is what the weights were
    assert torch.equal(shown["body.weight"], before)
    assert not torch.equal(model.body.weight, before)
    assert all(
        param.cell.decoded is None
        for param in model.parameters()
        if isinstance(param, Halves) and param.grad is not None
    )


def test_a_state_dict_while_an_optimizer_steps_keeps_its_values():
    model, _ = prepared()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    model.body.weight.grad = torch.ones(6, 6)
    optimizer.register_step_post_hook(lambda *_: seen.append(model.state_dict()))
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.state_dict()))
    optimizer.step()
    before, after = seen
    assert torch.equal(before["body.weight"] - 0.1, after["body.weight"])
    assert torch.equal(after["body.weight"], model.body.weight)


def test_compiled_code_reads_what_is_written_into_a_state_dict_and_is_not_compiled_anew():
    torch._dynamo.reset()
    seen, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    for model in both():
        body, rows = model.body, torch.ones(2, 6)
        compiled = torch.compile(body, backend=backend, fullgraph=True)
        for _ in range(3):
            body.state_dict()["weight"].mul_(0.75)
            seen.append(compiled(rows).detach())
        graphs.append(None)
    assert torch.equal(torch.stack(seen[:3]), torch.stack(seen[3:]))
    assert [graph is None for graph in graphs] == [False, True, False, True]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, mezzo.optim.AdamW])
def test_an_optimizer_that_is_pickled_beside_its_model_trains_it(optimizer):
    model, _ = prepared()
    model.register_forward_hook(_seen, always_call=True)
    trained(model, 1, of := optimizer(model.parameters(), lr=0.1))
    again, its = through_a_file((model, of), weights_only=False)
    assert {id(param) for group in its.param_groups for param in group["params"]} == {*map(id, again.parameters())}
    assert {type(param) for param in again.parameters()} == {nn.Parameter}
    assert [*again._forward_hooks.values()] == [_seen]
    assert again._forward_hooks.keys() == again._forward_hooks_always_called.keys()
    assert not [name for module in again.modules() for name in vars(module) if "mezzo" in name]
    trained(model, 2, of, start=1)
    trained(again, 2, its, start=1)
    assert_same_values(again, model)


def _seen(*_):
    """Do nothing, as a hook that can be pickled."""


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("saved", ["plain", "prepared", "low"])
def test_loading_writes_the_parameters_that_an_optimizer_trains_and_batch_norm_goes_on(saved, assign, wraps):
    other = Net(seed=1) if saved != "prepared" else prepared(seed=1)[0]
    trained(other)
    given = other.state_dict()
    if saved == "low":
        given = {key: value.bfloat16() if value.ndim > 1 else value for key, value in given.items()}
    runs = []
    for model in both():
        optimizer, objects = trained(model), dict(model.named_parameters())
        root, prefix = (nn.Sequential(model), "0.") if wraps else (model, "")
        is_plain = not isinstance(model.body.weight, Halves)
        # Plain torch puts other parameters in their places, which no optimizer trains.
        root.load_state_dict({prefix + key: value for key, value in given.items()}, assign=assign and not is_plain)
        assert model.head.weight is model.table.weight
        for name, param in objects.items():
            assert model.get_parameter(name) is param
        trained(model, optimizer=optimizer, start=3)
        runs.append(model)
    assert_same_values(*runs)
    assert isinstance(runs[1].body.weight, Halves)


def test_what_is_left_out_or_unknown_is_told_in_torchs_words_and_the_rest_is_loaded():
    runs = []
    for model in both():
        keys = model.load_state_dict({"body.weight": torch.ones(6, 6), "unknown": torch.ones(2)}, strict=False)
        for given, words in (
            ({"unknown": torch.ones(2)}, "Unexpected key"),
            ({"body.weight": torch.ones(7, 6)}, "size"),
        ):
            with pytest.raises(RuntimeError, match=words):
                model.load_state_dict(Net().state_dict() | given)
        runs.append((model, keys))
    assert runs[0][1] == runs[1][1]
    assert_same_values(runs[0][0], runs[1][0])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    "value", [torch.full((6, 6), 70000.0), torch.full((6, 6), 1e5, dtype=BF16)], ids=["fp32", "bf16"]
)
def test_a_state_dict_beyond_fp16_is_refused_before_anything_is_loaded(value, assign):
    model, _ = prepared(FP16)
    before = model.state_dict()
    for root, prefix in ((model, ""), (nn.Sequential(model), "0.")):
        given = {prefix + key: tensor.clone() for key, tensor in Net(seed=1).state_dict().items()}
        with pytest.raises(NumericsError, match=r"body\.weight") as refused:
            root.load_state_dict(given | {f"{prefix}body.weight": value}, assign=assign)
        assert "fp32_param=" in str(refused.value)
        assert_same_values(before, model)
    given = Net(seed=1).state_dict() | {"body.bias": torch.full((6,), 70000.0)}  # plain: any value
    model.load_state_dict(given, assign=assign)


@each_dtype
@pytest.mark.parametrize("way", ["to_empty", "assign"])
def test_a_model_that_is_made_on_meta_is_prepared_there_and_filled_later(dtype, way):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    mezzo.prepare(model, POLICIES[dtype])
    other = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    if way == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(other.state_dict(), assign=way == "assign")
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    assert in_halves(model[0].weight).hi.dtype == dtype
    if dtype == BF16:
        assert_same_values(model, other)


# Copies and pickles -----------------------------------------------------------------------------------------------

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle 2": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": lambda model: through_a_file(model, weights_only=False),
    "in a tuple": lambda model: copy.deepcopy((model, 1))[0],
    "around it": lambda model: copy.deepcopy(nn.Sequential(model))[0],
    "pickle around it": lambda model: pickle.loads(pickle.dumps(nn.Sequential(model)))[0],
}


def traces(model):
    """What a plain module has none of."""
    left = []
    twins = dict(Net().named_modules())
    for name, module in model.named_modules():
        left += [f"{name}.{attribute}" for attribute in vars(module).keys() - vars(twins[name]).keys()]
        left += [
            f"{name}.{attribute}" for attribute, value in vars(module).items() if attribute.endswith("hooks") and value
        ]
    return left


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("in_session", [False, True])
def test_a_copy_is_a_plain_model_which_trains_in_plain_torch(name, in_session):
    model = Net()
    if in_session:
        handle = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), POLICIES[BF16])
    else:
        handle = mezzo.prepare(model, POLICIES[BF16])
    made = COPIES[name](model)
    assert_same_values(made, Net())
    assert traces(made) == []
    assert made.head.weight is made.table.weight
    assert made.head.weight is not model.head.weight
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in Net().parameters()]
    assert {type(param) for param in made.parameters()} == {nn.Parameter}
    twin = Net()
    for net in (made, twin):
        trained(net)
    assert_same_values(made, twin)
    assert_same_values(model, Net())
    assert isinstance(model.body.weight, Halves)
    made.half()
    del handle


def test_a_model_and_its_optimizer_are_copied_together():
    runs = []
    for model in both():
        optimizer = trained(model)
        model, optimizer = copy.deepcopy((model, optimizer))
        known = {id(param) for group in optimizer.param_groups for param in group["params"]}
        assert known == {*map(id, model.parameters())}
        trained(model, optimizer=optimizer, start=3)
        runs.append(model)
    assert_same_values(*runs)


def test_parameters_are_copied_as_plain_ones():
    plain, model = both()
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        for made in (copy.deepcopy(two), pickle.loads(pickle.dumps(two)), through_a_file(two, weights_only=True)):
            assert type(made) is nn.Parameter
            assert made.requires_grad == one.requires_grad
            assert torch.equal(made, one)
    shallow = copy.copy(model.body.weight)
    shallow.data.zero_()
    assert not model.body.weight.any()  # the same memory, as of a plain one
    shared = copy.copy(plain.body.weight)
    shared.data.zero_()
    assert not plain.body.weight.any()


# Moves ------------------------------------------------------------------------------------------------------------

CASTS = {
    "half": lambda model: model.half(), "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "to(dtype)": lambda model: model.to(FP16), "to(device, dtype)": lambda model: model.to("cpu", torch.float64),
    "of a part": lambda model: model.body.half(), "around it": lambda model: nn.Sequential(model).half(),
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_of_a_converted_model_is_refused(name):
    model, handle = prepared()
    with pytest.raises(StateError, match="a converted model is cast"):
        CASTS[name](model)
    assert_same_values(model, Net())
    handle.remove()
    CASTS[name](model)  # its own again
    assert model.body.weight.dtype != torch.float32


MOVES = {
    "to(device)": lambda model: model.to("cpu"), "cpu": lambda model: model.cpu(), "float": lambda model: model.float(),
    "to(float32)": lambda model: model.to(torch.float32), "share_memory": lambda model: model.share_memory(),
    "requires_grad_": lambda model: model.requires_grad_(True), "eval": lambda model: model.eval().train(),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_a_move_leaves_halves_and_what_trains(name):
    runs = []
    for model in both():
        optimizer = trained(model)
        assert MOVES[name](model) is model
        trained(model, optimizer=optimizer, start=3)
        runs.append(model)
    assert_same_values(*runs)
    assert isinstance(runs[1].body.weight, Halves)


def test_channels_last_is_the_order_of_both_halves():
    runs = []
    for is_prepared in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 2, 1))
        if is_prepared:
            mezzo.prepare(model, POLICIES[BF16])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.to(memory_format=torch.channels_last)
        out = model(torch.ones(2, 4, 6, 6))
        out.square().mean().backward()
        optimizer.step()
        runs.append((model, [tensor.stride() for tensor in (out, *model.parameters())]))
    assert runs[0][1] == runs[1][1]
    assert runs[1][0][0].weight.hi.stride() == runs[1][0][0].weight.stride()
    for one, two in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("part", [False, True])
def test_processes_share_both_halves(method, part):
    model = prepared()[0].share_memory()
    weight = model.body.weight
    assert weight.is_shared()
    handed = weight.data[1:3] if part else weight
    process = multiprocessing.get_context(method).Process(target=nn.init.constant_, args=(handed, 0.1))
    process.start()
    process.join()
    assert process.exitcode == 0
    wanted = Net().body.weight.detach()
    wanted[1:3] = 0.1
    assert torch.equal(weight, wanted if part else torch.full((6, 6), 0.1))
    assert torch.equal(weight.to(BF16), weight.detach().clone().bfloat16())


# .data ------------------------------------------------------------------------------------------------------------

GIVEN = {
    "same": lambda w: w.detach() * 2, "shape": lambda w: torch.ones(3, 6), "low": lambda w: (w.detach() * 2).bfloat16(),
    "double": lambda w: w.detach().double() * 2, "its own": lambda w: w.data, "its own view": lambda w: w.data.t(),
    "strides": lambda w: (w.detach() * 2).t().contiguous().t(), "a parameter": lambda w: nn.Parameter(w.detach() * 2),
    "a part": lambda w: torch.arange(100.0)[3:39].view(6, 6),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_other_data_is_followed_and_trains(name):
    seen = []
    for model in both():
        weight = model.body.weight
        weight.note, calls = "a program's", []
        weight.register_post_accumulate_grad_hook(lambda param, calls=calls: calls.append(param.shape))
        weight.data = given = GIVEN[name](weight)
        assert (model.body.weight is weight, weight.note) == (True, "a program's")
        facts = [weight.dtype, weight.shape, weight.stride(), weight.requires_grad, weight.is_leaf]
        facts += [weight.to(BF16).tolist(), weight.t()[1:].to(BF16).tolist()]
        out = functional.linear(torch.ones(2, weight.shape[1], dtype=weight.dtype), weight)
        out.sum().backward()
        torch.optim.SGD([weight], lr=0.5).step()
        seen.append((weight.detach().clone(), [*facts, calls], weight.grad, given.detach().clone()))
    assert seen[0][1] == seen[1][1]
    for one, two in zip(*((value, gradient, given) for value, _, gradient, given in seen), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_what_is_given_as_data_stays_what_it_is():
    """The parameter lies in its memory, and not the other way round."""
    seen = []
    for model in both():
        weight = model.body.weight
        part, given = weight.data[1:], [torch.ones(3), nn.Parameter(torch.ones(2, 6)), torch.ones(6, 6)]
        part.data, weight.data, model.conv.weight.data = given
        for tensor in given:
            tensor.data.add_(1)
        assert [type(tensor) for tensor in given] == [torch.Tensor, nn.Parameter, torch.Tensor]
        seen.append([*given, part, weight, model.conv.weight])
    for one, two in zip(*seen, strict=True):
        assert torch.equal(one, two)


def test_a_gradient_of_another_shape_goes_with_the_values_that_it_was_for():
    for other, kept in ((torch.ones(6, 6).double(), True), (torch.ones(3, 6), False)):
        weight = prepared()[0].body.weight
        weight.grad = torch.ones(6, 6)
        weight.data = other
        assert (weight.grad is not None) == kept
        assert not kept or weight.grad.dtype == weight.dtype


class Shadows:
    """An average of weights as many repositories have it: shadows by name, swapped in through ``.data``."""

    def __init__(self, model):
        self.model = model
        self.values = {n: p.data.clone() for n, p in model.named_parameters()}

    def update(self):
        for name, param in self.model.named_parameters():
            self.values[name] = 0.5 * self.values[name] + 0.5 * param.data

    def apply(self):
        self.backup = {}
        for name, param in self.model.named_parameters():
            self.backup[name] = param.data
            param.data = self.values[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            param.data = self.backup[name]


def test_shadows_that_are_swapped_in_for_an_evaluation_leave_no_trace():
    seen = []
    for model in both():
        shadows, optimizer, losses = Shadows(model), torch.optim.AdamW(model.parameters(), lr=0.01), []
        for number in range(4):
            trained(model, 1, optimizer, number)
            shadows.update()
            shadows.apply()
            losses.append(model.eval()(tokens(number)).item())
            assert torch.equal(model.state_dict()["body.weight"], shadows.values["body.weight"])
            shadows.restore()
            model.train()
        seen.append((losses, model.state_dict()))
    assert seen[0][0] == seen[1][0]
    assert_same_values(seen[0][1], seen[1][1])
    assert in_halves(model.body.weight) is not None  # in halves again


# Parts of torch.nn ------------------------------------------------------------------------------------------------


def weight_norm(model):
    parametrizations.weight_norm(model.body)


def spectral_norm(model):
    torch.manual_seed(0)
    parametrizations.spectral_norm(model.body)


def pruned(model):
    prune.l1_unstructured(model.body, "weight", amount=0.3)
    prune.random_structured(model.conv, "weight", amount=1, dim=0)


def pruned_for_good(model):
    torch.manual_seed(0)
    pruned(model)
    prune.remove(model.body, "weight")
    prune.remove(model.conv, "weight")


def as_a_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())


def initialised(model):
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    nn.init.orthogonal_(model.body.weight)


def resized(model):
    model.table.weight.data = torch.cat([model.table.weight.data, torch.ones(2, 6)])


def replaced(model):
    model.body.weight = nn.Parameter(model.body.weight.detach() * 2)
    model.conv.weight = nn.Parameter(model.conv.weight)


def clipped(model):
    for param in model.parameters():
        param.data.clamp_(-0.5, 0.5)


def swapped(model):
    old = torch.utils.swap_tensors
    old(model.body.weight, nn.Parameter(torch.full((6, 6), 0.25)))


def thawed(model):
    model.frozen.requires_grad_(True)


def noisy(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=2**-12)


CHANGES = [
    weight_norm, spectral_norm, pruned, pruned_for_good, as_a_vector, initialised, resized, replaced, clipped, swapped,
    thawed, noisy,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda function: function.__name__)
def test_what_a_program_does_to_a_model_is_done_and_trains(change):
    runs = []
    for model in both():
        torch.manual_seed(0)
        change(model)
        trained(model)
        for param in model.parameters():
            param.grad = None
        loss = model.eval()(tokens())
        loss.backward()
        runs.append((model, loss, [param.grad for param in model.parameters()]))
    assert_same_values(runs[0][0], runs[1][0])
    torch.testing.assert_close(runs[0][1:], runs[1][1:], rtol=0, atol=0)


def test_the_old_weight_norm_too():
    runs = []
    for model in both():
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(model.body)
        trained(model)
        runs.append(model)
    assert_same_values(*runs)


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"max_norm": 0.5}, {"padding_idx": 3}], ids=str)
def test_embeddings_gather_rows_and_give_their_gradients(options):
    seen = []
    for is_prepared in (False, True):
        model = nn.Sequential(nn.Embedding(20, 4, **options))
        model[0].weight.data = on_grid((20, 4))
        if is_prepared:
            mezzo.prepare(model, POLICIES[BF16])
        optimizer_class = torch.optim.SparseAdam if options.get("sparse") else torch.optim.Adam
        optimizer = optimizer_class(model.parameters(), lr=0.05)
        for number in range(3):
            optimizer.zero_grad()
            out = model(torch.tensor([[number, 3], [3, number + 5]]))
            (out * torch.arange(1.0, 5.0)).square().sum().backward()
            optimizer.step()
        assert model[0].weight.grad.is_sparse == bool(options.get("sparse"))
        seen.append((out, model[0].weight.grad.to_dense(), model[0].weight.detach().clone()))
    torch.testing.assert_close(*seen, rtol=0, atol=0)


@pytest.mark.parametrize("layer_class", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda layer: layer.__name__)
def test_recurrent_layers_have_no_common_memory_and_compute_the_same(layer_class):
    seen = []
    for is_prepared in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(layer_class(4, 6, 2, batch_first=True, bidirectional=True))
        if is_prepared:
            mezzo.prepare(model, POLICIES[BF16])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            model[0].flatten_parameters()
            optimizer.zero_grad()
            out = model(on_grid((2, 5, 4)))[0]
            out.square().sum().backward()
            optimizer.step()
        seen.append((out, [param.detach().clone() for param in model.parameters()]))
    torch.testing.assert_close(*seen, rtol=0, atol=0)


def test_models_that_share_a_tensor_read_and_give_back_one_value():
    for first in (0, 1):
        models = [Net(), Net(seed=1)]
        models[1].body.weight = shared = models[0].body.weight
        values = shared.detach().clone()
        handles = [mezzo.prepare(model, POLICIES[BF16]) for model in models]
        with torch.no_grad():
            shared.mul_(1.001)
        handles[first].remove()
        assert_same_values(
            models[1 - first].body.state_dict(),
            {"weight": values * 1.001, "bias": models[1 - first].body.bias.detach()},
        )
        handles[1 - first].remove()
        for model in models:
            assert model.body.weight is shared
            assert {type(param) for param in model.parameters()} == {nn.Parameter}
        assert torch.equal(shared, values * 1.001)


def test_a_model_and_its_weights_are_freed():
    import gc
    import weakref

    model, _ = prepared()
    trained(model)
    with torch.autocast("cpu", dtype=BF16):
        model(tokens()).backward()
    left = [weakref.ref(tensor) for tensor in (model, model.body.weight, model.body.weight.hi)]
    del model, _
    gc.collect()
    assert [reference() for reference in left] == [None] * 3


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # which safetensors uses
def test_safetensors_saves_state_dicts(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = prepared()
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    other = Net(seed=1)
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    assert_same_values(other, model)
    loaded, _ = prepared(seed=2)
    safetensors.load_model(loaded, str(tmp_path / "model.safetensors"))
    assert_same_values(loaded, model)
    safetensors.save_file(dict(model.named_parameters()), str(tmp_path / "params.safetensors"))
    for name, value in safetensors.load_file(tmp_path / "params.safetensors").items():
        assert torch.equal(value, model.get_parameter(name)), name
