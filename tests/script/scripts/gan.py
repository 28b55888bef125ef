"""A GAN: two models, two optimizers, gradients of one left over while the other trains."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
to_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
to_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
criterion = nn.BCEWithLogitsLoss()
real, fake = torch.ones(64, 1), torch.zeros(64, 1)
center = torch.tensor([2.0, -1.0])

for _ in range(200):
    discriminator.zero_grad()
    samples = center + 0.3 * torch.randn(64, 2)
    criterion(discriminator(samples), real).backward()
    made = generator(torch.randn(64, 4))
    criterion(discriminator(made.detach()), fake).backward()
    to_d.step()

    generator.zero_grad()
    criterion(discriminator(made), real).backward()
    to_g.step()

with torch.no_grad():
    mean = generator(torch.randn(512, 4)).mean(0)
print(f"distance {1 + (mean - center).norm():.4f}")
