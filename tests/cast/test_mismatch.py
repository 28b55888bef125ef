"""A module's boundary: what its hooks add to torch's errors."""

import pytest
import torch
from torch import nn

import mezzo


class Island(nn.Module):
    """A part that computes in FP32 under torch.amp: autocast is off, and the input widened."""

    def __init__(self, part):
        super().__init__()
        self.body, self.part = nn.Linear(4, 4), part

    def forward(self, x):
        h = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.part(h.float()[:, None])


ISLANDS = {
    "linear": lambda: nn.Linear(4, 4),
    "convolution": lambda: nn.Conv1d(1, 1, 1),
    "norm": lambda: nn.LayerNorm(4),
    "recurrent": lambda: nn.GRU(4, 4),
    "attention": lambda: nn.MultiheadAttention(4, 1),
}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("part", ISLANDS)
def test_an_fp32_island_among_low_weights_is_explained_and_the_advice_works(part, level):
    def run(policy):
        model = Island(ISLANDS[part]())
        if part == "attention":
            plain, model.part.forward = model.part.forward, lambda x: plain(x, x, x)
        with mezzo.prepare(model, policy).autocast():
            return model(torch.ones(2, 4))

    policy = mezzo.Policy.parse(f"{level},dtype=bfloat16")
    with pytest.raises((RuntimeError, ValueError)) as error:
        run(policy)
    assert error.value.__notes__ == [
        f"mezzo: {level} stores this model's weights in bfloat16, and torch computes nothing from two dtypes\n"
        "  why    a float32 tensor made inside the model, as by x.float(), meets them as they are; "
        "torch.autocast(enabled=False) widens no weight\n"
        "  write  policy.keep_fp32(modules=[…]) for the modules that are to compute in float32; or x.to(weight.dtype)"
    ]
    run(policy.keep_fp32(modules=["part"]))
    run("O1,dtype=bfloat16,emulate=true")


def test_other_errors_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4))
    with mezzo.prepare(model, "O2,dtype=bfloat16").autocast(), pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 3))
    assert not hasattr(error.value, "__notes__")
