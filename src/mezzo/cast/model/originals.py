"""The FP32 values that a prepared model's tensors were rounded from: those that no optimizer keeps."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mezzo.errors import UnsupportedError, some_of
from mezzo.shards import placed, sharded_as
from mezzo.tensors import LOW, dtype_name, is_distributed, local, mark, overflows

__all__ = ["Originals", "Preparation", "do_not_fit", "preparations_in"]


class Originals:
    """What tensors held before they were converted, and whether that is still what they stand for.

    Args:
        dtypes: Theirs before, of those that are converted.

    Attributes:
        dtypes: The same, for as long as the model is prepared.
        values: The values, by the tensor that now stands in the model; of one that lies in parts on several ranks this
            rank's part alone, once it lies in the host's memory.
    """

    def __init__(self, dtypes: Mapping[Tensor, torch.dtype] = MappingProxyType({})) -> None:
        self.dtypes = dict(dtypes)
        self.values: dict[Tensor, Tensor] = {}
        self._rounded: dict[Tensor, tuple[int, int]] = {}  # marks of tensors that a session's keeper has rounded

    def release(self, of: Container[Tensor] | None = None) -> None:
        """Forget values.

        Args:
            of: Those of which tensors; of all when omitted.
        """
        self.values = {t: value for t, value in self.values.items() if of is not None and t not in of}

    def put_aside(self) -> None:
        """Keep what rounding took in the host's memory; where it took nothing, the tensors say it all.

        **Cost**: 4 bytes of the host's for each element of a tensor that was rounded, of parts for each of this rank's;
        a host sync for each tensor. No communication.
        """
        for tensor in [*self.values]:
            value = local(self._settled(tensor))
            if value.dtype != tensor.dtype:
                now = local(tensor).to(value.device)
                if torch.equal(value.to(now.dtype), now):
                    self._rounded.pop(tensor, None)  # so that what goes through .data is seen as well
                exact = torch.equal(now.to(value.dtype), value)
                self.values[tensor] = tensor.data if exact else value.cpu()

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor stands for, on its device and in the dtype that it had, where that is kept."""
        if tensor not in self.values:
            return None
        value = self._whole(tensor)
        return value.to(tensor.device, self.dtypes.get(tensor, value.dtype))

    def _whole(self, tensor: Tensor) -> Tensor:
        value = self._settled(tensor)
        return value if is_distributed(value) else sharded_as(value, tensor)

    def keep(self, values: Mapping[Tensor, Tensor]) -> None:
        """Take those values in the dtype before that tensors, as they are now, stand for, however they were rounded."""
        exact = {t: value for t, value in values.items() if self.dtypes.get(t) == value.dtype}
        self.values.update(exact)
        self._rounded.update((t, mark(t)) for t in exact)

    def move(self, to: Mapping[Tensor, Any]) -> None:
        """Let other tensors stand for the values of some: DTensors, each of which lies in parts on several ranks.

        Args:
            to: The new ones, by the old.

        **Cost**: a copy of this rank's part of each value; no communication.
        """
        self.settle()
        for old, new in to.items():
            if old in self.values:
                self.values[new] = placed(self.values.pop(old), new)
                self._rounded[new] = mark(new)
        self._rounded = {t: seen for t, seen in self._rounded.items() if t not in to}
        self.dtypes = {to.get(t, t): dtype for t, dtype in self.dtypes.items()}

    def settle(self) -> dict[Tensor, Tensor]:
        """Bring the values up to date with what was written to the tensors, and return them.

        Element by element: where the value rounds to what the tensor is, it stays. Where not, the tensor counts.
        """
        return {tensor: self._whole(tensor) for tensor in self.values}

    @torch.no_grad()
    def _settled(self, tensor: Tensor) -> Tensor:
        value = self.values[tensor]
        if value.dtype == tensor.dtype:
            self.values[tensor] = value = tensor.data  # which may have been given other memory
        elif tensor.dtype in LOW and self._rounded.get(tensor) != mark(tensor):
            mine = local(value)
            now = local(tensor).to(mine.device)
            mine.copy_(torch.where(mine.to(now.dtype) == now, mine, now.to(mine.dtype)))
        return value

    @torch.no_grad()
    def round(self) -> None:
        """Write the values, rounded to nearest, into their tensors. Through ``.data``: they stand for the same."""
        for tensor, value in self.values.items():
            local(tensor.data).copy_(local(value))

    @torch.no_grad()
    def take(self, tensor: Tensor, incoming: Any, name: str) -> None:
        """Keep an FP32 value that is about to be loaded into a tensor, which holds it rounded.

        Raises:
            UnsupportedError: It would become infinite there.
        """
        wide = isinstance(incoming, Tensor) and incoming.is_floating_point() and incoming.dtype not in LOW
        if tensor not in self.values or not wide or incoming.shape != tensor.shape:
            return
        incoming = placed(incoming, tensor)
        if overflows(local(incoming), tensor.dtype):
            raise do_not_fit([name], tensor.dtype)
        value = self.values[tensor]
        exact = incoming.dtype if value.dtype in LOW else value.dtype
        kept = incoming if is_distributed(value) else local(incoming)
        self.values[tensor] = kept.detach().to(value.device, exact, copy=True)
        self._rounded.pop(tensor, None)


class Preparation:
    """What a prepared model's modules hold of it: a hook on loading, which also leads back to the handle.

    A copied or unpickled model has one that leads nowhere.

    Args:
        handle: The handle, and not anything else that :func:`preparations_in` would then find.
        originals: Its originals.
    """

    def __init__(self, handle: Any = None, originals: Originals | None = None) -> None:
        self.handle, self._originals = handle, originals or Originals()

    def __reduce__(self) -> tuple[Any, ...]:
        return Preparation, ()

    def attach(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """Watch the model, and each of its modules that has tensors of its own."""
        for module in model.modules():
            if module is model or module._parameters or module._buffers:
                yield module.register_load_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Keep what is about to be loaded: a hook before ``nn.Module.load_state_dict``."""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and prefix + name in state_dict:
                self._originals.take(tensor, state_dict[prefix + name], prefix + name)


def preparations_in(model: nn.Module) -> list[Any]:
    """Return the handles of all models that were prepared in this one, be it a wrapper, or a part of them."""
    hooks = (hook for module in model.modules() for hook in module._load_state_dict_pre_hooks.values())
    owners = (getattr(hook, "hook", None) for hook in hooks)
    return list(
        {id(o.handle): o.handle for o in owners if isinstance(o, Preparation) and o.handle is not None}.values()
    )


def do_not_fit(names: Sequence[str], dtype: torch.dtype) -> UnsupportedError:
    """Build the error of values that a lower precision cannot hold.

    Args:
        names: Whose values; none where other ranks hold them.
        dtype: The precision.
    """
    return UnsupportedError(
        f"values do not fit {dtype_name(dtype)}",
        where=some_of(names) or "weights of another rank",
        why=f"they are beyond {torch.finfo(dtype).max:g} and would become infinite",
        write=f"policy.keep_fp32(params=[{repr(names[0]) if names else '…'}]), the text "
        f'fp32_param={names[0] if names else "…"}; or Policy.O2("bfloat16"), the text O2,dtype=bfloat16',
    )
