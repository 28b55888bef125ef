"""The smallest training loop under mezzo: five lines differ from plain PyTorch."""

import torch
from torch.nn import functional

import mezzo

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16", max_grad_norm=1.0)  # 1

x = torch.randn(512, 16)
y = x[:, :4].argmax(dim=1)
for epoch in range(60):
    with amp.autocast():  # 2
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss)  # 3
    step = amp.step()  # 4
    amp.zero_grad()  # 5
    if epoch % 20 == 19:
        print(f"epoch {epoch + 1}: loss {loss.item():.4g}, gradient norm {step.grad_norm.item():.4g}")
