"""The releases of torch that mezzo is made for, and what it takes of them that torch keeps private.

Each private name is a row of :data:`PRIVATE`: the file that owns it and what mezzo takes it for. A release without one
does not keep mezzo from being imported. :func:`private` then gives a stand-in, which says at its first use what is
missing; ``mezzo doctor`` lists all that the installed release lacks, and ``tests/test_releases.py`` holds the table to
the source.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, Final, NoReturn

import torch
import torch.distributed

from mezzo.errors import UnsupportedError, version_numbers

#: The oldest release that mezzo works with, and the newest one that the whole suite was run on.
OLDEST: Final = "2.11"
NEWEST_TESTED: Final = "2.14.1"

#: In the place of a file: many files may take the name, since torch does not change it without notice.
ANYWHERE: Final = "*"

_DYNAMO: Final = "torch._C._dynamo.eval_frame"
_FSDP: Final = "torch.distributed.fsdp._fully_shard"
_OPTIMIZER: Final = "torch.optim.Optimizer"

#: What mezzo takes of torch that is private: the file that owns a name, the name, and what mezzo takes it to do.
#: Of names with ``|`` between them releases have one or the other.
PRIVATE: Final[Mapping[str, Mapping[str, str]]] = {
    "compiling.py": {
        "torch._compile._disable_dynamo": "keep functions out of graphs; torch.compiler.disable takes its place",
        f"{_DYNAMO}._FrameAction": "have functions compiled inside their callers alone",
        f"{_DYNAMO}._FrameExecStrategy": "have functions compiled inside their callers alone",
        f"{_DYNAMO}.set_code_exec_strategy": "have functions compiled inside their callers alone",
        f"{_DYNAMO}.get_eval_frame_callback": "tell whether torch.compile is at work",
        "torch._dynamo.assume_constant_result._dynamo_marked_constant": "have what is decided while a graph is traced "
        "be a constant of it",
        "torch._dynamo.reset_code_caches": "drop compiled code when hooks were put on modules",
        "torch._dynamo.config.skip_nnmodule_hook_guards": "have graphs depend on what counts where modules end",
        "torch._dynamo.config.patch": "capture a model as one graph",
        "torch._dynamo.exc.TorchDynamoException": "say why a model cannot be captured",
        "torch._dynamo.exc.TorchRuntimeError": "tell a program's own error from one of capturing",
        "torch._dynamo.exc.InvalidBackend": "say which backends torch.compile has",
        "torch._dynamo.list_backends": "say which backends torch.compile has",
        "torch._dynamo.lookup_backend": "hand graphs to a backend by its name",
        "torch._dynamo.OptimizedModule._orig_mod": "find the model that was compiled",
        "torch.nn.Module._compiled_call_impl": "tell whether a module is compiled",
        "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx": "tell for which backend a graph is traced",
        "torch._dynamo.output_graph.OutputGraph.compiler_fn": "tell for which backend a graph is traced",
        "torch._dynamo.repro.after_dynamo.WrapBackendDebug._torchdynamo_orig_backend": "tell for which backend a graph "
        "is traced",
        "torch._TorchCompileWrapper.compiler_fn": "tell for which backend a graph is traced",
        "torch._functorch.config.backward_pass_autocast": "have compiled code differentiated without autocast",
        "torch.amp.autocast_mode._enter_autocast": "find autocast in a captured graph",
        "torch.amp.autocast_mode._exit_autocast": "find autocast in a captured graph",
        "torch._C._set_grad_enabled": "find no_grad in a captured graph",
    },
    "backward.py": {
        "torch.autograd.Variable._execution_engine.run_backward": "have backward passes go through sessions",
        "torch._C._stash_obj_in_tls": "tell which passes run inside of a session's",
        "torch._C._get_obj_in_tls": "tell which passes run inside of a session's",
        "torch._C._is_key_in_tls": "tell which passes run inside of a session's",
        "torch._C._remove_obj_from_tls|_stash_obj_in_tls": "forget what was noted of a thread",
        "torch._C._current_graph_task_id": "tell whether a backward pass runs",
        "torch._C._current_autograd_node": "tell whose gradient a kernel computes",
        "torch._C._autograd._get_sequence_nr": "tell in which module an autograd node was made",
        "torch._C._functions.AccumulateGrad._sequence_nr": "tell in which module an autograd node was made",
        "torch._C._will_engine_execute_node": "tell where a backward pass ends",
        "torch.autograd.Variable._execution_engine.queue_callback": "end a backward pass when all else has ended",
        "torch.autograd.Function._backward_cls": "know nodes of an autograd function in a graph",
        "torch.nn.modules._functions.BackwardHookFunction": "find hooks of modules in a graph",
        "torch.autograd.function.BackwardCFunction._forward_cls": "know the autograd function of a node",
        "torch._C._autograd._top_saved_tensors_default_hooks": "count what is saved for backward passes",
    },
    "dispatch.py": {
        "torch._C.DisableTorchFunction": "compute without asking function modes",
        "torch._C.DisableTorchFunctionSubclass": "read attributes of parameters in halves as fast as of others",
        "torch._C._len_torch_function_stack": "tell whether a region's mode is active",
        "torch._C._get_function_stack_at": "tell whether a region's mode is the innermost",
        "torch.overrides._get_current_function_mode_stack": "find the regions that are active",
        "torch._C._len_torch_dispatch_stack": "tell whether kernels may read memory directly",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "tell whether a pass is watched",
        "torch.utils._python_dispatch._disable_current_modes": "gather a weight whose use is traced",
        "torch.utils._python_dispatch._pop_mode": "cast weights where no selective checkpoint counts it",
        "torch.utils._python_dispatch._push_mode": "cast weights where no selective checkpoint counts it",
        "torch.utils.checkpoint._CachingTorchDispatchMode": "cast weights where no selective checkpoint counts it",
        "torch.utils.checkpoint._CachedTorchDispatchMode": "cast weights where no selective checkpoint counts it",
        "torch.utils._python_dispatch.TorchDispatchMode": "watch the kernels of a pass",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "leave tensors alone that wrap others",
        "torch._subclasses.fake_tensor.FakeTensorMode": "count what kernels would move",
        "torch._C._get_dispatch_mode": "keep no fake tensor",
        "torch._C._TorchDispatchModeKey.FAKE": "keep no fake tensor",
        "torch._C._functorch.peek_interpreter_stack": "tell whether torch.func is at work",
        "torch._C._functorch.is_functorch_wrapped_tensor": "find the tensor inside of one of torch.func's",
        "torch._C._functorch.get_unwrapped": "find the tensor inside of one of torch.func's",
        "torch._C._functorch.is_batchedtensor": "tell whether torch.vmap is at work",
        "torch._C._functorch.is_legacy_batchedtensor": "tell whether gradients are batched",
        "torch.autograd.forward_ad._current_level": "tell whether forward-mode AD is at work",
        "torch._C._RestorePythonTLSSnapshot": "ask whether autocast is on where a tensor's own operations are called",
        "torch._C._dispatch_get_registrations_for_dispatch_key": "ask which ops torch's autocast treats",
        "torch._C._nn": "find the functions behind an op's name",
        "torch._ops.HigherOrderOperator": "tell programs in a captured graph from ops",
    },
    "numerics/footprint.py": {
        "torch._C._data_address": "count what copies of high halves share with them once",
    },
    "weights/cell.py": {
        "torch._C._storage_Use_Count": "store in halves again what lies in FP32 for nobody any more",
    },
    "weights/halves.py": {
        "torch._lazy_clone": "have casts of weights cost no copy",
        "torch._C._set_throw_on_mutable_data_ptr": "have kernels raise that would read memory that is not there",
        "torch._C._swap_tensor_impl": "have a parameter stay the object that it is when it is stored in halves",
        "torch._C._dispatch_has_kernel_for_dispatch_key": "tell what torch composes of other operations",
        "torch.ops.aten._neg_view": "know a view of other bits",
        "torch.Tensor._make_wrapper_subclass": "make a tensor that lies in two others",
    },
    "weights/models.py": {
        "torch.jit._trace.trace_module": "have torch.jit.trace make a program of a plain model",
        "torch.jit._script.call_prepare_scriptable_func": "have torch.jit.script make a program of a plain model",
        "torch.jit._get_trace_graph": "have torch.onnx.export make a program of a plain model",
        "torch.jit._unique_state_dict": "have torch.onnx.export make a program of a plain model",
    },
    "weights/collectives.py": {
        "torch.ops._c10d_functional": "wait until a collective has written",
        "torch._C._distributed_c10d._create_work_from_future": "return work that is done from a collective",
    },
    "weights/stepping.py": {
        "torch.optim.optimizer._foreach_supported_types": "have torch's optimizers update many weights at a time",
    },
    "sharded.py": {
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "ask what fully_shard has sharded",
        f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_groups|_fsdp_param_group": "ask what fully_shard has sharded",
        f"{_FSDP}._fsdp_param_group.FSDPParamGroup.fsdp_params": "ask what fully_shard has sharded",
        f"{_FSDP}._fsdp_param_group.FSDPParamGroup.mp_policy": "ask in which dtype fully_shard gathers",
        f"{_FSDP}._fsdp_param_group.FSDPParamGroup._init_mp_dtypes": "give shards another dtype",
        f"{_FSDP}._fsdp_param_group.FSDPParamGroup._reset_sharded_params": "give shards another dtype",
        f"{_FSDP}._fsdp_param_group.FSDPParamGroup._partial_reduce_output": "find gradients that wait to be reduced",
        f"{_FSDP}._fsdp_param.FSDPParam.sharded_param": "ask what fully_shard has sharded",
        f"{_FSDP}._fsdp_param.FSDPParam.is_dtensor": "tell what tensor parallelism has cut besides",
        f"{_FSDP}._fsdp_param.FSDPParam.reset_sharded_param": "give shards another dtype",
        f"{_FSDP}._fsdp_param.FSDPParam._init_extensions": "have shards be gathered in another way",
        f"{_FSDP}._fsdp_param.FSDPParam._sharded_param_data": "have shards lie in other memory",
        f"{_FSDP}._fsdp_param.FSDPParam.all_gather_outputs": "have shards be gathered in another way",
        f"{_FSDP}._fsdp_param.FSDPParam._unsharded_param": "know parameters while they are gathered",
        f"{_FSDP}._fsdp_param.FSDPParam.unsharded_accumulated_grad": "find gradients that wait to be reduced",
        "torch.distributed.tensor.DTensor._local_tensor": "read and write the shard that a rank holds",
        "torch.distributed.tensor.DTensor._spec": "give a shard another dtype",
    },
    "distributed/exchange.py": {
        "torch.distributed.distributed_c10d._get_default_store": "have ranks agree where one may not call",
        "torch.nn.parallel.DistributedDataParallel._active_ddp_module": "find the wrapper that reduces gradients",
        "torch.nn.parallel.DistributedDataParallel.require_backward_grad_sync": "tell whether a wrapper will reduce",
    },
    "hooks.py": {
        "torch.Tensor._backward_hooks": "order hooks on gradients, and see the user's",
        "torch.Tensor._post_accumulate_grad_hooks": "see the user's hooks on gradients, and silence them",
        "torch.nn.Module._backward_hooks": "name modules whose hooks see scaled gradients",
        "torch.nn.Module._backward_pre_hooks": "name modules whose hooks see scaled gradients",
        f"{_OPTIMIZER}._optimizer_step_pre_hooks": "see the user's hooks of an optimizer's step",
        f"{_OPTIMIZER}._optimizer_state_dict_pre_hooks": "run the hooks of an optimizer's state_dict",
        f"{_OPTIMIZER}._optimizer_state_dict_post_hooks": "run the hooks of an optimizer's state_dict",
        f"{_OPTIMIZER}._optimizer_load_state_dict_pre_hooks": "run the hooks of an optimizer's load_state_dict",
        f"{_OPTIMIZER}._optimizer_load_state_dict_post_hooks": "run the hooks of an optimizer's load_state_dict",
        "torch.optim.optimizer._global_optimizer_pre_hooks": "see hooks on the steps of all optimizers",
    },
    "tensors.py": {
        "torch.utils._pytree.tree_flatten": "walk through nested containers",
        "torch.utils._pytree.tree_is_leaf": "walk through nested containers",
        "torch.utils._pytree.tree_unflatten": "walk through nested containers",
        "torch._foreach_copy_": "copy many tensors at once",
        "torch._foreach_mul": "multiply many tensors at once",
        "torch._foreach_mul_": "multiply many tensors at once",
        "torch._foreach_norm": "take the norms of many tensors at once",
        "torch._foreach_zero_": "clear many tensors at once",
    },
    "session/attach.py": {
        "torch.optim.lr_scheduler.LRScheduler._is_initial": "tell a scheduler's first step from the loop's",
    },
    "session/capture.py": {
        "torch.optim.lr_scheduler.LRScheduler._opt_called": "have no warning about schedulers after a replay",
        "torch.optim.Optimizer._warned_capturable_if_run_uncaptured": "have no warning about steps before a capture",
    },
    "cast/model/places.py": {
        "torch.nn.modules.batchnorm._NormBase": "keep batch norm in FP32",
    },
    "cast/device/decide.py": {
        "torch.ops.mkldnn._is_mkldnn_bf16_supported": "have oneDNN read its limit before it is used",
    },
    "trace/function_calls.py": {
        "torch.nn.Module._call_impl": "find the module whose call torch.compile traces",
        "torch.nn.Module._wrapped_call_impl": "find the module whose call torch.compile traces",
    },
    "trace/kernels.py": {
        "torch.ops.aten._unsafe_view": "know kernels that make views",
    },
    # What many programs read, and torch does not change without notice: instances, dicts and schemas that its own
    # pages and subclasses of its users name.
    ANYWHERE: {
        "torch.ops.aten._lazy_clone": "know the cast of a weight that costs no copy",
        "torch.ops.aten._to_copy": "know kernels that cast",
        "torch.Tensor._base": "find the tensor that a view is of",
        "torch.Tensor._version": "tell whether a tensor was written",
        "torch.UntypedStorage._cdata": "tell whether two tensors share memory",
        "torch.nn.Module._apply": "refuse that a converted model is cast",
        "torch.nn.Module._slow_forward": "warn that a trace of a converted model cannot be saved",
        "torch.nn.Module._buffers": "find and replace buffers",
        "torch.nn.Module._forward_hooks": "find hooks",
        "torch.nn.Module._forward_pre_hooks": "find hooks",
        "torch.nn.Module._load_state_dict_post_hooks": "find hooks",
        "torch.nn.Module._load_state_dict_pre_hooks": "find hooks",
        "torch.nn.Module._modules": "find modules",
        "torch.nn.Module._non_persistent_buffers_set": "find buffers that are saved",
        "torch.nn.Module._parameters": "find and replace parameters",
        "torch.nn.Module._state_dict_hooks": "find hooks",
        "torch.nn.Module._state_dict_pre_hooks": "find hooks",
        "torch._ops.OpOverload._schema": "name a kernel, and tell what it writes",
        "torch._ops.OpOverloadPacket._qualified_op_name": "name an op",
        "torch.optim.AdamW._step_supports_amp_scaling": "tell whether an optimizer's kernel can skip",
    },
}


# Which release is installed ------------------------------------------------------------------------------


def require_oldest() -> None:
    """Refuse a release of torch that is too old.

    Raises:
        UnsupportedError: It is.
    """
    numbers = version_numbers(torch.__version__)  # a build of torch may have a name without any
    if numbers and numbers < version_numbers(OLDEST):
        raise UnsupportedError(
            f"mezzo needs torch {OLDEST} or newer",
            where=f"torch {torch.__version__} is installed",
            why="it has not all that mezzo takes of torch",
            write=f'pip install "torch>={OLDEST}"',
        )


def is_newer_than_tested() -> bool:
    """Whether the installed torch is newer than the newest release that was tested."""
    return version_numbers(torch.__version__) > version_numbers(NEWEST_TESTED)


# Private names -------------------------------------------------------------------------------------------


def private(name: str, public: Any = None) -> Any:
    """Return what torch keeps under a private name.

    Args:
        name: A row of :data:`PRIVATE`, from ``torch`` on.
        public: What takes its place in a release without it.

    Returns:
        The object. Of a release without it ``public``, or else a stand-in that raises :func:`missing` when it is used.
    """
    try:
        return _looked_up(name)
    except (AttributeError, ImportError):
        return _Missing(name) if public is None else public


@functools.cache
def require(*names: str) -> None:
    """Refuse to go on where torch has not all of some private names: before attributes of its objects are read.

    **Cost**: a look-up once a process, nothing after.

    Raises:
        UnsupportedError: :func:`missing`, of the first of them.
    """
    for name in names:
        if not _stands(name):
            raise missing(name)


def require_all(file: str) -> None:
    """As :func:`require`, of all that a file owns."""
    require(*PRIVATE[file])


def lacking() -> dict[str, str]:
    """Return the private names that the installed torch does not have, and what mezzo takes each to do.

    **Cost**: imports of Dynamo and of FSDP2, some seconds once a process.
    """
    has_ranks = torch.distributed.is_available()
    return {
        name: use
        for names in PRIVATE.values()
        for name, use in names.items()
        if (has_ranks or not _is_of_ranks(name)) and not _stands(name)
    }


def missing(name: str) -> UnsupportedError:
    """Return the error of a private name that torch does not have."""
    file, use = next((file, names[name]) for file, names in PRIVATE.items() if name in names)
    newer = is_newer_than_tested()
    return UnsupportedError(
        f"torch {torch.__version__} has no {name.replace('|', ' or ')}",
        where="" if file == ANYWHERE else f"mezzo/{file}",
        why=f"mezzo takes it to {use}; the newest torch that mezzo was tested with is {NEWEST_TESTED}",
        write=f'pip install "torch<={NEWEST_TESTED}", or a newer mezzo' if newer else "pip install -U mezzo",
    )


def _is_of_ranks(name: str) -> bool:
    """Whether a name is missing from builds of torch without ``torch.distributed``."""
    return name.startswith(("torch.distributed.", "torch.nn.parallel.DistributedDataParallel"))


class _Missing:
    """A stand-in for a private name that torch does not have: every use of it raises.

    Args:
        name: The name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise missing(self._name)

    __call__ = __enter__ = __exit__ = __iter__ = __len__ = __contains__ = __getitem__ = _refuse
    __instancecheck__ = __subclasscheck__ = __eq__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what inspect and functools ask of anything
            raise AttributeError(name)
        self._refuse()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        """Return a base class, so that a class statement works; making an object of the class raises."""
        return (type("Missing", (), {"__new__": self._refuse}),)


def _looked_up(name: str) -> Any:
    """Return the object that a dotted name stands for, from ``torch`` on."""
    value: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            value = getattr(value, part)
        except AttributeError:
            if not hasattr(value, "__path__"):
                raise
            value = importlib.import_module(path)
    return value


def _stands(name: str) -> bool:
    """Whether torch has a private name: of attributes of objects, whether code of their class or function has it."""
    path, _, last = name.rpartition(".")
    try:
        owner = _looked_up(path)
    except (AttributeError, ImportError):
        return False
    return any(hasattr(owner, attribute) or attribute in _words_of(owner) for attribute in last.split("|"))


def _words_of(owner: Any) -> Iterator[str]:
    """Yield the names that the code of a function, or of a class's methods, uses, and those that it annotates."""
    classes = owner.__mro__ if isinstance(owner, type) else ()
    for value in [owner, *(value for cls in classes for value in vars(cls).values())]:
        if isinstance(code := getattr(value, "__code__", None), CodeType):
            yield from (*code.co_names, *(text for text in code.co_consts if isinstance(text, str)))
    for cls in classes:
        yield from getattr(cls, "__annotations__", ())
