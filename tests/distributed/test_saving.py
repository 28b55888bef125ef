"""mezzo.save on several ranks: the first writes, the others wait, and its failure is theirs."""

import contextlib
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo import DistributedError, MixedPrecision, StateError, optim

from .ranks import RankError, on_ranks

LOW = "O2,dtype=bfloat16,emulate=true"


def session(policy=LOW):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    return model, MixedPrecision(model, optim.AdamW(model.parameters(), lr=0.01), policy)


def backward(model, amp, number):
    with amp.autocast():
        loss = model(torch.sin(torch.arange(12.0) * (number + 1 + dist.get_rank())).view(2, 6)).float().square().mean()
    amp.backward(loss)


def train(model, amp, numbers):
    for number in numbers:
        backward(model, amp, number)
        amp.step()
        amp.zero_grad()


def outcome(call, *args, **options):
    try:
        call(*args, **options)
    except (OSError, StateError, DistributedError) as error:
        return type(error).__name__, str(error)
    return None


def all_ways(folder):
    rank, found = dist.get_rank(), {}
    for number in range(3):  # the same path again and again, by all ranks or by the first alone
        if number == 1 and rank == 0:
            mezzo.save({"number": -1}, folder / "first.pt")
        mezzo.save({"number": number + 10 * rank}, folder / "all.pt")
        found[number] = mezzo.load(folder / "all.pt")["number"]
        dist.barrier()
    mezzo.save({"rank": rank}, folder / f"own{rank}.pt", each_rank=True)
    found["own"] = mezzo.load(folder / f"own{rank}.pt")["rank"]
    found["no folder"] = outcome(mezzo.save, {}, folder / "none" / "all.pt")
    mezzo.save({"number": 5}, folder / "all.pt")
    found["after"] = mezzo.load(folder / "all.pt")["number"]
    model, amp = session("O1,dtype=bfloat16,emulate=true")
    wrapper = DistributedDataParallel(model)
    backward(wrapper, amp, 0)
    found["window"] = outcome(mezzo.save, {"amp": amp.state_dict()}, folder / "all.pt")
    amp.step()
    found["closed"] = outcome(mezzo.save, {"amp": amp.state_dict()}, folder / "all.pt")
    sharded = nn.Linear(6, 3)
    mezzo.fully_shard(sharded, LOW)
    found["shards"] = outcome(mezzo.save, {"model": sharded.state_dict()}, folder / "all.pt")
    return found


def test_the_first_rank_writes_and_all_know_how_it_ended(tmp_path):
    first, second = on_ranks(2, all_ways, tmp_path)
    for number in range(3):
        assert first[number] == second[number] == number
    assert mezzo.load(tmp_path / "first.pt") == {"number": -1}
    assert (first["own"], second["own"]) == (0, 1)
    assert (first["no folder"][0], second["no folder"][0]) == ("FileNotFoundError", "DistributedError")
    assert "rank 0 could not save" in second["no folder"][1]
    assert "FileNotFoundError" in second["no folder"][1]
    assert (first["after"], second["after"]) == (5, 5)
    for found in (first, second):
        assert "in the middle of an accumulation window" in found["window"][1]
        assert found["closed"] is None
        assert "only its own part of sharded tensors" in found["shards"][1]
        assert "amp.stateful()" in found["shards"][1]


def only_the_second(path):
    return outcome(mezzo.save, {}, path) if dist.get_rank() == 1 else None


@pytest.mark.slow
def test_a_rank_that_saves_without_the_first_is_told_so_in_time(tmp_path):
    _, (kind, text) = on_ranks(2, only_the_second, tmp_path / "all.pt", group_timeout=2)
    assert kind == "DistributedError"
    assert "rank 0 did not save" in text
    assert "each_rank=True" in text


def windows(folder):
    """Save in mid-window, a file for each rank, and load the other's and one's own."""
    found = {}
    for policy in (LOW, "O1,dtype=bfloat16,emulate=true"):
        for name, pause in (("reduced", contextlib.nullcontext), ("not reduced", None)):
            model, amp = session(policy)
            wrapper = DistributedDataParallel(model)
            train(wrapper, amp, range(2))
            with (pause or amp.no_sync)():
                backward(wrapper, amp, 5)
            parts = {"model": model, "optimizer": amp._core.optimizers[0], "amp": amp}
            try:
                state = {part: each.state_dict() for part, each in parts.items()}
            except StateError as error:
                found[policy[:2], name] = str(error)
                continue
            mezzo.save(state, folder / f"{dist.get_rank()}.pt", each_rank=True)
            dist.barrier()
            states = [mezzo.load(folder / f"{number}.pt") for number in (1 - dist.get_rank(), dist.get_rank())]
            dist.barrier()
            other, same = session(policy)
            other.load_state_dict(states[1]["model"])
            same._core.optimizers[0].load_state_dict(states[1]["optimizer"])
            refused = outcome(same.load_state_dict, states[0]["amp"])
            same.zero_grad()
            same.load_state_dict(states[1]["amp"])
            for run, each in ((wrapper, amp), (DistributedDataParallel(other), same)):
                backward(run, each, 6)
                each.step()
            found[policy[:2], name] = refused and refused[1], torch.equal(model.weight, other.weight)
    return found


def test_a_window_s_gradients_are_loaded_where_they_belong_or_refused(tmp_path):
    for rank, found in enumerate(on_ranks(2, windows, tmp_path)):
        assert found["O2", "reduced"] == (None, True)  # which all ranks have alike
        assert "has not reduced yet cannot be saved" in found["O2", "not reduced"]
        for name in ("reduced", "not reduced"):
            refused, is_equal = found["O1", name]
            assert f"those of rank {1 - rank} of 2 → rank {rank} of 2" in refused
            assert is_equal


def killed_while_saving(folder):
    model, amp = session()
    wrapper = DistributedDataParallel(model)
    train(wrapper, amp, range(2))
    mezzo.save({"app": amp.stateful().state_dict()}, folder / "last.pt")
    checkpoint.save({"app": amp.stateful()}, checkpoint_id=folder / "step-2")
    train(wrapper, amp, range(2, 4))
    if dist.get_rank() == 0:
        held = amp.stateful().state_dict()
        held["model"]["weight"] = Fatal()
        mezzo.save({"app": held}, folder / "last.pt")
    mezzo.save({"app": None}, folder / "last.pt")
    return "went on"


class Fatal:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
        return int, ()


def alone(folder):
    words = []
    for is_file in (True, False):
        model, amp = session()
        if is_file:
            amp.stateful().load_state_dict(mezzo.load(folder / "last.pt")["app"])
        else:
            checkpoint.load({"app": amp.stateful()}, checkpoint_id=folder / "step-2")
        words.append((amp.stats().steps, model.weight.tolist()))
        train(model, amp, range(2))
    return words


@pytest.mark.slow
def test_a_first_rank_that_is_killed_leaves_the_last_checkpoint_and_an_error(tmp_path):
    with pytest.raises(RankError) as failed:
        on_ranks(2, killed_while_saving, tmp_path, group_timeout=3)
    assert failed.value.texts[0] == "was killed"
    assert "DistributedError: rank 0 did not save" in failed.value.texts[1]
    ((first, second),) = on_ranks(1, alone, tmp_path)
    assert first == second
    assert first[0] == 2
