"""Who trains together: what one process is refused, what a missing backend and missing devices are told, shares."""

import pytest
import torch

from mezzo.errors import DistributedError, PolicyError, UnsupportedError
from mezzo.recipes import compare, train
from mezzo.recipes.parallel import World, joined


def refusal(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def joining(way="ddp", device="cpu"):
    with joined(way, torch.device(device)):
        pass


@pytest.fixture
def of_two(monkeypatch):
    """This process as the second of two that torchrun started."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_parallel_without_torchrun_says_how_to_start_it(tiny, tmp_path):
    for call in (
        lambda: train(tiny, "O0", parallel="ddp"),
        lambda: compare(tiny, ["O0"], parallel="ddp", out=tmp_path / "run"),
    ):
        assert refusal(PolicyError, call) == (
            "--parallel ddp is for several processes, and this is the only one\n"
            "  why    torchrun starts them\n"
            "  write  torchrun --nproc-per-node 2 -m mezzo train docs-lm --parallel ddp"
        )
    assert not (tmp_path / "run").exists()


def test_torchrun_without_a_number_of_processes_says_where_it_goes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert refusal(PolicyError, joining) == (
        "--parallel ddp is for several processes, and this is the only one\n"
        "  why    torchrun started one process: --nproc-per-node says how many\n"
        "  write  torchrun --nproc-per-node 2 -m mezzo train docs-lm --parallel ddp"
    )


@pytest.mark.usefixtures("of_two")
def test_a_missing_backend_and_missing_devices_are_told(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_backend_available", lambda name: False)
        assert refusal(UnsupportedError, lambda: joining(device="cuda")) == (
            "this torch was built without nccl\n"
            "  where  rank 1 of 2, on cuda\n"
            "  why    ranks on cuda talk to each other over it\n"
            "  write  CUDA_VISIBLE_DEVICES= torchrun …, which trains on CPUs over gloo"
        )
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_backend_available", lambda name: True)
        patched.setattr(torch.accelerator, "device_count", lambda: 1)
        assert refusal(UnsupportedError, lambda: joining(device="cuda")) == (
            "there are 1 devices for 2 ranks on this machine\n"
            "  where  rank 1 of 2\n"
            "  why    each rank needs a device of its own\n"
            "  write  torchrun --nproc-per-node 1 …"
        )
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_available", lambda: False)
        assert "built without torch.distributed\n  where  rank 1 of 2" in refusal(UnsupportedError, joining)


@pytest.mark.usefixtures("of_two")
def test_ranks_that_do_not_find_each_other_say_so(monkeypatch):
    # The failed group keeps its number; DTensor looks for the next one by the name of one that is gone.
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_group_count", 0)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    text = refusal(DistributedError, joining)
    assert text.startswith("the ranks did not find each other\n  where  rank 1 of 2, gloo\n  why    ")
    assert "MASTER_ADDR" in text
    assert text.endswith("write  torchrun --nproc-per-node 2 -m mezzo train docs-lm --parallel ddp")


def test_shares_in_the_order_of_ranks_are_the_batch():
    batch = torch.arange(12).view(6, 2), torch.arange(6)
    for size in (1, 2, 3, 6):
        shares = [World(rank=rank, size=size).share(batch) for rank in range(size)]
        assert all(len(inputs) == 6 // size for inputs, _ in shares)
        for place in range(2):
            assert torch.equal(torch.cat([share[place] for share in shares]), batch[place])


def test_the_largest_number_of_ranks_that_fits_is_named(tiny):
    split = tiny.load()
    for size, fitting in ((3, 2), (5, 4), (9, 8), (32, 16)):
        text = refusal(PolicyError, lambda size=size: World(size=size).require_share(tiny, split))
        assert text.startswith(f"{size} ranks cannot share a batch of 16 in equal parts")
        assert text.endswith(f"write  torchrun --nproc-per-node {fitting} …")
    for size in (1, 2, 4, 8, 16):
        World(size=size).require_share(tiny, split)


def test_one_process_waits_for_nobody():
    ranks = World()
    assert (ranks.is_first, ranks.same(3), ranks.on_first(lambda: 4)) == (True, 3, 4)
    ranks.wait()
