"""Muon for the matrices of hidden layers, AdamW for all else, in one optimizer; the loop is train_min.py's."""

import torch
from torch.nn import functional

import mezzo

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(32, 64),
    torch.nn.Flatten(),
    torch.nn.Linear(4 * 64, 64),
    torch.nn.GELU(),
    torch.nn.Linear(64, 64),
    torch.nn.GELU(),
    torch.nn.Linear(64, 32),
)
groups = mezzo.optim.matrices_of(
    model, lr=3e-3
)  # the two matrices in the middle; with AdamW embedding, head and biases
optimizer = mezzo.optim.Muon(groups, lr=0.02, state_dtype="int8")  # a momentum of 1.06 bytes a parameter
amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16", max_grad_norm=1.0)

tokens = torch.randint(0, 32, (256, 4))
targets = tokens.flip(1)[:, 0]
for epoch in range(60):
    with amp.autocast():
        loss = functional.cross_entropy(model(tokens), targets)
    amp.backward(loss)
    step = amp.step()
    amp.zero_grad()
    if epoch % 20 == 19:
        print(f"epoch {epoch + 1}: loss {loss.item():.4g}, gradient norm {step.grad_norm.item():.4g}")
