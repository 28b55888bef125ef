"""A whole train step as one CUDA graph, skipping included; without a GPU the same code runs it step by step."""

import torch
from torch.nn import functional

import mezzo

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).to(device)
optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-2)  # skips a step on the device
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16", max_grad_norm=1.0)

x = torch.randn(512, 16, device=device)
y = x[:, :4].argmax(dim=1)


def train_step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, mezzo.Step]:
    """Run the loop's body of train_min.py."""
    with amp.autocast():
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss)
    step = amp.step()
    amp.zero_grad()
    return loss, step


captured = mezzo.capture(train_step, amp)  # three real steps, then a graph is recorded and replayed
for epoch in range(60):
    loss, step = captured(x, y)
    scheduler.step()  # the graph reads the new learning rate
    if epoch % 20 == 19:
        print(f"epoch {epoch + 1}: loss {loss.item():.4g}, gradient norm {step.grad_norm.item():.4g}")
