"""What a tensor is called: a parameter's or buffer's path, an input of the model, the gradient of one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from torch import Tensor, nn

from mezzo.cast.weight_casts import is_further_use
from mezzo.tensors import each_tensor, tensors
from mezzo.trace.measure import is_finite

Role = Literal["parameter", "buffer", "input"]
#: An autograd node and which of its results; of a leaf, the tensor's id and 0.
Edge = tuple[Any, int]

#: Autograd nodes that hand on the gradient of the same numbers.
_SAME_NUMBERS: Final = (
    "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Unsqueeze", "Squeeze", "ToCopy",
    "Alias", "Clone", "Contiguous",
)  # fmt: skip


def numbered(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each model with what its paths begin with: nothing for a single one, else its number."""
    return (("" if len(models) == 1 else f"{number}.", model) for number, model in enumerate(models))


def named_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a model is given, with what they are called."""
    for key, value in (*enumerate(args), *kwargs.items()):
        for path, tensor in each_tensor(value):
            yield f"input {key}{path}", tensor


class Names:
    """The names of the models' parameters and buffers, and of the inputs that they are given.

    Args:
        models: The models.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._known: dict[int, tuple[Role, str, Tensor]] = {}
        self._sound: set[int] = set()
        for prefix, model in numbered(models):
            for name, param in model.named_parameters():
                self._known.setdefault(id(param), ("parameter", prefix + name, param))
            for name, buffer in model.named_buffers():
                self._known.setdefault(id(buffer), ("buffer", prefix + name, buffer))
                if is_finite(buffer):
                    self._sound.add(id(buffer))

    def put_inputs(self, prefix: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Learn what a model is given.

        Args:
            prefix: What the model's paths begin with.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        of_model = f" of model {prefix[:-1]}" if prefix else ""
        for name, tensor in named_inputs(args, kwargs):
            # The tensor is kept, so that its id stays its own.
            self._known.setdefault(id(tensor), ("input", f"{name}{of_model}", tensor))

    def was_finite(self, tensor: Tensor) -> bool:
        """Whether a tensor is a buffer that was finite at first: batch norm's kernels write without saying so."""
        return id(tensor) in self._sound

    def of(self, tensor: Tensor) -> tuple[Role, str, Tensor] | None:
        """Return what a tensor is, its name and the tensor that has the name; views and casts of it count as well."""
        for candidate in (tensor, tensor._base):
            if candidate is not None and (found := self._known.get(id(candidate))) is not None:
                return found
        node = tensor.grad_fn
        while node is not None and (edge := _handed_on(node)) is not None:
            node = edge[0]
        return self._known.get(id(getattr(node, "variable", None)))

    def of_edge(self, edge: Edge, arguments: Mapping[Edge, str]) -> str:
        """Return what the tensor is called whose gradient goes along an edge of the autograd graph.

        Args:
            edge: The edge.
            arguments: The op's own arguments, by :func:`edges`.
        """
        node, slot = edge
        while True:
            variable = getattr(node, "variable", None)
            if (found := self._known.get(id(variable))) is not None:
                return found[1]
            if (name := arguments.get((node, slot), arguments.get((id(variable), 0)))) is not None:
                return name
            if (following := _handed_on(node)) is None:
                return "an input"
            node, slot = following


def edges(args: Any, kwargs: Any) -> dict[Edge, str]:
    """Name the arguments of a call that need a gradient, by where in the graph their gradients go."""
    found: dict[Edge, str] = {}
    for number, tensor in enumerate(tensors((args, kwargs))):
        if tensor.requires_grad:
            edge = (id(tensor), 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)
            found.setdefault(edge, f"input {number}")
    return found


def _handed_on(node: Any) -> Edge | None:
    """Return where a node sends the gradient that it gets, if it only gives it another shape or format."""
    name = node.name().removesuffix("0").removesuffix("Backward")
    following = [edge for edge in node.next_functions if edge[0] is not None]
    hands_on = name in _SAME_NUMBERS or is_further_use(node)
    return following[0] if hands_on and len(following) == 1 else None
