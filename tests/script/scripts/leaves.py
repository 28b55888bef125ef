"""Trains a little, and leaves with a code of its own, which stands in the first argument."""

import sys

import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
sys.exit(int(sys.argv[1]))
