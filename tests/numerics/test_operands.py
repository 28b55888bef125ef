"""What products below sixteen bits lose of operands, against element by element in float64, and what is counted."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mezzo import MixedPrecision, UnsupportedError
from mezzo.cast.notes import LISTENING
from mezzo.cast.products.operands import rotated
from mezzo.formats import E2M1, block_format, quantize, quantized
from mezzo.numerics import RecordedOperand, Recorder, read_evidence
from mezzo.numerics.evidence import write
from mezzo.numerics.quantised import losses

from ..support.releases import torchscript
from .test_evidence import example

pytestmark = pytest.mark.usefixtures("emulating")

ROWS, WIDTH = 32, 64


def elements(made):
    """Yield (value, largest value) of each element as Python floats, row by row; of matrices quantised along dim 1."""
    element, (down, across) = made.format.element, {None: (ROWS, WIDTH), -1: (1, WIDTH)}.get(made.format.block, (1, 1))
    if isinstance(made.format.block, tuple):
        down, across = made.format.block
    elif made.format.block not in (None, -1):
        across = made.format.block
    codes, scales = made.values.view(torch.uint8), made.scales.float().reshape(-1, WIDTH // across).tolist()
    whole = 1.0 if made.tensor_scale is None else made.tensor_scale.item()
    for row in range(ROWS):
        for column in range(WIDTH):
            if element == E2M1:
                code = codes[row, column // 2].item() >> (4 if column % 2 else 0) & 15
            else:
                code = codes[row, column].item()
            scale = scales[row // down][column // across] * whole
            yield element.decode(code) * scale, element.max * scale


def values():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, WIDTH, generator=generator) * torch.randn(ROWS, WIDTH, generator=generator).exp2().pow(3)
    x[0, :20], x[1, :5], x[2, 7], x[3, 7], x[4] = 0.0, -0.0, math.inf, math.nan, x[4] * 2.0**-30
    return x.bfloat16()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_2d", "mxfp8_e4m3", "mxfp4", "e4m3", "e5m2", "rowwise_e4m3"])
@pytest.mark.parametrize("amax", [None, 0.5])
def test_saturated_and_flushed_elements_are_those_of_a_loop(name, amax):
    x, form = values(), block_format(name)
    known = None if amax is None or form.block not in (None, -1) else torch.tensor(amax)
    if known is not None and form.block == -1:
        known = known.expand(ROWS, 1).contiguous()
    made = quantized(x, form, 1, amax=known)
    saturated = flushed = 0
    for value, (became, limit) in zip(x.double().flatten().tolist(), elements(made), strict=True):
        is_flushed = value != 0 and became == 0
        flushed += is_flushed
        saturated += math.isfinite(value) and not is_flushed and abs(value) > limit * (1 + 1e-6)
    assert losses(x, made).tolist() == [x.numel(), saturated, flushed]
    if form.block is not None:  # the transpose, along its other dimension
        turned = quantized(x.mT, form, 0, amax=None if known is None else known.mT)
        assert losses(x.mT, turned).tolist() == [x.numel(), saturated, flushed]
    if known is not None:
        assert saturated > 10


class Net(nn.Module):
    """Two layers, of which the middle one's products are quantised."""

    def __init__(self, again=None):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 64, bias=False), nn.Linear(64, 16)
        self.again = again

    def forward(self, x):
        x = self.first(x)
        again = (
            None if self.again is None or not torch.is_grad_enabled() else {"use_reentrant": self.again == "reentrant"}
        )
        return self.last(self.middle(x) if again is None else checkpoint(self.middle, x, **again))


def run(policy="nvfp4_module=middle", steps=1, *, passes=1, record=True, again=None, dtype="bf16", **options):
    torch.manual_seed(0)
    model = Net(again)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    amp = MixedPrecision(model, optimizer, f"O1,{dtype},{policy}")
    seen = []

    def keep(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append((args[0].detach().clone(), gradient.clone())))

    if again is None:
        model.middle.register_forward_hook(keep)
    recorder = Recorder(model, optimizer, every=1, **options)
    with recorder if record else torch.enable_grad():
        for step in range(steps):
            with torch.no_grad(), amp.autocast():
                model(torch.randn(32, 16, generator=torch.Generator().manual_seed(99)))
            for number in range(passes):
                x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step + 7 * number))
                with amp.autocast():
                    loss = model(x).float().square().mean()
                amp.backward(loss)
            amp.step()
            amp.zero_grad()
    assert LISTENING.now == ()
    return model, recorder.evidence, seen


def of(evidence, role, step=0):
    (row,) = [row for row in evidence.steps[step].operands if row.role == role]
    return row


