"""The older names of torch.cuda.amp, switched off where there is no GPU, as many scripts do."""

import torch
from torch import nn

torch.manual_seed(0)
uses_amp = torch.cuda.is_available()
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.cuda.amp.GradScaler(enabled=uses_amp)
x, y = torch.randn(64, 16), torch.randint(4, (64,))
for _ in range(40):
    with torch.autocast("cuda" if uses_amp else "cpu", enabled=uses_amp):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"loss {loss.item():.4f}")
