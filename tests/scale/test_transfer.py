"""Numbers on their way from one device to another."""

import torch

from mezzo.scale.transfer import moved


def test_what_is_there_already_is_not_copied():
    number = torch.tensor(2.0)
    assert moved(number, torch.device("cpu")) is number
    assert moved(number, torch.device("cpu"), torch.float64).dtype == torch.float64


def test_the_host_waits_for_what_it_is_to_read_and_no_device_does(monkeypatch):
    waits = []
    plain = torch.Tensor.to

    def to(tensor, device, dtype, *, non_blocking):
        waits.append((device.type, non_blocking))
        return plain(tensor, device, dtype)

    monkeypatch.setattr(torch.Tensor, "to", to)
    moved(torch.tensor(2.0), torch.device("cpu"))
    moved(torch.tensor(2.0), torch.device("meta"))
    assert waits == [("cpu", False), ("meta", True)]
