"""A frozen backbone under a head that trains, with two learning rates once it thaws."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x = (x / 16).float().reshape(-1, 1, 8, 8)
backbone = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
head = nn.Linear(8 * 16, 10)
backbone.requires_grad_(False)
optimizer = torch.optim.Adam([{"params": head.parameters(), "lr": 1e-2}])
for step in range(80):
    if step == 40:
        backbone.requires_grad_(True)
        optimizer.add_param_group({"params": backbone.parameters(), "lr": 1e-3})
    rows = torch.arange(step * 96, step * 96 + 96) % 1500
    loss = nn.functional.cross_entropy(head(backbone(x[rows])), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
backbone.eval()
with torch.no_grad():
    accuracy = (head(backbone(x[1500:])).argmax(1) == y[1500:]).float().mean()
print(f"accuracy {accuracy:.4f}")
