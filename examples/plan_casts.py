"""Where casts are cheapest in a block of GPT: planned, compiled, and trained under the plan's own policy.

``python examples/plan_casts.py [BACKEND]``: some seconds, and more for the first graph that inductor compiles.
"""

import sys

import torch
from torch.nn import functional

import mezzo
import mezzo.plan

WIDTH, HEADS, TOKENS = 128, 4, 64


class Block(torch.nn.Module):
    """Attention and a feed-forward network around a residual stream."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):  # (batch, tokens, width)
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, width of a head)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


torch.manual_seed(0)
model = torch.nn.Sequential(Block(), Block())
x = torch.randn(4, TOKENS, WIDTH)

plan = mezzo.plan.plan(model, x, policy="O1,bf16")
print(plan)

# Rules say the same, for a loop of five lines.
amp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan.policy())
for _ in range(3):
    with amp.autocast():
        loss = (model(x) - 1).square().mean()
    amp.backward(loss)
    amp.step()
    amp.zero_grad()
print(f"loss {loss.item():.4f} under {plan.policy()}")

# And compiled code gets its casts in the graph itself.
backend = mezzo.compile_backend("O1,bf16", inner=sys.argv[1] if sys.argv[1:] else "inductor")
print("compiled, it gives", torch.compile(model, backend=backend)(x).dtype)
print(backend.plans[0].totals["plan"])
