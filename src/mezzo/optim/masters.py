"""``MasterWeights``: FP32 masters of low-precision parameters, for any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mezzo.errors import PolicyError, StateError, some_of
from mezzo.optim.checks import ordered
from mezzo.optim.gathering import gather
from mezzo.optim.state import widened_state
from mezzo.optim.torch_checkpoint import is_asked_by_checkpoint, no_distributed_checkpoint
from mezzo.shards import locals_of, placed
from mezzo.step.gradients import clear_to_zeros
from mezzo.tensors import LOW, addresses, mark, versions

__all__ = ["MasterWeights", "masters_of"]


class MasterWeights:
    """Keep an FP32 master of each low-precision parameter that an optimizer updates.

    The masters take the parameters' places in ``optimizer.param_groups``, so that schedulers, closures and
    third-party optimizers go on as before, and ``optimizer.step()`` itself does the right thing::

        g32 = float32(g)
        w32 = update(w32, g32)
        w = round(w32)

    FP32 parameters stay where they are. A parameter changed in place under ``no_grad`` (a loaded state dict, weight
    clipping) or given other data is taken over at the next step; where its value is still what the master rounds to,
    the master keeps its precision. In-place writes *through* ``param.data`` leave no trace that torch could show, and
    are overwritten: write ``with torch.no_grad(): param.clamp_(…)``.

    Args:
        optimizer: Any torch optimizer. State it already holds moves to the masters, exactly.
        grad_dtype: ``"float32"`` sums the gradients of several backward passes in FP32 (4 bytes a parameter,
            through ``Tensor.grad_dtype``); ``"param"`` keeps them in the parameter's dtype (2 bytes).
        originals: FP32 tensors, by parameter, that the parameters were rounded from; taken over without a copy.
        hooks: Whether ``optimizer.step()`` gathers and rounds by itself; a session does that around it.

    Raises:
        PolicyError: Not a torch optimizer, or an unknown ``grad_dtype``.
        StateError: The optimizer has masters already.

    **Cost**: 4 bytes a parameter for the master; inside ``step`` 4 more for its gradient, freed at its end. A step
    reads 2 and writes 4 bytes a parameter for the gradient, reads 4 and writes 2 for the weight. No host sync.

    Example:
        >>> import torch
        >>> from mezzo import MasterWeights
        >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> masters = MasterWeights(torch.optim.SGD([weight], lr=1e-3))
        >>> for _ in range(4):  # each update alone is below half a unit in the last place of 1.0
        ...     weight.sum().backward()
        ...     masters.step()
        ...     masters.zero_grad()
        >>> weight.item(), round(masters.master_of(weight).item(), 6)
        (0.99609375, 0.996)

    References:
        Micikevicius et al., *Mixed Precision Training*, ICLR 2018, §3.1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        grad_dtype: Literal["float32", "param"] = "float32",
        originals: Mapping[Tensor, Tensor] | None = None,
        hooks: bool = True,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise PolicyError(
                f"an optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}",
                write="MasterWeights(torch.optim.AdamW(model.parameters()))",
            )
        if grad_dtype not in ("float32", "param"):
            raise PolicyError(f"unknown grad_dtype {grad_dtype!r}", write='grad_dtype="float32" or "param"')
        if masters_of(optimizer) is not None:
            raise StateError(
                "the optimizer has master weights already",
                where=type(optimizer).__name__,
                write="one MasterWeights (or MixedPrecision) for each optimizer",
            )
        self.optimizer, self.grad_dtype, self.has_hooks = optimizer, grad_dtype, hooks
        self._master: dict[Tensor, nn.Parameter] = {}  # model parameter → master
        self._places: dict[int, int] = {}  # of parameters among their masters, by id: hashing a tensor is a Python call
        self._versions, self._addresses = list[int](), list[int]()  # as they were when their masters were rounded in
        self._taken = list[int]()  # places of parameters whose gradients the last step took, and freed
        self._plain_add = optimizer.add_param_group
        self._plain_zero = optimizer.zero_grad
        self._hooks: list[RemovableHandle] = []
        try:
            self._take_over(originals or {}, hooks)
        except BaseException:
            self.remove()
            raise

    def _take_over(self, originals: Mapping[Tensor, Tensor], hooks: bool) -> None:
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            self._adopt_group(group, originals)
        self._hooks.append(optimizer.register_state_dict_pre_hook(self._before_state_dict))
        if hooks:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        # On the instance: torch has no hook for these two, and users call both out of habit.
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        optimizer.add_param_group = self._add_param_group  # type: ignore[method-assign]

    def _adopt_group(self, group: dict[str, Any], originals: Mapping[Tensor, Tensor]) -> None:
        params, made = group["params"], list[tuple[int, Tensor, nn.Parameter]]()
        for place, param in enumerate(params):
            if param.dtype in LOW:
                source = param.detach().float() if (given := originals.get(param)) is None else given
                made.append((place, param, nn.Parameter(source, requires_grad=param.requires_grad)))
        for place, param, master in made:
            params[place] = self._master[param] = master
            self._places[id(param)] = len(self._places)
            self._versions += versions([param])
            self._addresses += addresses([param])
            if param in self.optimizer.state:
                self.optimizer.state[master] = widened_state(self.optimizer.state[param])
                del self.optimizer.state[param]
            if self.grad_dtype == "float32" and hasattr(param, "grad_dtype"):
                param.grad_dtype = torch.float32

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(ordered(given))
        if known := [tuple(param.shape) for param in params if param in self._master]:
            raise PolicyError(
                "the optimizer updates these parameters already",
                where=f"shapes {some_of([str(shape) for shape in known])}",
                why="a parameter has one master",
                write="a group of parameters that are not in another",
            )
        self._plain_add({**param_group, "params": params})
        self._adopt_group(self.optimizer.param_groups[-1], {})

    # Around the optimizer's own step ------------------------------------------------------------------

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.take_edits()
        self.gather()
        # torch hands the optimizer itself over as the first positional argument.
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._closure(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._closure(kwargs["closure"])}
        return None

    def _closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            self.round_to_params()  # the optimizer may have moved the masters since the last evaluation
            loss = closure()
            self.gather(accumulate=False)
            return loss

        return evaluate

    def _after_step(self, _: Optimizer, args: Any, kwargs: Any) -> None:
        self.round_to_params()
        self.drop_gradients()

    def gather(self, *, accumulate: bool = True) -> None:
        """Move the model's gradients to the masters, in FP32, freeing each as its copy is made.

        Args:
            accumulate: Add to what the master already holds, instead of replacing it.

        **Cost**: at its peak 4 bytes a parameter, plus the largest low-precision gradient; on CUDA, where one launch
        casts many, plus 32 MiB of them.
        """
        gather(self._master, accumulate=accumulate)

    def drop_gradients(self) -> None:
        """Free the masters' gradients: between steps only the model's are held."""
        masters = self._master.values()
        self._taken = [place for place, master in enumerate(masters) if master.grad is not None] or self._taken
        for master in masters:
            master.grad = None

    def forget_taken(self) -> None:
        """Make no zeros of the gradients that the last step took: the model has them again, or others."""
        self._taken = []

    @torch.no_grad()
    def round_to_params(self) -> None:
        """Write every master, rounded to nearest even, into its parameter."""
        if self._master:
            params, masters = list(self._master), list[Tensor](self._master.values())
            if (shards := locals_of(params)) is not params:
                increment_version(params)
                masters = locals_of(masters)
            torch._foreach_copy_(shards, masters)
            # Copies leave addresses as they were: one that has changed since is looked at in the next step.
            self._versions = versions(params)

    @torch.no_grad()
    def take_edits(self, params: Iterable[Tensor] | None = None) -> None:
        """Take over parameters that were changed in place since the masters were last rounded into them.

        Element by element, on the device: a value that the master still rounds to keeps the master.

        Args:
            params: Which; all when omitted. Into these, masters that were changed in place are rounded as well. Where
                both were changed, and disagree, the parameter's value counts.
        """
        looked_at = list(self._master) if params is None else [param for param in params if param in self._master]
        if params is None and versions(looked_at) == self._versions and addresses(looked_at) == self._addresses:
            return
        for param in looked_at:
            place = self._places[id(param)]
            if mark(param) != (self._versions[place], self._addresses[place]):
                kept = (master := self._master[param]).to(param.dtype) == param
                master.copy_(torch.where(kept, master, param.float()))
                self._see(param)
            elif params is not None:
                # Its own bits, unless the master was changed. Through .data, for autograd sees no change then.
                param.data.copy_(self.master_of(param))

    def _see(self, param: Tensor) -> None:
        place = self._places[id(param)]
        self._versions[place], self._addresses[place] = mark(param)

    def stored(self, *, in_fp32: bool = False) -> list[Tensor]:
        """Return the parameters that have masters.

        Args:
            in_fp32: Every master is an FP32 value, so that this leaves none out.
        """
        return list(self._master)

    @torch.no_grad()
    def write(self, param: Tensor, value: Tensor, *, refines: bool = False) -> None:
        """Give a parameter another value, and its master.

        Args:
            param: One of :meth:`stored`.
            value: Of its shape. In the parameter's own dtype it leaves each value of the master that rounds to it.
            refines: Whether the parameter was rounded from it, and stays.
        """
        master, value = self._master[param], placed(value.to(param.device), param)
        if refines:
            master.copy_(value)
            return
        if value.dtype == param.dtype:
            value = torch.where(master.to(param.dtype) == value, master, value.float())
        master.copy_(value)
        param.copy_(master)
        self._see(param)

    def leave(self) -> None:
        """See :meth:`remove`."""
        self.remove()

    # What users call -----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run ``optimizer.step``: gradients to FP32, update the masters, round them into the model.

        Args:
            closure: As torch's optimizers take it; it sees the model's parameters and gradients as ever.

        Returns:
            What the optimizer returns.
        """
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the masters *and* of the model: ``optimizer.zero_grad`` is this too.

        Args:
            set_to_none: Let go of them. Otherwise they become zeros, those that a step took from the model and freed as
                well: momentum and decay move their weights in the next step, as they do in torch.
        """
        self._plain_zero(set_to_none)
        # After unscale_ a parameter and its master show one gradient, and go on to when it is filled with zeros.
        shown = [m for param, m in self._master.items() if not set_to_none and m.grad is param.grad is not None]
        zeros = [master.grad for master in shown]
        for master in self._master.values():
            master.grad = None
        for master, gradient in zip(shown, zeros, strict=True):
            master.grad = gradient
        if not set_to_none:
            clear_to_zeros(self._master)
            params = list[Any](self._master)
            for param in [params[place] for place in self._taken if params[place].grad is None]:
                param.grad = torch.zeros_like(param, dtype=getattr(param, "grad_dtype", None) or param.dtype)
        self._taken = []
        for param in self._master if set_to_none else ():
            param.grad = None
        if self._master and is_asked_by_checkpoint():
            # It had state made, by a step with zero gradients and rates, and has put the rates back.
            self.optimizer.state.clear()
            raise no_distributed_checkpoint(self.optimizer)

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        if self._master and is_asked_by_checkpoint():
            raise no_distributed_checkpoint(optimizer)

    def master_of(self, param: Tensor) -> Tensor:
        """Return the FP32 master of a parameter; an FP32 parameter is its own.

        Raises:
            StateError: The optimizer does not update this parameter.
        """
        if param in self._master:
            return self._master[param]
        if any(param is known for group in self.optimizer.param_groups for known in group["params"]):
            return param
        raise StateError(
            "the optimizer does not update this parameter",
            where=f"a tensor of shape {tuple(param.shape)} and {param.dtype}",
            write="optimizer.add_param_group({'params': [param]}) first",
        )

    def masters(self) -> dict[Tensor, nn.Parameter]:
        """Return the masters by parameter, in the order of the parameter groups."""
        return dict(self._master)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the masters, in the order of the parameter groups."""
        self.take_edits()
        masters = [master.detach().clone() for master in self._master.values()]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; the model's parameters are rounded anew.

        Raises:
            StateError: The masters have other shapes; nothing was loaded.
        """
        if not isinstance(state, Mapping) or not {"masters", "optimizer"} <= state.keys():
            raise StateError("this is not the state of MasterWeights", write="masters.state_dict()")
        own, saved = list(self._master.values()), state["masters"]
        wrong = [f"{len(own)} masters → {len(saved)}"] if len(own) != len(saved) else []
        wrong += [
            f"master {place}: {tuple(mine.shape)} → {tuple(theirs.shape)}"
            for place, (mine, theirs) in enumerate(zip(own, saved, strict=False))
            if mine.shape != theirs.shape
        ]
        if wrong:
            raise StateError(
                "the saved masters belong to another model",
                where=some_of(wrong),
                write="the same model and optimizer",
            )
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        with torch.no_grad():
            for mine, theirs in zip(own, saved, strict=True):
                mine.copy_(placed(theirs, mine))
        self.round_to_params()

    def __deepcopy__(self, memo: Any) -> MasterWeights:
        raise StateError(
            "MasterWeights cannot be copied",
            why="a copied optimizer has no hooks, and would never update the copied model",
            write="MasterWeights(new_optimizer) over the copied model's parameters",
        )

    def remove(self) -> None:
        """Give the optimizer the model's parameters back, with its state; the hooks come off.

        Parameters that are FP32 by now take the masters' values without a copy; low-precision ones keep theirs. Called
        again after an interrupt, it finishes what is left.
        """
        for hook in self._hooks:
            hook.remove()
        for name in ("zero_grad", "add_param_group"):
            vars(self.optimizer).pop(name, None)
        by_master = {master: param for param, master in self._master.items()}
        for group in self.optimizer.param_groups:
            group["params"][:] = [by_master.get(param, param) for param in group["params"]]
        for master, param in by_master.items():
            if self.grad_dtype == "float32" and hasattr(param, "grad_dtype"):
                param.grad_dtype = param.dtype
            if param.dtype == torch.float32:
                param.data = master.data
            if master in self.optimizer.state:
                self.optimizer.state[param] = self.optimizer.state.pop(master)
        for known in (self._master, self._places, self._versions, self._addresses, self._taken):
            known.clear()


def masters_of(optimizer: Optimizer) -> MasterWeights | None:
    """Return the masters that were put around an optimizer, if there are any."""
    owner = getattr(optimizer.zero_grad, "__self__", None)
    return owner if isinstance(owner, MasterWeights) else None
