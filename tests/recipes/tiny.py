"""A recipe small enough to train hundreds of times, whose right answers are known."""

import torch
from torch import nn
from torch.nn import functional

from mezzo.recipes.recipe import Metric, Recipe, Split, own_seed, warmup_cosine


def _load():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    return Split(train=(inputs, inputs.sum(1, keepdim=True)), held_out=(inputs, inputs.sum(1, keepdim=True)))


def _build(seed):
    with own_seed(seed):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def _batches(split, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(64, (16,), generator=generator)
        yield split.train[0][chosen], split.train[1][chosen]


def _evaluate(model, split):
    return functional.mse_loss(model(split.held_out[0]).float(), split.held_out[1]).item()


#: Least squares with 161 parameters: 128 + 16 in the first layer, 16 + 1 in the second.
TINY = Recipe(
    name="tiny",
    summary="sum of eight numbers",
    metric=Metric(name="held-out error", unit="u", unit_of_difference="u", higher_is_better=False, decimals=4),
    steps=20,
    max_grad_norm=10.0,
    low_memory_format=torch.contiguous_format,
    load=_load,
    build=_build,
    batches=_batches,
    loss=functional.mse_loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
    schedule=lambda optimizer, steps: warmup_cosine(optimizer, steps, warmup=0.1, final=0.1),
    evaluate=_evaluate,
    references=lambda split: {"nothing learned": 8.0},
)
