"""A small byte-level GPT, with which recordings are timed and halves are held against masters.

The text is the Python language reference that comes with Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, CONTEXT, BATCH_SIZE, WIDTH, HEADS, BLOCKS = 256, 64, 16, 128, 4, 3


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then a GELU network four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, bytes, width) to the same."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, bytes, head_dim)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes with learned positions and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(_initialise)
        for block in self.blocks:
            # Each block adds twice to the residual stream: its variance is to be independent of the depth.
            for layer in (block.proj, block.down):
                nn.init.normal_(layer.weight, std=0.3 / math.sqrt(layer.in_features * 2 * BLOCKS))

    def forward(self, text: Tensor) -> Tensor:
        """Map (batch, bytes) of byte values to (batch, bytes, 256) scores of the byte that follows."""
        x = self.embed(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.5 / math.sqrt(module.in_features))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.1)


def build(seed: int) -> ByteGPT:
    """Make the model, its weights a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return ByteGPT()


def text() -> Tensor:
    """Return the bytes of the reference, nine topics of ten, no paragraph twice."""
    seen: set[str] = set()
    documents = []
    for _, topic in sorted(topics.items()):
        paragraphs = dict.fromkeys(paragraph.strip("\n") for paragraph in topic.split("\n\n"))
        fresh = [paragraph for paragraph in paragraphs if paragraph and paragraph not in seen]
        seen.update(fresh)
        if fresh:
            documents.append("\n\n".join(fresh))
    train = [document for number, document in enumerate(documents) if number % 10]
    return torch.frombuffer(bytearray("\n\n\n".join(train).encode()), dtype=torch.uint8)


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield 16 windows of 64 bytes from random places, with the same windows one byte later, for ever."""
    whole, generator, window = text(), torch.Generator().manual_seed(seed), torch.arange(CONTEXT + 1)
    while True:
        starts = torch.randint(len(whole) - CONTEXT, (BATCH_SIZE, 1), generator=generator)
        taken = whole[starts + window].long()  # (batch, context + 1)
        yield taken[:, :-1], taken[:, 1:]


def loss(scores: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy per byte, in nats."""
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Divide parameters into those that decay (matrices) and those that do not (gains, biases)."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
