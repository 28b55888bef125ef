"""``docs-lm``: a small byte-level GPT on the Python language reference that comes with Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mezzo.errors import UnsupportedError
from mezzo.recipes.recipe import Batch, Metric, Recipe, Split, decayed_groups, own_seed, warmup_cosine

__all__ = ["DOCS_LM", "ByteGPT", "bigram_entropy"]

VOCABULARY = 256
CONTEXT = 64  # bytes
BATCH_SIZE = 16
WIDTH = 128
NUM_HEADS = 4
NUM_BLOCKS = 3
#: Every tenth topic, in alphabetical order, is held out.
HELD_OUT_EVERY = 10


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: causal attention, then a GELU network four times as wide."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, bytes, width) to the same."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, bytes, head_dim)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes with learned positions and a head of its own."""

    def __init__(self, width: int = WIDTH, num_heads: int = NUM_HEADS, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            # Each block adds twice to the residual stream: keep its variance independent of the depth.
            for layer in (block.proj, block.down):
                nn.init.normal_(layer.weight, std=0.3 / math.sqrt(layer.in_features * 2 * num_blocks))

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


def load() -> Split:
    """Read the topics in alphabetical order and hold out every tenth.

    Chapters of the reference repeat whole sections of one another, so a paragraph counts where it first
    appears and is left out afterwards: else a tenth of the held-out text could be learned by heart.

    Raises:
        UnsupportedError: This Python was built without ``pydoc_data``.
    """
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "the recipe docs-lm needs the module pydoc_data.topics",
            why=f"its text comes with the standard library, and there is {error}",
            write="a Python with its pydoc data (Debian and Ubuntu: apt install libpython3-stdlib)",
        ) from error
    train, held_out = divide(topics)
    return Split(train=(as_bytes(train),), held_out=(as_bytes(held_out),))


def divide(topics: Mapping[str, str]) -> tuple[str, str]:
    r"""Divide topics into training and held-out text, no paragraph twice.

    Args:
        topics: Title to text, paragraphs separated by an empty line.

    Returns:
        The training text and the held-out text, topics separated by two empty lines.

    Example:
        >>> divide({"b": "two\n\nthree", "a": "one\n\ntwo"})
        ('three', 'one\n\ntwo')
    """
    seen: set[str] = set()
    texts = []
    for _, text in sorted(topics.items()):
        paragraphs = dict.fromkeys(paragraph.strip("\n") for paragraph in text.split("\n\n"))
        fresh = [paragraph for paragraph in paragraphs if paragraph and paragraph not in seen]
        seen.update(fresh)
        if fresh:
            texts.append("\n\n".join(fresh))
    train = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY]
    return "\n\n\n".join(train), "\n\n\n".join(texts[::HELD_OUT_EVERY])


def as_bytes(text: str) -> Tensor:
    """Return the UTF-8 bytes of a text as a 1-d uint8 tensor."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def bigram_entropy(text: Tensor) -> float:
    """Bits per byte of the best model that sees one byte of context, fitted to the text it is scored on.

    The conditional entropy H(next | current) of the text's own pairs: no bigram model, however trained, codes
    this text in fewer bits, so a model below it has learned more than pairs.

    Args:
        text: 1-d, integer, at least two bytes.

    Returns:
        Bits per byte.

    Example:
        >>> bigram_entropy(as_bytes("abababab")), round(bigram_entropy(as_bytes("aabbaabba")), 3)
        (0.0, 1.0)
    """
    values = text.tolist()
    pairs = Counter(pairwise(values))
    firsts = Counter(values[:-1])
    total = len(values) - 1
    # The + 0.0 turns the -0.0 of a text without surprises into 0.0.
    return -sum(n / total * math.log2(n / firsts[first]) for (first, _), n in pairs.items()) + 0.0


def build(seed: int) -> nn.Module:
    """Make the model, its weights a function of the seed alone."""
    with own_seed(seed):
        return ByteGPT()


def batches(split: Split, seed: int) -> Iterator[Batch]:
    """Yield 16 windows of 64 bytes from random places, with the same windows one byte later, for ever."""
    (text,) = split.train
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(CONTEXT + 1)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH_SIZE, 1), generator=generator)
        taken = text[starts + window].long()  # (batch, context + 1)
        yield taken[:, :-1], taken[:, 1:]


def loss(scores: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy per byte, in nats."""
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def optimizer(model: nn.Module) -> Optimizer:
    """AdamW; at higher rates two runs that differ by one rounding end up a percent apart."""
    return AdamW(decayed_groups(model, 0.1), lr=2.5e-3, betas=(0.9, 0.99))


def schedule(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Rise for a fifteenth of the run, then fall to nothing."""
    return warmup_cosine(optimizer, steps, warmup=1 / 15, final=0.0)


def evaluate(model: nn.Module, split: Split) -> float:
    """Return the mean bits per held-out byte, over windows of 64 bytes that do not overlap.

    The first bytes of each window have little context: a sliding window would give slightly less.
    """
    (text,) = split.held_out
    device = next(model.parameters()).device
    num_windows = (len(text) - 1) // CONTEXT
    end = num_windows * CONTEXT
    inputs = text[:end].long().view(num_windows, CONTEXT).to(device)
    following = text[1 : end + 1].long().view(num_windows, CONTEXT).to(device)
    nats = torch.zeros((), dtype=torch.float64, device=device)
    for given, wanted in zip(torch.split(inputs, 64), torch.split(following, 64), strict=True):
        scores = model(given).flatten(0, 1).float()
        nats += functional.cross_entropy(scores, wanted.flatten(), reduction="sum").double()
    return nats.item() / end / math.log(2)


def references(split: Split) -> Mapping[str, float]:
    """The bigram conditional entropy of the held-out text."""
    return {"bigram entropy of the held-out text": bigram_entropy(split.held_out[0])}


DOCS_LM = Recipe(
    name="docs-lm",
    summary="byte-level GPT, 3 blocks of width 128, on the Python language reference (pydoc_data.topics)",
    metric=Metric(
        name="held-out bits per byte",
        unit="bits/byte",
        unit_of_difference="bits/byte",
        higher_is_better=False,
        decimals=4,
    ),
    steps=1200,
    max_grad_norm=1.0,
    low_memory_format=torch.contiguous_format,
    load=load,
    build=build,
    batches=batches,
    loss=loss,
    optimizer=optimizer,
    schedule=schedule,
    evaluate=evaluate,
    references=references,
)
