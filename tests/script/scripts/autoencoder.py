"""Encoder and decoder called by themselves, though one module holds both; a penalty outside of any forward pass."""

import torch
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))

    def encode(self, x):
        return self.encoder(x).chunk(2, -1)


torch.manual_seed(0)
vae = VAE()
optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
x = torch.randn(256, 3) @ torch.randn(3, 16)
losses = []
for _ in range(60):
    mean, log_variance = vae.encode(x)
    z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
    loss = (vae.decoder(z) - x).square().mean()
    loss = loss + 1e-2 * (mean.square() + log_variance.exp() - log_variance - 1).mean()
    loss = loss + 1e-4 * sum(p.square().sum() for p in vae.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
