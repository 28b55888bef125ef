"""The recorder against tensors kept by hand: every kind of loop and session, what it must not count, what it leaves."""

import copy
import functools
import io
import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import MixedPrecision, Policy, StateError
from mezzo.hooks import OwnHook
from mezzo.numerics import KINDS, ExponentHistogram, Recorder, exponent_histogram, read_evidence, swallowed
from mezzo.numerics.evidence import FILE

pytestmark = pytest.mark.usefixtures("emulating")


class Block(nn.Module):
    """Outputs of every kind: nested, integer, the very tensor of a module inside, and changed in place."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)
        self.inner = nn.Sequential(self.up, self.act)

    def forward(self, x):
        hidden = self.inner(x)
        return {"out": (self.down(hidden), hidden.argmax(1)), "aside": [hidden * 2]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.norm = nn.Linear(6, 8), Block(), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        out = self.block(self.first(x))
        return self.head(self.norm(out["out"][0])) + out["aside"][0].mean()


def net(make=Net):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def batches(count, width=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(7, width, generator=generator) for _ in range(count)]


def by_hand(*tensors):
    return ExponentHistogram.total_of(exponent_histogram(tensor) for tensor in tensors).numbers


def numbers_of(evidence, tensor_kind, step=1):
    return {t.path: t.histogram.numbers for t in evidence.tensors(tensor_kind, step=step)}


def is_bare(model, *optimizers):
    """Whether no hook is left on a model, its parameters, and optimizers."""
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    hooks += [h for p in model.parameters() for h in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()]
    hooks += [h for p in model.parameters() for h in (p._backward_hooks or {}).values()]
    for optimizer in optimizers:
        hooks += [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return not hooks


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


SESSIONS = {
    "FP32": ("O0", adamw),
    "O1 FP16": ("O1,dtype=float16,loss_scale=dynamic(init=1024)", adamw),
    "O1 FP16, constant 1000": ("O1,dtype=float16,loss_scale=constant(1000)", lambda m: adamw(m, fused=True)),
    "O2 FP16": ("O2,dtype=float16,loss_scale=dynamic(init=1024)", adamw),
    "O2 FP16, mezzo.optim": (
        "O2,dtype=float16,loss_scale=dynamic(init=1024)", lambda m: mezzo.optim.AdamW(m.parameters(), lr=1e-2)
    ),
    "O3 BF16": ("O3,dtype=bfloat16", lambda m: mezzo.optim.SGD(m.parameters(), lr=1e-2)),
}  # fmt: skip


def session(name="O1 FP16", model=None, **options):
    policy, make = SESSIONS[name]
    model = net() if model is None else model
    optimizer = make(model)
    return model, optimizer, MixedPrecision(model, optimizer, Policy.of(policy), **options)


def backward(amp, model, x, weight=1.0):
    with amp.autocast():
        loss = model(x).float().square().mean() * weight
    amp.backward(loss)


def values(model):
    return [p.detach().clone() for p in model.parameters()]


# Plain loops ------------------------------------------------------------------------------------------------


def test_all_kinds_of_a_plain_loop_are_those_kept_by_hand():
    model, kept = net(), {tensor_kind: {} for tensor_kind in KINDS}
    optimizer = adamw(model)
    (x,) = batches(1)

    def keep(path, tensor):
        kept["activations"][path] = tensor.detach().clone()
        tensor.register_hook(lambda g: kept["activation_gradients"].__setitem__(path, g.clone()))

    def hook(path, module, args, output):
        start = f"{path}.output" if path else "output"
        if isinstance(output, torch.Tensor):
            keep(start, output)
        else:
            keep(f"{start}['out'][0]", output["out"][0])
            keep(f"{start}['aside'][0]", output["aside"][0])

    with Recorder(model, optimizer) as recorder:
        for path, module in model.named_modules():
            module.register_forward_hook(functools.partial(hook, path))
        kept["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(x).square().mean().backward()
        kept["weight_gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        kept["updates"] = {n: p.detach() - kept["weights"][n] for n, p in model.named_parameters()}
        optimizer.zero_grad()
        recorder.step()
    # In place: the gradient at up's output is that from before the activation.
    for tensor_kind in KINDS:
        expected = {name: by_hand(tensor) for name, tensor in kept[tensor_kind].items()}
        assert numbers_of(recorder.evidence, tensor_kind) == expected, tensor_kind
    for name, before in kept["weights"].items():
        lost = recorder.swallowed(*name.rpartition(".")[::2][:1], name=name.rpartition(".")[2])
        for target in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
            share = swallowed(before, kept["updates"][name], target)
            assert lost.share(target) == share or (math.isnan(share) and math.isnan(lost.share(target))), name
        ratio = before.abs() / kept["updates"][name].abs()
        assert lost.beyond == ((ratio >= 2048) & (kept["updates"][name] != 0)).sum()
        assert (lost.with_gradient, lost.unmoved) == ((kept["weight_gradients"][name] != 0).sum(), 0)
    paths = [module.path for module in recorder.evidence.header.modules]
    block = ["block.up", "block.inner.0", "block.act", "block.inner.1", "block.inner", "block.down", "block"]
    assert paths == ["first", *block, "norm", "head", ""]


@pytest.mark.parametrize("fused", [False, True])
def test_a_loop_of_torchs_scaler_is_recorded_unscaled(fused):
    model = net()
    optimizer = adamw(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    first, second, third = batches(3)
    plain = net()
    plain(first).square().mean().backward()
    with Recorder(model, optimizer, every=1, loss_scale=scaler) as recorder:
        for number, x in enumerate((first, second, third)):
            scaler.scale(model(x).square().mean() * (math.inf if number == 1 else 1.0)).backward()
            if number != 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorder.step()
    evidence = recorder.evidence
    assert evidence.header.loss_scale == "given"
    assert [step.loss_scales for step in evidence.steps] == [(2.0**10,), (2.0**11,), (2.0**10,)]
    assert [step.skipped for step in evidence.steps] == [False, True, False]
    for tensor_kind in ("weight_gradients", "activation_gradients"):
        histogram = evidence.histogram(tensor_kind, "head", step=1)
        assert histogram.max_abs < 2, tensor_kind
        skipped = evidence.histogram(tensor_kind, "head", step=2)
        assert skipped.nans + skipped.infs, tensor_kind
    assert numbers_of(evidence, "weight_gradients") == {n: by_hand(p.grad) for n, p in plain.named_parameters()}
    with pytest.raises(StateError, match="step 2 was skipped"):
        evidence.histogram("updates", step=2)


@pytest.mark.parametrize(
    "make, dtype",
    [(torch.optim.AdamW, "float16"), (torch.optim.LBFGS, "bfloat16"), (mezzo.optim.AdamW, "bfloat16")],
)
def test_weights_in_halves_have_updates_in_fp32_without_a_session(make, dtype):
    """The FP32 values are those of a state dict."""
    model = net(lambda: nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)))
    model[1].weight.requires_grad_(False)
    mezzo.prepare(model, f"O2,dtype={dtype}")
    optimizer = make(model.parameters(), lr=1e-2 if make is torch.optim.LBFGS else 1e-5)  # which stops below
    with Recorder(model, optimizer, every=1) as recorder:
        for x in batches(2):

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).float().square().mean()
                loss.backward()
                return loss

            before = {name: value.clone() for name, value in model.state_dict().items()}
            optimizer.step(closure)
            recorder.step()
    after = model.state_dict()
    updates = {name: after[name] - before[name] for name in after if name != "1.weight"}
    assert all(update.count_nonzero() for update in updates.values())
    assert numbers_of(recorder.evidence, "updates", step=2) == {
        name: by_hand(update) for name, update in updates.items()
    }
    assert numbers_of(recorder.evidence, "weights", step=2) == {name: by_hand(value) for name, value in before.items()}
    assert {tensor.dtype for tensor in recorder.evidence.tensors("weights", step=2)} == {"float32"}


# Sessions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_tells_of_its_steps_by_itself(name):
    model, optimizer, amp = session(name, max_grad_norm=1e-2)
    twin, _, plain = session(name)
    x, y = batches(2)
    backward(plain, twin, x)
    backward(plain, twin, y)
    before = values(model)
    with Recorder(model, optimizer) as recorder, Recorder(model, optimizer) as second:
        backward(amp, model, x)
        backward(amp, model, y)
        amp.step()
        amp.zero_grad()
        recorder.step()  # told already
    for tensor_kind in KINDS:
        assert numbers_of(second.evidence, tensor_kind) == numbers_of(recorder.evidence, tensor_kind), tensor_kind
    after = values(model)
    unrecorded, _, other = session(name, max_grad_norm=1e-2)
    backward(other, unrecorded, x)
    backward(other, unrecorded, y)
    other.step()
    # Training is the same, bit for bit.
    assert all(map(torch.equal, values(unrecorded), after))
    plain.unscale_()
    names = [n for n, _ in model.named_parameters()]
    evidence = recorder.evidence
    assert evidence.num_steps == 1
    assert numbers_of(evidence, "weight_gradients") == {n: by_hand(p.grad) for n, p in twin.named_parameters()}
    assert numbers_of(evidence, "weights") == {n: by_hand(v) for n, v in zip(names, before, strict=True)}
    assert numbers_of(evidence, "updates") == {
        n: by_hand(b.float() - a.float()) for n, a, b in zip(names, before, after, strict=True)
    }
    header = evidence.header
    assert (header.policy, header.loss_scale) == (str(amp.policy), amp.policy.loss_scale.mode)
    assert evidence.steps[0].loss_scales == ((float(plain.loss_scale),) if header.loss_scale != "none" else ())
    assert evidence.histogram("activation gradients", "head").max_abs < 1


def test_unscaled_gradients_edits_of_them_and_penalties_are_seen_as_the_optimizer_gets_them():
    model, optimizer, amp = session("O2 FP16")
    with Recorder(model, optimizer) as recorder:
        x = batches(1)[0].requires_grad_()
        with amp.autocast():
            out = model(x)
        (slope,) = amp.grad(out.float().sum(), x, create_graph=True)
        amp.backward(out.float().square().mean() + slope.square().mean())
        amp.unscale_()
        with torch.no_grad():
            model.head.weight.grad.mul_(0.5)
        gradient = model.head.weight.grad.clone()
        amp.step()
    assert recorder.histogram("weight_gradients", "head", name="weight").numbers == by_hand(gradient)
    assert recorder.histogram("activation gradients", "head").max_abs < 2


def test_a_skipped_step_has_no_updates_and_counts_what_is_not_finite():
    for name in ("O1 FP16", "O2 FP16, mezzo.optim", "O1 FP16, constant 1000"):
        model, optimizer, amp = session(name)
        with Recorder(model, optimizer, every=1) as recorder:
            for x, weight in zip(batches(2), (1e38, 1.0), strict=True):
                backward(amp, model, x, weight)
                amp.step()
                amp.zero_grad()
        assert [step.skipped for step in recorder.evidence.steps] == [True, False], name
        skipped = recorder.histogram("weight gradients", step=1)
        assert skipped.infs + skipped.nans, name
        assert {t.kind for t in recorder.evidence.steps[0].tensors} == set(KINDS) - {"updates"}, name


def test_hooks_are_there_in_recorded_steps_only_and_nothing_outlives_the_block():
    model = net()
    optimizer = adamw(model)
    recorder, losses = Recorder(model, optimizer, every=3), []

    def run():
        with recorder:
            for number, x in enumerate(batches(5)):
                assert is_bare(model, optimizer) == (number % 3 != 0), number
                copied = copy.deepcopy(model)
                assert {type(h) for m in copied.modules() for h in m._forward_hooks.values()} <= {OwnHook}
                losses.append(model(x).square().mean())
                if number == 3:
                    copied(x).sum().backward()  # a copy's hooks tell nobody
                    torch.save(model, io.BytesIO())
                    raise RuntimeError("stop")
                losses[-1].backward()
                optimizer.step()
                recorder.step()

    with pytest.raises(RuntimeError, match="stop"):
        run()
    assert is_bare(model, optimizer)
    losses[-1].backward()  # through hooked tensors, when the block is over
    assert [step.step for step in recorder.evidence.steps] == [1]


def test_recorded_steps_bring_everything_over_at_once_and_others_nothing(monkeypatch):
    reads = []
    to_host = torch.Tensor.cpu
    model, optimizer, amp = session("O2 FP16, mezzo.optim")  # which asks once whether all weights fit
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: reads.append(tensor.shape) or to_host(tensor))
    with Recorder(model, optimizer, every=2):
        for number, x in enumerate(batches(4)):
            backward(amp, model, x)
            amp.step()
            amp.zero_grad()
            assert sum(shape.numel() > 1 for shape in reads) == number // 2 + 1, number


def train(recorder, model, optimizer, count, scale=1.0):
    for x in batches(count):
        (model(x).square().mean() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step()


def test_a_loss_scale_may_be_a_number():
    plain = net()
    plain(batches(1)[0]).square().mean().backward()
    for given in (4.0, torch.tensor(4.0)):
        model = net()
        with Recorder(model, optimizer := adamw(model), loss_scale=given) as recorder:
            train(recorder, model, optimizer, 1, scale=4.0)
        counted = numbers_of(recorder.evidence, "weight_gradients")
        assert counted == {name: by_hand(param.grad) for name, param in plain.named_parameters()}
        assert recorder.evidence.steps[0].loss_scales == (4.0,)


def test_closures_count_their_last_evaluation_and_the_whole_update():
    model = net(lambda: nn.Linear(6, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    amp = MixedPrecision(model, optimizer, "O1,dtype=float16", max_grad_norm=1e-3)
    before, calls, (x,) = model.weight.detach().clone(), [], batches(1)

    def closure():
        amp.zero_grad()
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        calls.append(model.weight.grad.float() / float(amp.loss_scale))
        return loss

    with Recorder(model, optimizer) as recorder:
        amp.step(closure=closure)
    assert len(calls) > 1
    assert recorder.histogram("weight_gradients", name="weight").numbers == by_hand(calls[-1])
    assert recorder.histogram("updates", name="weight").numbers == by_hand(model.weight.detach() - before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_counted_once(reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return self[2](checkpoint(self[1], self[0](x), use_reentrant=reentrant))

    def recorded(block_class):
        model = net(lambda: block_class(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 1)))
        with Recorder(model, optimizer := adamw(model)) as recorder:
            train(recorder, model, optimizer, 1)
        return recorder.evidence

    evidence, expected = recorded(Checkpointed), recorded(nn.Sequential)
    for tensor_kind in KINDS:
        assert numbers_of(evidence, tensor_kind) == numbers_of(expected, tensor_kind), tensor_kind


def test_evaluation_is_not_counted_whether_gradients_are_off_or_not():
    model, optimizer, amp = session("O1 FP16", on_overflow="locate")
    x, y = batches(2)
    with Recorder(model, optimizer) as recorder:
        with torch.no_grad():
            model(y)
        with torch.inference_mode():
            model(y)
        model.eval()
        model(y)
        model.train()
        backward(amp, model, x, 1e38)
        model.eval()
        model(y).mean()
        amp.step()  # whose search for the overflow runs the pass again
        mezzo.overflow.locate(lambda: model(y).sum(), model)
        amp.zero_grad()
    assert recorder.histogram("activations", "head").total == 7 * 3
    with Recorder(model, optimizer) as recorder:  # training in evaluation mode is training
        backward(amp, model, x)
        amp.step()
    assert recorder.histogram("activations", "head").total == 7 * 3
    assert recorder.histogram("activation gradients", "block.up").total == 7 * 16
    with Recorder(model) as recorder:
        loss = model(x).sum()
        for _ in range(2):  # values count once, however often gradients come
            loss.backward(retain_graph=True)
        recorder.step()
    assert recorder.histogram("activations", "head").total == 7 * 3


def test_shared_modules_tied_weights_and_what_cannot_be_counted():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.one = nn.Embedding(5, 6), nn.Linear(6, 6)
            self.again, self.head = self.one, nn.Linear(6, 5, bias=False)
            self.head.weight = self.embed.weight
            self.shift = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(5))})
            self.unused, self.frozen, self.wide = nn.Linear(2, 2), nn.Linear(6, 6), nn.Linear(5, 1).double()
            self.frozen.requires_grad_(False)

        def forward(self, text):
            hidden = torch.func.vmap(self.frozen)(self.again(self.one(self.embed(text))))  # holds no values of its own
            return self.wide((self.head(hidden) + self.shift["bias"]).double())

    model = net(Odd)
    optimizer = adamw(model)
    with Recorder(model, optimizer) as recorder:
        model(torch.arange(4)).square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        optimizer.step()
        recorder.step()
    evidence = recorder.evidence
    assert evidence.histogram("activations", "one").total == 2 * 4 * 6
    assert evidence.histogram("activations", "again").numbers == evidence.histogram("activations", "one").numbers
    assert set(numbers_of(evidence, "activations")) == {"embed.output", "one.output", "head.output"}
    assert evidence.histogram("weight_gradients", "head").numbers == by_hand(gradients["embed.weight"])
    assert evidence.histogram("weights", "shift").total == 5
    assert evidence.histogram("weights", "frozen").total == evidence.histogram("weights", "unused").total + 36
    counted = {n for n, g in gradients.items() if g is not None and g.dtype == torch.float32}
    assert set(numbers_of(evidence, "weight_gradients")) == counted
    assert "frozen.weight" not in numbers_of(evidence, "updates")
    modules = {module.path: module for module in evidence.header.modules}
    assert modules["again"].same_as == "one"
    assert modules["head"].tied == {"weight": "embed.weight"}


def test_sparse_gradients_are_counted_by_what_they_hold_and_sums_by_all_their_passes():
    model = net(lambda: nn.Embedding(50, 4, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = MixedPrecision(model, optimizer, "O0")
    for in_session in (False, True):
        with Recorder(model) as recorder:  # its optimizer is not known
            loss = model(torch.tensor([1, 1, 7])).square().sum()
            amp.backward(loss) if in_session else loss.backward()
            amp.step() if in_session else recorder.step()
            optimizer.zero_grad()
        assert recorder.histogram("weight_gradients").total == 8, in_session
    model = net()
    with Recorder(model) as recorder:
        for x in batches(2):
            model(x).square().mean().backward()
        gradient = model.head.weight.grad.clone()
        model.zero_grad()
        recorder.step()
    assert recorder.histogram("weight gradients", "head", name="weight").numbers == by_hand(gradient)
    assert recorder.histogram("weights", "head", name="weight").numbers == by_hand(model.head.weight)
    assert recorder.histogram("activations", "head").total == 2 * 7 * 3
    with pytest.raises(StateError, match="no updates"):
        recorder.histogram("updates")


def test_only_chosen_modules_and_kinds_are_recorded():
    model = net()
    optimizer = adamw(model)
    with Recorder(model, optimizer, kinds=["Activation", "updates"], modules="block", formats="fp16") as recorder:
        train(recorder, model, optimizer, 2)
    outputs = ("up.output", "act.output", "inner.output", "down.output", "output['out'][0]", "output['aside'][0]")
    params = ("up.weight", "up.bias", "down.weight", "down.bias")
    assert {(t.kind, t.path) for t in recorder.evidence.steps[0].tensors} == {
        *(("activations", f"block.{path}") for path in outputs), *(("updates", f"block.{path}") for path in params)
    }  # fmt: skip
    assert recorder.swallowed().swallowed.keys() == {"float16"}
    with pytest.raises(StateError, match="recorded: activations, updates"):
        recorder.histogram("weights")


def test_the_newest_steps_are_kept_and_all_are_streamed(tmp_path):
    model = net()
    optimizer = adamw(model)
    with Recorder(model, optimizer, every=2, keep=2, stream=tmp_path) as recorder:
        train(recorder, model, optimizer, 5)
        running = read_evidence(tmp_path)  # as after a kill
    assert [step.step for step in recorder.evidence.steps] == [3, 5]
    assert [step.step for step in running.steps] == [1, 3, 5]
    streamed = read_evidence(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    recorder.save(tmp_path / "kept.jsonl")
    kept = read_evidence(tmp_path / "kept.jsonl")
    for tensor_kind, step in itertools.product(KINDS, (3, 5)):
        assert (
            numbers_of(kept, tensor_kind, step)
            == numbers_of(streamed, tensor_kind, step)
            == numbers_of(recorder.evidence, tensor_kind, step)
        )
    assert kept.header == streamed.header == recorder.evidence.header
    assert recorder.swallowed("head", step=5) == streamed.swallowed("head", step=5)
    assert repr(recorder) == "Recorder(Net, every=2: 5 steps, 2 recorded)"


ALONE = """
import gc, weakref, torch
from mezzo.numerics import Recorder
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Recorder(model, optimizer, every=1) as recorder:
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        recorder.step()
evidence, dead = recorder.evidence, weakref.ref(model)
del model, optimizer, recorder
gc.collect()
assert dead() is None and len(evidence.steps) == 2
"""


def test_evidence_keeps_no_model_alive():
    """In a process of its own: in one that has run other tests, torch may keep models."""
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=300)


def test_the_frozen_weight_of_torchs_is_seen_before_and_after_it_freezes():
    """AdamW steps on a BF16 weight of 1.0 at lr 1e-3 leave it exactly 1.0, without a word."""
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(4, 4, bias=False, dtype=dtype)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        with Recorder(model, optimizer, every=5) as recorder:
            for _ in range(20 if dtype == torch.bfloat16 else 2):
                model(torch.ones(2, 4, dtype=dtype)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step()
        lost = recorder.swallowed()
        assert {recorder.evidence.tensors(tensor_kind)[0].dtype for tensor_kind in ("weights", "updates")} == {
            str(dtype)[6:]
        }
        if dtype == torch.bfloat16:
            assert torch.equal(model.weight.detach(), torch.ones(4, 4, dtype=dtype))
            assert (lost.updated, lost.share_unmoved) == (0, 1.0)
            assert math.isnan(lost.share("bfloat16"))
        else:
            assert (lost.share("bfloat16"), lost.share("float16"), lost.share_unmoved) == (1.0, 0.0, 0.0)
