"""Recipes tuned: the policy trains as FP32 does, and holds fewer bytes than O1."""

import statistics

import pytest
from torch import nn

from mezzo import numerics
from mezzo.errors import PolicyError
from mezzo.recipes import compare, get
from mezzo.recipes.tuning import tune


class Holder(nn.Module):
    """Parameters as a recipe's optimizer asks for them."""

    def __init__(self, params):
        super().__init__()
        self.params = nn.ParameterList(params)


pytestmark = pytest.mark.usefixtures("emulating")


def test_the_recipes_own_batches_and_optimizer_are_used():
    recipe = get("digits-cnn")
    batches = recipe.batches(recipe.load(), 0)
    model = recipe.build(0)

    def loss_fn(model, batch):
        return recipe.loss(model(batch[0]), batch[1])

    by_hand = numerics.tune(model, loss_fn, batches, steps=2, optimizer=lambda params: recipe.optimizer(Holder(params)))
    assert tune(recipe, steps=2) == by_hand
    assert tune(recipe, steps=1, after=1) != tune(recipe, steps=1)
    with pytest.raises(PolicyError, match="after must be 0 or a positive integer, not -1"):
        tune(get("digits-cnn"), after=-1)


def test_a_tuned_policy_holds_fewer_bytes_than_o1():
    recipe = get("digits-cnn")
    found = tune(recipe, steps=1)
    level, own = compare(recipe, ["O1,dtype=float16", found.policy], steps=2).rows
    assert own.saved_bytes < level.saved_bytes
    assert own.state_bytes == level.state_bytes
    assert own.skipped_steps == 0
    result, counted, _ = found.evidence.bytes
    assert (result.saved, counted.saved) == (own.saved_bytes, level.saved_bytes)  # one way of counting


@pytest.mark.slow
@pytest.mark.parametrize("name,steps,noise", [("digits-cnn", None, 0.6), ("docs-lm", 300, 0.02)])
def test_three_seeds_end_where_fp32_ends(name, steps, noise):
    recipe = get(name)
    found = tune(recipe)
    runs = [compare(recipe, ["O0", "O1,dtype=float16", found.policy], steps=steps, seed=seed).rows for seed in range(3)]
    metrics = [[run[place].final_metric for run in runs] for place in range(3)]
    fp32, _, own = map(statistics.mean, metrics)
    assert abs(own - fp32) <= noise, metrics
    assert all(run[2].saved_bytes < run[1].saved_bytes for run in runs)
    assert all(run[2].skipped_steps == 0 for run in runs)
