"""A loop without a session: weights in halves, which torch's optimizer sees as the FP32 parameters that they are."""

import torch
from torch.nn import functional

import mezzo

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
prepared = mezzo.prepare(model, "O2,dtype=bfloat16")
print(mezzo.weights.halves(model))

x = torch.randn(512, 16)
y = x[:, :4].argmax(dim=1)
for epoch in range(60):
    with prepared.autocast():
        loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if epoch % 20 == 19:
        print(f"epoch {epoch + 1}: loss {loss.item():.4g}, weights in {model[0].weight.dtype}")
prepared.remove()  # plain parameters again, with all bits
