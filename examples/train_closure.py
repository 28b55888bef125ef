"""An optimizer that evaluates the loss itself: each evaluation is checked, and unscaled before LBFGS looks at it."""

import torch
from torch.nn import functional

import mezzo

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
amp = mezzo.MixedPrecision(model, optimizer, "O1,emulate=true")

x = torch.randn(128, 4)
y = x.square().sum(dim=1, keepdim=True)


def closure() -> torch.Tensor:
    """Compute the loss and its gradients, with the session's calls in place of torch's."""
    amp.zero_grad()
    with amp.autocast():
        loss = functional.mse_loss(model(x).float(), y)
    amp.backward(loss)
    return loss


for number in range(10):
    step = amp.step(closure=closure)
    if number % 5 == 4:
        print(f"step {number + 1}: loss {functional.mse_loss(model(x), y).item():.4g}, skipped {bool(step.skipped)}")
