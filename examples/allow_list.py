"""Which ops of a Transformer encoder may run low: time, bytes saved for backward, and loss, as the allow list grows.

``python examples/allow_list.py [TOKENS [ROUNDS]]``: half a minute on two cores. On a GPU it prints peak memory too.
"""

import functools
import math
import statistics
import sys
import time

import torch
from torch.nn import functional

import mezzo
from mezzo.numerics.footprint import SavedBytes

#: What is low, and the policy. O1 as it is leaves gelu in the dtype of its input, as torch does: behind a linear, low.
POLICIES = {
    "nothing: FP32": "O0",
    "products": "O1,dtype=bfloat16,fp32=gelu",
    "+ softmax": "O1,dtype=bfloat16,low=softmax,fp32=gelu",
    "+ softmax, gelu": "O1,dtype=bfloat16,low=softmax+gelu",
    "O1 as it is": "O1,dtype=bfloat16",
}
WIDTH, HEADS, LAYERS, WORDS, BATCH = 256, 8, 2, 64, 8
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Layer(torch.nn.Module):
    """Attention and a feed-forward network, with their softmax and gelu written out."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):  # (batch, tokens, width)
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, width of a head)
        weights = functional.softmax(q @ k.mT / math.sqrt(WIDTH // HEADS), dim=-1)  # (batch, heads, tokens, tokens)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def encoder():
    """Return an encoder that says of each word which one it is: the same weights each time."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    return torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), *layers, torch.nn.Linear(WIDTH, WORDS)).to(device)


class Training:
    """One encoder under one policy, with the loss of its last step."""

    def __init__(self, policy):
        self.model = encoder()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.amp = mezzo.MixedPrecision(self.model, optimizer, policy)
        self.peak_bytes = 0

    def loss_of(self, words):
        with self.amp.autocast():
            return functional.cross_entropy(self.model(words).flatten(0, 1), words.flatten())

    def step(self, words):
        allocated_before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        loss = self.loss_of(words)
        self.amp.backward(loss)
        self.amp.step()
        self.amp.zero_grad()
        self.loss = loss.detach()
        if device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated() - allocated_before

    def saved_bytes(self, words):
        with SavedBytes(self.model) as saved:
            self.loss_of(words)
        return saved.total


def seconds(step):
    """Return how long a step takes, the device's work included."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def measured(tokens=256, repetitions=12):
    """Return a row for each policy: steps in turns, all from the same weights on the same batches."""
    trainings = {low: Training(policy) for low, policy in POLICIES.items()}
    batch = torch.empty(BATCH, tokens, dtype=torch.long, device=device)

    def before(low):
        if low == next(iter(POLICIES)):  # a round begins
            batch.random_(WORDS)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    taken = {low: [] for low in trainings}
    for number in range(3 + repetitions):  # the first three warm up
        for low, training in trainings.items():
            before(low)
            took = seconds(functools.partial(training.step, batch))
            taken[low] += [took] * (number >= 3)
    rows, fp32 = [], next(iter(taken.values()))
    for low, training in trainings.items():
        ratios = sorted(mine / theirs for mine, theirs in zip(taken[low], fp32, strict=True))
        tenth = repetitions // 10
        rows.append(
            {
                "low": low, "policy": POLICIES[low], "seconds": sorted(taken[low])[repetitions // 2],
                "ratio": statistics.median(ratios), "ratio_p10": ratios[tenth], "ratio_p90": ratios[-1 - tenth],
                "saved_bytes": training.saved_bytes(batch), "peak_bytes": training.peak_bytes,
                "loss": training.loss.item(), "emulated": training.amp.emulated,
            }
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    rows = measured(*map(int, sys.argv[1:]))
    print(f"{'low':16} {'ms':>6}  {'to FP32, 80 % between':21} {'saved MiB':>9} {'peak MiB':>8}   loss")
    for row in rows:
        tenths = f"{row['ratio']:.2f}× ({row['ratio_p10']:.2f}–{row['ratio_p90']:.2f})"
        peak = f"{row['peak_bytes'] / 2**20:.4g}" if row["peak_bytes"] else "–"
        saved = f"{row['saved_bytes'] / 2**20:.4g}"
        print(f"{row['low']:16} {1e3 * row['seconds']:6.4g}  {tenths:21} {saved:>9} {peak:>8}   {row['loss']:.4f}")
    if any(row["emulated"] for row in rows):
        print("This processor has no fast arithmetic in 16 bits: times are those of FP32 products of rounded operands.")
