"""Two networks, two optimizers, two losses; each loss moves only its own network."""

import torch
from torch.nn import functional

import mezzo

torch.manual_seed(0)
generator = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 2))
critic = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
opt_g = torch.optim.AdamW(generator.parameters(), lr=2e-3)
opt_c = torch.optim.AdamW(critic.parameters(), lr=2e-3)
amp = mezzo.MixedPrecision([generator, critic], [opt_g, opt_c], "O1,emulate=true")

real = torch.randn(256, 2) * 0.1 + torch.tensor([1.0, -1.0])
for number in range(40):
    with amp.autocast():
        fake = generator(torch.randn(256, 8))
        loss_c = functional.softplus(-critic(real)).mean() + functional.softplus(critic(fake.detach())).mean()
    amp.backward(loss_c, optimizers=opt_c)
    amp.step(opt_c)
    with amp.autocast():
        loss_g = functional.softplus(-critic(fake)).mean()
    amp.backward(loss_g, optimizers=opt_g)  # computes no gradients of the critic's weights
    amp.step(opt_g)
    amp.zero_grad()
    if number % 20 == 19:
        print(f"step {number + 1}: critic loss {loss_c.item():.4g}, generator loss {loss_g.item():.4g}")
