"""What `mezzo.explain` says where torch casts by itself, in C++ on a GPU, is what it says on a CPU."""

import torch
from torch import nn

import mezzo


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split(16, -1)
        return self.proj(torch.softmax(q @ k.mT, -1) @ v) + x


def explained(device):
    model = nn.Sequential(nn.Linear(16, 16), Attend(), Attend(), nn.Linear(16, 16)).to(device)
    return mezzo.explain(model, torch.ones(2, 8, 16, device=device), "O1,dtype=bfloat16,emulate=false")


def test_products_and_casts_are_those_of_a_cpu(machine, monkeypatch):
    monkeypatch.setattr("mezzo.explanation.run.copied", lambda model, *_: model)  # no copies of what computes nothing
    there, here = explained("cuda"), explained("cpu")
    assert there.devices == ("cuda",)
    assert there.products == here.products
    # A tensor of this device asks for its device as a kernel would, before autocast has cast it; a real one does not.
    assert [each for each in there.findings if "prim::device" not in each.text] == list(here.findings)
    for phase in ("forward", "backward"):
        assert there.cast_bytes(phase=phase) == here.cast_bytes(phase=phase)
