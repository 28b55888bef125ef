"""Which ops of this model need FP32, and why: found by running it beside FP32, written to a policy file, and used."""

import torch
from torch.nn import functional

import mezzo
from mezzo.numerics import tune


class Pool(torch.nn.Module):
    """A root mean square over many features: in float16 their squares pass 65504, one by one and summed."""

    def forward(self, x):
        return x.square().mean(1, keepdim=True).sqrt() * 1e-3


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), Pool(), torch.nn.Linear(1, 4))
with torch.no_grad():
    model[0].weight.mul_(1000)
batches = [(torch.randn(32, 16), torch.randint(4, (32,))) for _ in range(3)]

tuned = tune(model, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]), batches)
print(tuned)
tuned.save("my.policy")

amp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "my.policy")
for x, y in batches:
    with amp.autocast():
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss)
    assert not amp.step().skipped
    amp.zero_grad()
