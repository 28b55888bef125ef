"""What torch leaves out for FakeTensors, and does for tensors of a GPU: addresses, and modules that convert theirs."""

from __future__ import annotations

from typing import Any

__all__ = ["give_addresses", "let_modules_convert"]

_ADDRESSES = 0x7F00_0000_0000


def give_addresses() -> None:
    """Let FakeTensors lie somewhere, each storage by itself, aligned as the allocator aligns."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    addresses: dict[int, int] = {}
    real_address = torch.Tensor.data_ptr
    real_data_ptr = torch.UntypedStorage.data_ptr

    def data_ptr(tensor: Any) -> int:
        if not isinstance(tensor, FakeTensor):
            return real_address(tensor)
        if not tensor.numel():
            return 0
        return storage_data_ptr(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()

    def storage_data_ptr(storage: Any) -> int:
        if storage.device.type == "cpu":
            return real_data_ptr(storage)
        return addresses.setdefault(storage._cdata, _ADDRESSES + (len(addresses) << 24))

    torch.Tensor.data_ptr = data_ptr
    torch.UntypedStorage.data_ptr = storage_data_ptr  # type: ignore[method-assign]


def let_modules_convert() -> None:
    """Let ``module.to(…)`` give FakeTensors other contents, as it does with tensors of a GPU: it would swap them."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    swapped = torch.utils.swap_tensors

    def swap(one: Any, other: Any) -> None:
        if isinstance(one, FakeTensor):
            one.data = other.data
        else:
            swapped(one, other)

    torch.utils.swap_tensors = swap
