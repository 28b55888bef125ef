"""A gradient penalty: gradients inside the loss, scaled on their way and unscaled in FP32."""

import torch

import mezzo

torch.manual_seed(0)
critic = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-2)
amp = mezzo.MixedPrecision(critic, optimizer, "O1,emulate=true")

real, fake = torch.randn(256, 2) + 2.0, torch.randn(256, 2)
for number in range(40):
    between = torch.lerp(real, fake, torch.rand(256, 1)).requires_grad_()
    with amp.autocast():
        difference = (critic(fake) - critic(real)).mean()
        score = critic(between).sum()
    (slope,) = amp.grad(score, between, create_graph=True)
    loss = difference + 10.0 * (slope.norm(dim=1) - 1.0).square().mean()
    amp.backward(loss)
    amp.step()
    amp.zero_grad()
    if number % 20 == 19:
        print(f"step {number + 1}: loss {loss.item():.4g}, mean slope {slope.norm(dim=1).mean().item():.4g}")
