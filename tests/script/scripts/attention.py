"""A language model with tied weights, two losses in one backward pass, and parameters that decay or do not."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, words=16, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.value = nn.Linear(width, 1)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.value(x).squeeze(-1)


torch.manual_seed(0)
model = Model()
decays = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}], lr=3e-3)
tokens = torch.randint(16, (32, 12)).cumsum(1) % 16
losses = []
for _ in range(60):
    logits, value = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    other = (value - tokens[:, 1:] / 16).square().mean()
    optimizer.zero_grad()
    torch.autograd.backward([loss, 0.5 * other])
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-4:]) / 4:.4f}")
