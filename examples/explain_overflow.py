"""A network whose activations leave FP16: the step is skipped, and the report says where, why and what to write."""

import torch

import mezzo

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
torch.nn.init.constant_(model[0].weight, 100.0)
optimizer = torch.optim.AdamW(model.parameters())
amp = mezzo.MixedPrecision(model, optimizer, "O1,emulate=true", on_overflow="locate")

with amp.autocast():
    loss = model(torch.rand(8, 16) * 1e3).float().square().mean()
amp.backward(loss)
step = amp.step()
print(f"loss {loss.item()}, skipped: {bool(step.skipped)}")
print(step.overflow)
