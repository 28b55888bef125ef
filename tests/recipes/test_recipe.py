"""The parts that every recipe is made of."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from mezzo.errors import PolicyError
from mezzo.recipes import RECIPES, get
from mezzo.recipes.recipe import Metric, Split, decayed_groups, own_seed, warmup_cosine

UP = Metric(name="accuracy", unit="%", unit_of_difference="points", higher_is_better=True, decimals=2)
DOWN = dataclasses.replace(UP, higher_is_better=False)


@pytest.mark.parametrize(
    "metric, value, than, better",
    [
        (UP, 2.0, 1.0, True),
        (UP, 1.0, 2.0, False),
        (UP, 1.0, 1.0, False),
        (DOWN, 1.0, 2.0, True),
        (DOWN, 2.0, 1.0, False),
        (UP, math.nan, 1.0, False),
        (DOWN, math.nan, 1.0, False),
        (UP, 1.0, math.nan, True),
        (DOWN, 1.0, math.nan, True),
        (UP, math.nan, math.nan, False),
    ],
)
def test_better_follows_the_direction_and_never_prefers_nan(metric, value, than, better):
    assert metric.better(value, than) is better


def test_own_seed_restores_the_global_stream_even_after_an_error():
    before = torch.get_rng_state()

    def fail():
        with own_seed(1):
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_own_seed_does_not_depend_on_the_global_stream():
    torch.manual_seed(1)
    with own_seed(5):
        first = torch.rand(4)
    torch.manual_seed(2)
    with own_seed(5):
        second = torch.rand(4)
    assert torch.equal(first, second)


def test_decayed_groups_hold_every_trainable_parameter_once():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.LayerNorm(8))
    model[1].weight = nn.Parameter(model[0].weight.detach())  # (8, 4)
    model[0].weight = model[1].weight  # tied
    model[2].bias.requires_grad_(False)
    decayed, plain = decayed_groups(model, 0.3)
    assert [id(p) for p in decayed["params"]] == [id(model[1].weight)]
    assert {id(p) for p in plain["params"]} == {id(model[1].bias), id(model[2].weight)}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)


def test_warmup_cosine_rises_linearly_then_follows_half_a_cosine():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = warmup_cosine(optimizer, 11, warmup=0.2, final=0.1)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    # two rising steps, then 8 intervals from the peak at step 2 down to a tenth at step 10
    cosine = [2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8))) for k in range(9)]
    assert rates == pytest.approx([1.0, 2.0, *cosine])
    assert rates[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_warmup_cosine_of_very_short_runs_is_finite_and_positive(steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_cosine(optimizer, steps, warmup=0.2, final=0.05)
    for _ in range(steps):
        assert 0.0 < optimizer.param_groups[0]["lr"] <= 1.0
        optimizer.step()
        schedule.step()


def test_sha256_sees_values_dtype_and_shape():
    def digest(train):
        return Split(train=(train,), held_out=(torch.zeros(2),)).sha256()

    base = digest(torch.arange(4))
    changed = torch.arange(4)
    changed[3] = 7
    assert base == digest(torch.arange(4))
    assert len({base, digest(changed), digest(torch.arange(4).int()), digest(torch.arange(4).view(2, 2))}) == 4


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(PolicyError) as error:
        get("digit-cnn")
    assert str(error.value) == (
        "unknown recipe 'digit-cnn'\n"
        "  why    did you mean 'digits-cnn'? valid: digits-cnn, docs-lm\n"
        "  write  mezzo compare digits-cnn"
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_know_their_own_name(name):
    assert get(name).name == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        get(name).steps = 1


@pytest.mark.parametrize("name", RECIPES)
def test_weights_and_batches_are_functions_of_the_seed_alone(name):
    recipe, split = get(name), get(name).load()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    weights = recipe.build(7).state_dict()
    stream = recipe.batches(split, 7)
    drawn = [next(stream) for _ in range(25)]
    assert torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(456)
    again = recipe.build(7).state_dict()
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    stream = recipe.batches(split, 7)
    for inputs, targets in drawn:
        torch.rand(3)  # whatever the training itself draws must not matter
        same_inputs, same_targets = next(stream)
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(targets, same_targets)

    other = recipe.build(8).state_dict()
    assert not all(torch.equal(weights[key], other[key]) for key in weights)
    assert not torch.equal(next(recipe.batches(split, 8))[0], drawn[0][0])


@pytest.mark.parametrize("name", RECIPES)
def test_evaluation_leaves_model_and_random_state_alone(name):
    recipe, split = get(name), get(name).load()
    model = recipe.build(0).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with torch.no_grad():
        first, second = recipe.evaluate(model, split), recipe.evaluate(model, split)
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