@pytest.mark.parametrize("tricks", ["none", "rht"])
@pytest.mark.parametrize("scale", ["bf16", "fp16,loss_scale=1024"])
def test_gradient_and_noise_are_those_of_float64_summed_over_passes_and_unscaled(tricks, scale):
    _, evidence, seen = run(f"nvfp4_module=middle,nvfp4_tricks={tricks}", passes=2, dtype=scale)
    exact, noise = (torch.zeros(64, 32, dtype=torch.float64) for _ in range(2))
    for x, gradient in seen:
        low = torch.bfloat16 if scale == "bf16" else torch.float16
        x, gradient = x.to(low), gradient.to(low)
        x, gradient = (rotated(x), rotated(gradient)) if tricks == "rht" else (x, gradient)
        kept, became = (quantize(tensor, "nvfp4", dim=0).wide().double() for tensor in (x, gradient))
        exact += gradient.double().mT @ kept
        noise += (became - gradient.double()).mT @ kept
    factor = 1.0 if scale == "bf16" else 2.0**-10
    row = of(evidence, "gradient")
    assert len(seen) == 2
    assert row.gradient_norm == pytest.approx(exact.norm().item() * factor, rel=1e-5)
    assert row.noise_norm == pytest.approx(noise.norm().item() * factor, rel=1e-4)
    assert row.below_noise == (exact.norm() < math.sqrt(3) * noise.norm()).item()
    counted = [losses(gradient.to(low), quantize(gradient.to(low), "nvfp4", 1)) for _, gradient in seen]
    for _, gradient in seen:
        gradient = rotated(gradient.to(low)) if tricks == "rht" else gradient.to(low)
        counted.append(losses(gradient, quantize(gradient, "nvfp4", 0)))
    assert [row.elements, row.saturated, row.flushed] == torch.stack(counted).sum(0).tolist()


def test_calls_count_once_where_gradients_come_back_through_them_whatever_runs_again():
    for again in (None, "reentrant", "other"):
        _, evidence, _ = run("mxfp8_module=middle", again=again, steps=2)
        counts = {(step.step, row.role): row.elements for step in evidence.steps for row in step.operands}
        # Once along each dimension.
        sizes = {"activation": 32 * 32, "weight": 64 * 32, "gradient": 32 * 64}
        assert counts == {(step, role): 2 * size for step in (1, 2) for role, size in sizes.items()}, again
        assert {module.path for module in evidence.header.modules} >= {"middle"}
        assert [(row.module, row.name) for row in evidence.steps[0].operands] == [("middle", "weight")] * 3


def test_recording_changes_no_bit_and_what_is_not_quantised_has_nothing():
    for policy in ("nvfp4_module=middle", "fp8_module=middle,fp8_recipe=delayed"):
        plain, recorded = (run(policy, steps=3, record=record)[0] for record in (False, True))
        for mine, theirs in zip(recorded.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs), policy
    assert run("")[1].operands() == []
    low = run("nvfp4_module=middle,low_products=wgrad")[1]
    assert (of(low, "gradient").gradient_norm, of(low, "gradient").below_noise) == (None, None)
    forward = run("nvfp4_module=middle,low_products=forward")[1]
    assert of(forward, "gradient").noise_norm > 0
    assert of(forward, "weight").elements == 64 * 32, "for the gradient of the input alone"


def test_kinds_choose_operands_as_they_choose_tensors():
    for kinds, roles in (
        (("activations",), {"activation"}), (("weights", "updates"), {"weight"}),
        (("activation_gradients",), {"gradient"}), (("updates",), set()),
    ):  # fmt: skip
        rows = run(kinds=kinds)[1].steps[0].operands
        assert {row.role for row in rows} == roles, kinds
        assert all(row.noise_norm is None for row in rows)
    both = run(kinds=("weight_gradients", "activation_gradients"))[1]
    assert of(both, "gradient").noise_norm > 0


def operand(step, **changes):
    plain = {"module": "embed", "name": "weight", "role": "gradient", "format": "nvfp4", "elements": 100}
    return RecordedOperand(
        **plain | {"saturated": step, "flushed": 2 * step, "gradient_norm": 1.0, "noise_norm": 0.5} | changes
    )


def test_shares_of_several_steps_and_of_a_module_and_round_trips(tmp_path):
    steps = [
        {"step": 1, "operands": (operand(1), operand(1, module="blocks.0", role="weight", gradient_norm=None))},
        {"step": 11, "operands": (operand(3, noise_norm=0.58), operand(3, role="activation", noise_norm=None))},
        {"step": 21, "operands": (operand(5, noise_norm=0.6, gradient_norm=1.1),)},
    ]
    made = example(steps=tuple(type(example().steps[0])(**s, loss_scales=(), skipped=False, tensors=()) for s in steps))
    weights, *_ = made.operands("blocks.*")
    assert (weights.saturated, weights.flushed, weights.below_noise, weights.steps) == (0.01, 0.02, None, 1)
    (gradient, _) = made.operands("head")  # tied to the embedding
    assert (gradient.role, gradient.saturated, gradient.flushed, gradient.steps) == ("gradient", 0.03, 0.06, 3)
    assert gradient.below_noise == 1 / 3  # 0.58 is more than 1/√3
    assert (gradient.noise, weights.noise) == (pytest.approx((0.5 + 0.58 + 0.6 / 1.1) / 3), None)
    assert [row.saturated for row in made.operands(step="newest")] == [0.05]
    assert len(made.operands(step=11)) == 2
    for norms in ({"noise_norm": math.nan}, {"gradient_norm": math.inf}, {"gradient_norm": 0.0}):  # of a skipped step
        assert (operand(1, **norms).noise, operand(1, **norms).below_noise) == (None, None), norms
    with Recorder(nn.Linear(2, 2)) as recorder:
        pass
    assert recorder.evidence.operands() == []
    write(made, tmp_path / "evidence.jsonl")
    again = read_evidence(tmp_path)
    assert [step.operands for step in again.steps] == [step.operands for step in made.steps]


@torchscript
def test_a_recorder_that_is_refused_listens_to_nothing():
    with pytest.raises(UnsupportedError), Recorder(torch.jit.script(nn.Linear(4, 2)), kinds=("activations",)):
        pass
    assert LISTENING.now == ()
