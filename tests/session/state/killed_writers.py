"""Trains, saves at every step, and is killed while it writes: the loop that test_checkpoint.py runs in a process.

``python killed_writers.py FOLDER KILLS SEED``: one process imports once and forks each writer; the next one goes on
from the last complete checkpoint. Prints what it saw, as JSON.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from torch import nn

import mezzo

torch.set_num_threads(1)  # no thread that a fork would lose
BALLAST = torch.zeros(2**19)  # 2 MiB, so that writing takes as long as training


class Run:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.amp = mezzo.MixedPrecision(
            self.model, self.optimizer, "O2,emulate=true,loss_scale=dynamic(init=256,interval=4)", max_grad_norm=1.0
        )
        self.parts = {"model": self.model, "optimizer": self.optimizer, "amp": self.amp}
        self.passes = 0

    def backward(self):
        """One micro-batch; every third closes the window, so that most checkpoints are inside of one."""
        self.passes += 1
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.passes))
        with self.amp.autocast():
            loss = self.model(x).square().mean()
        self.amp.backward(loss * (1e36 if self.passes % 11 == 0 else 1))
        if self.passes % 3 == 0:
            self.amp.step()
            self.amp.zero_grad()

    def save(self, path):
        state = {name: part.state_dict() for name, part in self.parts.items()}
        mezzo.save({**state, "passes": self.passes, "ballast": BALLAST}, path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.passes = state["passes"]
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def digest(self):
        tensors = [*self.amp.master_params(), *(p.grad for p in self.model.parameters() if p.grad is not None)]
        found = hashlib.sha256(str(self.amp.state_dict()["loss_scales"]).encode())
        for tensor in tensors:
            found.update(tensor.detach().contiguous().numpy().tobytes())
        return found.hexdigest()


def write_until_killed(path):
    run = Run()
    if path.exists():
        run.load(path)
    while True:
        run.backward()
        run.save(path)


def killed_writer(path, delay):
    """Let a writer begin its first write, wait, and kill it; return whether it was writing."""
    before = partial(path)
    child = os.fork()
    if child == 0:
        try:
            write_until_killed(path)
        finally:
            os._exit(1)  # never back into the code of its parent
    while partial(path) <= before and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(1e-4)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return bool(partial(path))


def partial(path):
    return {name for name in os.listdir(path.parent) if name.endswith(".partial")}


def main(folder, kills, seed):
    path, chance = Path(folder) / "last.pt", random.Random(seed)
    first = Run()
    first.backward()
    first.save(path)
    loaded, torn, num_kills, began = {}, 0, 0, time.perf_counter()
    Run().save(Path(folder) / "elsewhere.pt")
    unit = time.perf_counter() - began  # about one pass and one write, on a machine as busy as this one
    # A busy machine lets fewer writers come to an end before they are killed: then it takes more of them.
    while num_kills < kills or (num_kills < 10 * kills and (torn < kills // 10 or max(loaded) < kills * 2 // 5)):
        num_kills += 1
        torn += killed_writer(path, chance.uniform(0, 3 * unit))
        run = Run()
        run.load(path)
        loaded[run.passes] = run.digest()
        run.save(Path(folder) / "elsewhere.pt")
    run.save(path)
    straight = Run()
    expected = {}
    while straight.passes < max(loaded):
        straight.backward()
        if straight.passes in loaded:
            expected[straight.passes] = straight.digest()
    print(json.dumps({"kills": num_kills, "torn": torn, "equal": loaded == expected, "passes": straight.passes,
                      "left": sorted(partial(path)), "steps": straight.amp.stats().steps,
                      "skipped": straight.amp.stats().skipped}))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
