"""Train a byte-level language model on the Python language reference: a small GPT, or with ``--lstm`` an LSTM.

Data: the texts of ``pydoc_data.topics``, which come with Python. Every tenth topic is held out; no paragraph is on both
sides.
Judged by: the mean cross-entropy on the held-out text in bits per byte, after the last step; lower is better.
In the paper (Micikevicius et al. 2018, section 4.5): bigLSTM on the 1 Billion Word benchmark, by perplexity.

Margin: 0.03 bits/byte, since that is less than 1 % of the loss. Three FP32 seeds gave 3.675, 3.681 and 3.662; with
``--lstm`` 3.163, 3.191 and 3.132.

    python examples/families/docs_lm.py --seed 1
    mezzo compare --seeds 3 --margin 0.03 examples/families/docs_lm.py
    mezzo compare --seeds 3 --margin 0.03 examples/families/docs_lm.py --lstm
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

CONTEXT = 64  # bytes
BATCH_SIZE = 16
WIDTH, NUM_HEADS, NUM_BLOCKS = 128, 4, 3


class Block(nn.Module):  # pre-norm: causal attention, then a GELU network four times as wide
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):  # (batch, bytes, width)
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, NUM_HEADS, WIDTH // NUM_HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, bytes, head_dim)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ByteGPT(nn.Module):  # a decoder-only transformer with learned positions and a head of its own
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5 / math.sqrt(module.in_features))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # Each block adds twice to the residual stream: keep its variance independent of the depth.
        for layer in (layer for block in self.blocks for layer in (block.proj, block.down)):
            nn.init.normal_(layer.weight, std=0.3 / math.sqrt(layer.in_features * 2 * NUM_BLOCKS))

    def forward(self, text):  # (batch, bytes) → (batch, bytes, 256)
        x = self.embed(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ByteLSTM(nn.Module):  # one layer: two need more steps, and are at 3.9 bits per byte after these
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text):  # (batch, bytes) → (batch, bytes, 256)
        return self.head(self.lstm(self.embed(text))[0])


def divide(topics):
    """Return training and held-out text. Topics repeat whole sections: a paragraph counts where it first appears."""
    seen, texts = {""}, []
    for _, text in sorted(topics.items()):
        paragraphs = dict.fromkeys(paragraph.strip("\n") for paragraph in text.split("\n\n"))
        fresh = [paragraph for paragraph in paragraphs if paragraph not in seen]
        seen.update(fresh)
        texts += ["\n\n".join(fresh)] if fresh else []
    return "\n\n\n".join(text for i, text in enumerate(texts) if i % 10), "\n\n\n".join(texts[::10])


def batches(text, seed):
    """Yield windows from random places, and the same windows one byte later, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH_SIZE, 1), generator=generator)
        taken = text[starts + torch.arange(CONTEXT + 1)].long()  # (batch, context + 1)
        yield taken[:, :-1], taken[:, 1:]


def bits_per_byte(model, text, device):
    """Score a text in windows that do not overlap."""
    end = (len(text) - 1) // CONTEXT * CONTEXT
    given, following = (part.long().to(device) for part in (text[:end], text[1 : end + 1]))
    scores = model(given.view(-1, CONTEXT)).float()
    return functional.cross_entropy(scores.flatten(0, 1), following).item() / math.log(2)


def warmup_cosine(step, steps, warmup):
    """Return the share of the peak learning rate: it rises along a line, then falls to nothing along a cosine."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - rising) / max(1, steps - 1 - rising))))


def main():
    parser = argparse.ArgumentParser(description="Train a byte-level language model on the Python language reference.")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and batches")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lstm", action="store_true", help="train an LSTM in place of the GPT")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    train_text, test_text = (torch.tensor(list(text.encode()), dtype=torch.uint8) for text in divide(topics))

    model = (ByteLSTM() if args.lstm else ByteGPT()).to(device)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    kept = [p for p in model.parameters() if p.ndim < 2]  # gains and biases do not decay
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2 if args.lstm else 2.5e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps, 1 / 15))

    for step, (given, following) in zip(range(1, args.steps + 1), batches(train_text, args.seed), strict=False):
        scores = model(given.to(device))
        loss = functional.cross_entropy(scores.flatten(0, 1), following.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item() / math.log(2):.3f} bits/byte")

    model.eval()
    with torch.no_grad():
        print(f"test loss {bits_per_byte(model, test_text, device):.4f} bits/byte")


if __name__ == "__main__":
    main()
