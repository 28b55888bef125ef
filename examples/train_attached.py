"""A loop of calls of its own: with one line before it, gradients are FP32 and unscaled when backward() has ended."""

import torch
from torch.nn import functional

import mezzo

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
amp = mezzo.attach(model, optimizer, "O1,emulate=true")  # the line that differs

x = torch.randn(512, 16)
y = x[:, :4].argmax(dim=1)
for epoch in range(60):
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()  # waits while steps are skipped
    optimizer.zero_grad()
    if epoch % 20 == 19:
        print(f"epoch {epoch + 1}: loss {loss.item():.4g}, gradient norm {norm.item():.4g}")
amp.detach()  # plain FP32 again
