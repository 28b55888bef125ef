"""A loop as a tutorial has it: digits, a schedule, a checkpoint at the end."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    torch.manual_seed(0)
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x = (x / 16).float()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    for step in range(60):
        rows = torch.arange(step * 128, step * 128 + 128) % 1500
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        scores = model(x[1500:]).numpy()  # numpy knows no bfloat16
    print(f"accuracy {(scores.argmax(1) == y[1500:].numpy()).mean():.4f}")
    if len(sys.argv) > 1:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    main()
