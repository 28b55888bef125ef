"""``mezzo.compile_backend``: a backend of torch.compile that places casts in each graph, and hands it on."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn

from mezzo.cast.model.prepare import as_named, with_low_ends
from mezzo.compiling import backend_of, backends, note_placed, traced_variable
from mezzo.dispatch import DisableTorchFunction
from mezzo.errors import PolicyError, nearest, require_extra, shown
from mezzo.plan.balance import balance_of
from mezzo.plan.carry_out import carry_out
from mezzo.plan.costs import Costs
from mezzo.plan.cut import cheapest
from mezzo.plan.graph import Graph, read, require_choice
from mezzo.plan.planned import Plan
from mezzo.plan.planning import objective_number, planned
from mezzo.policy import Policy
from mezzo.trace.function_calls import compiled_model

logger = logging.getLogger(__name__)

Inner = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def compile_backend(
    policy: Policy | str | os.PathLike[str],
    objective: Literal["time", "memory"] | float = "time",
    inner: str | Inner = "inductor",
) -> Backend:
    """Return a backend for ``torch.compile`` under which each op runs in the precision of the cheapest placement.

    Each graph that Dynamo captures gets its casts, and goes on to another backend. Nothing else happens when it runs:
    no function mode, no Python for each op. What autocast around a call would do has been decided, and so it does
    nothing inside: it is all the same whether a session's region is around, but for a dtype that the program reads from
    a tensor (``h.to(x.dtype)``), which Dynamo makes a constant of the graph: that which autocast would give it, and
    FP32 without a region.

    What torch.compile leaves to Python is run by the region that is around: call the compiled model inside of one.
    Without one, a module there meets low tensors with FP32 weights, which torch refuses; and a model that is left to
    Python as a whole, as one that calls an LSTM is, runs in FP32, with no plan in ``plans``.
    ``torch._dynamo.config.allow_rnn = True`` has LSTMs and GRUs in graphs.

    A graph with sizes that vary is placed by the sizes of its first call. One that is compiled again for other sizes
    keeps the placement that it had, and the log says so.

    Args:
        policy: A policy that casts ops: O1 or O2.
        objective: As :func:`mezzo.plan.plan`.
        inner: A backend that gets the graphs, or its name. For ``"inductor"``, and for what is no name, costs are those
            of fused kernels, otherwise those of single ones.

    Returns:
        The backend; ``plans`` has what was decided about each graph.

    Raises:
        PolicyError: The policy casts no op, or the objective is none.
        UnsupportedError: scipy is not installed.

    **Cost**: seconds for a graph of some hundred ops of different kinds; of alike ones each kind is counted once.

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> backend = mezzo.compile_backend("O1,bf16,emulate=true", inner="eager")
        >>> y = torch.compile(model, backend=backend)(torch.ones(2, 8))
        >>> y.dtype, backend.plans[0].totals["plan"].casts
        (torch.bfloat16, 5)
    """
    return Backend(Policy.of(policy), objective_number(objective), inner)


class Backend:
    """What :func:`compile_backend` returns.

    Attributes:
        policy: The policy.
        plans: What was decided about each graph, in the order in which they were compiled.
        places_casts: Always true: no region places casts in the graphs that it gets.
    """

    places_casts = True

    def __init__(self, policy: Policy, objective: float, inner: str | Inner) -> None:
        if not (isinstance(inner, str) or callable(inner)):
            raise PolicyError(
                f"inner is {shown(inner)}", why="it is a backend of torch.compile", write='inner="inductor"'
            )
        require_choice(policy)
        require_extra("plan", "a plan needs scipy", "scipy.sparse.csgraph")
        if isinstance(inner, str):
            inner_: Any = backend_of(inner)
            if inner_ is None:
                why = nearest(inner, backends())
                raise PolicyError(f"torch.compile has no backend {inner!r}", why=why, write='inner="inductor"')
        else:
            inner_ = inner
        self.policy = policy
        self.plans: list[Plan] = []
        self._objective, self._inner = objective, inner_
        self._fused = inner == "inductor" or not isinstance(inner, str)
        self._roots = _Roots()
        self._kept: dict[Any, tuple[bool, ...]] = {}

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Place casts in a graph, and have it compiled."""
        model = compiled_model()
        policy = self.policy if model is None else with_low_ends(model, as_named(model, self.policy))
        if model is not None:
            note_placed(model, str(self.policy))
        graph = read(module, policy, self._roots.path)
        costs = Costs(
            graph,
            balance_of(graph.device_type, self.policy.dtype, emulated="products" in graph.emulated),
            objective=self._objective,
            fused=self._fused,
        )
        key = tuple((op.name, op.role, op.module, *(graph.makers[node].index for node in op.reads)) for op in graph.ops)
        low = self._kept.get(key)
        if low is not None:
            logger.info("a graph of %d ops is compiled again for other sizes: its placement is kept", len(graph.ops))
        else:
            low = self._kept[key] = cheapest(costs.problem).low[: len(graph.ops)]
        self.plans.append(planned(costs, low, objective=self._objective, name="a graph"))
        carry_out(graph, low)
        return self._compiled(graph, inputs)

    def _compiled(self, graph: Graph, inputs: Sequence[Any]) -> Callable[..., Any]:
        device_type = graph.device_type
        is_around = torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, enabled=False):
            compiled: Callable[..., Any] = self._inner(graph.whole, inputs)
        if not is_around:
            return compiled  # torch guards that autocast is off

        def run(*args: Any) -> Any:
            # Dynamo has traced through the region's mode, which would otherwise decide about each op again.
            with torch.autocast(device_type, enabled=False), DisableTorchFunction():
                return compiled(*args)

        return run


class _Roots:
    """Finds the module that a local variable holds in the frame that Dynamo captures, and its path in the model."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None

    def path(self, variable: str) -> str:
        """Return the path of the module that a local variable holds; empty for the first module that is captured."""
        module = traced_variable(variable)
        if not isinstance(module, nn.Module):
            return ""
        model = compiled_model() or (self._model() if self._model is not None else None)
        if model is not None:
            self._model = weakref.ref(model)
            for path, part in model.named_modules():
                if part is module:
                    return str(path)
        self._model = weakref.ref(module)  # the first module, or one outside of the model before
        return ""
