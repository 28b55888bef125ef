"""Which releases of torch mezzo takes, and the inventory of what it takes of them that is private.

Each test that walks the source holds the table of :mod:`mezzo.releases` to it, both ways: a private name that is in no
row, that another file owns, or that no file takes any more, fails. A new release of torch fails by the names it lacks.
"""

import ast
import functools
import json
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch

from mezzo import UnsupportedError, compiling, hooks, releases, sharded
from mezzo.releases import ANYWHERE, NEWEST_TESTED, OLDEST, PRIVATE

from .house import SOURCE, nodes, sources

ROOT = Path(__file__).parents[1]
#: What torch cannot do without where mezzo is imported, and where gradients are turned on and off.
OF_TORCH = {"torch._C._dispatch_has_kernel_for_dispatch_key", "torch._C._set_grad_enabled"}
#: Private names of Python's, and of the frameworks that bridges are for.
OTHERS = {"_asdict", "_exit", "_getframe", "_wrap_closure"}
#: Texts of a user's that begin as a private name does, and keys of torch's states.
TEXTS = {"torch._C._nn.", "_growth_tracker"}

OWNER = {name: file for file, names in PRIVATE.items() for name in names}
#: The files that may take a name, by the last part of it.
OWNERS_OF_ATTRIBUTES = {}
for name, file in OWNER.items():
    for part in name.rpartition(".")[2].split("|"):
        OWNERS_OF_ATTRIBUTES.setdefault(part, set()).add(file)


# Releases -----------------------------------------------------------------------------------------------


def test_the_package_asks_for_the_oldest_release():
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={OLDEST}" in asked
    assert releases.version_numbers(OLDEST) < releases.version_numbers(NEWEST_TESTED)


def test_an_older_release_is_refused_in_one_sentence_when_mezzo_is_imported():
    code = "import torch; torch.__version__ = '2.10.1+cpu'; import mezzo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "mezzo.errors.UnsupportedError: mezzo needs torch 2.11 or newer\n"
        "  where  torch 2.10.1+cpu is installed\n"
        "  why    it has not all that mezzo takes of torch\n"
        '  write  pip install "torch>=2.11"\n'
    )


@pytest.mark.parametrize(
    "version, is_newer",
    [("2.11.0", False), (NEWEST_TESTED, False), (f"{NEWEST_TESTED}+cu130", False), ("2.14.2", True), ("3.0.0a0", True)],
)
def test_a_newer_release_is_told_from_those_that_were_tested(monkeypatch, version, is_newer):
    monkeypatch.setattr(torch, "__version__", version)
    assert releases.is_newer_than_tested() is is_newer
    releases.require_oldest()
    assert ('"torch<=2.14.1"' in str(releases.missing("torch._C._nn"))) is is_newer


# The inventory, against torch -----------------------------------------------------------------------------


def test_this_release_has_all_that_mezzo_takes():
    assert releases.lacking() == {}


def test_names_that_are_gone_are_found(monkeypatch):
    """Functions and classes that are deleted; attributes that no code of their class has any more."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch.overrides, "_get_current_function_mode_stack")
    monkeypatch.setattr(_fsdp_param_group, "FSDPParamGroup", type("FSDPParamGroup", (), {"fsdp_params": ()}))
    monkeypatch.setattr(_fsdp_state, "FSDPState", type("FSDPState", (), {"_fsdp_param_group": None}))
    gone = [name.rpartition(".")[2] for name in releases.lacking()]
    assert gone == [
        "_current_graph_task_id", "_get_current_function_mode_stack",
        "mp_policy", "_init_mp_dtypes", "_reset_sharded_params", "_partial_reduce_output",
    ]  # fmt: skip


def test_a_name_that_is_gone_says_so_when_it_is_used_and_names_the_release(monkeypatch):
    name = "torch._C._current_graph_task_id"
    assert releases.private(name) is torch._C._current_graph_task_id
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    gone = releases.private(name)

    class Below(gone):
        pass

    error = (
        f"torch {torch.__version__} has no {name}\n"
        "  where  mezzo/backward.py\n"
        "  why    mezzo takes it to tell whether a backward pass runs; "
        f"the newest torch that mezzo was tested with is {NEWEST_TESTED}\n"
        "  write  pip install"
    )
    for use in (
        gone, lambda: gone.attribute, gone.__enter__, lambda: isinstance(1, gone), lambda: issubclass(int, gone),
        lambda: list(gone), lambda: 1 in gone, lambda: gone["key"], Below,
    ):  # fmt: skip
        with pytest.raises(UnsupportedError) as caught:
            use()
        assert str(caught.value).startswith(error)
    assert not hasattr(gone, "__wrapped__")  # what functools and inspect ask of anything
    assert releases.private(name, public=len) is len


def test_attributes_of_objects_are_looked_for_before_they_are_read(monkeypatch):
    monkeypatch.setattr(releases, "_stands", lambda name: False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    releases.require.cache_clear()
    try:
        for use, name in (
            (lambda: hooks.step_hooks(optimizer), "_optimizer_step_pre_hooks"),
            (lambda: hooks.with_gradient_hooks([torch.ones(1)]), "_backward_hooks"),
            (lambda: sharded.hold_locally(torch.ones(1), torch.ones(1)), "_local_tensor"),
            (lambda: sharded.has_unreduced([object()]), "_get_fsdp_state"),
        ):
            with pytest.raises(UnsupportedError, match=f"torch {torch.__version__}".replace("+", r"\+") + f".*{name}"):
                use()
    finally:
        releases.require.cache_clear()


def test_where_dynamo_takes_no_strategy_functions_run_in_python_and_refuse_to_be_compiled(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    releases.require.cache_clear()
    try:
        marked = compiling.compiled_inside_alone(lambda x: x + 1)
        assert marked(1) == 2
        compiled = torch.compile(lambda x: marked(x), backend="eager")
        with pytest.raises(
            RuntimeError, match="mezzo takes it to have functions compiled inside"
        ):  # Dynamo hands it on
            compiled(torch.ones(1))
    finally:
        releases.require.cache_clear()


PLANTED = """
    import importlib, json, sys
    names, modules = json.load(sys.stdin)
    import torch, torch._dynamo.repro.after_dynamo, torch.distributed.fsdp
    for name in modules:  # of torch's own, which take these names, too
        importlib.import_module(name)
    gone = []
    for name in names:
        place, _, last = name.rpartition(".")
        from_here, path = torch, "torch"
        for part in place.split(".")[1:]:
            path += "." + part
            from_here = getattr(from_here, part) if hasattr(from_here, part) else importlib.import_module(path)
        try:
            if hasattr(from_here, "_config"):  # a module of settings, of which deleting one restores its value
                del from_here._config[last]
            else:
                delattr(from_here, last)
        except (AttributeError, KeyError, TypeError):  # an attribute of objects, or of a class of C's
            continue
        gone.append(name)
    import mezzo
    import mezzo.overflow, mezzo.plan, mezzo.numerics, mezzo.optim, mezzo.explanation, mezzo.session.attach
    import mezzo.session.capture, mezzo.compat.torch
    from mezzo import backward, compiling, dispatch, sharded, tensors
    from mezzo.cast.model.places import NORM

    def with_numbers(call):
        return lambda: call(torch.ones(1))

    def classed():
        class Mode(dispatch.TorchDispatchMode):
            pass
        Mode()

    uses = {
        "torch._C._dynamo.eval_frame.get_eval_frame_callback": compiling.is_at_work,
        "torch.amp.autocast_mode._enter_autocast": compiling.require_switches,
        "torch._dynamo.exc.InvalidBackend": lambda: compiling.backend_of("eager"),
        "torch._dynamo.list_backends": compiling.backends,
        "torch._dynamo.exc.TorchDynamoException": compiling.capture_errors,
        "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx": lambda: compiling.traced_variable("x"),
        "torch._functorch.config.backward_pass_autocast": lambda: compiling.differentiated_plainly(None).__enter__(),
        "torch.amp.autocast_mode._exit_autocast": lambda: 1 in (0, compiling.EXIT_AUTOCAST),
        "torch._C._is_key_in_tls": backward.thread_owner,
        "torch._C._current_graph_task_id": backward.runs_backward,
        "torch._C._current_autograd_node": backward.current_node,
        "torch._C._autograd._get_sequence_nr": backward.next_number,
        "torch._C._autograd._top_saved_tensors_default_hooks": backward.innermost_saving_hooks,
        "torch._C._will_engine_execute_node": backward.will_run,
        "torch._C.DisableTorchFunction": lambda: dispatch.DisableTorchFunction(),
        "torch._C.DisableTorchFunctionSubclass": lambda: dispatch.DisableTorchFunctionSubclass(),
        "torch._C._len_torch_function_stack": dispatch.innermost_function_mode,
        "torch.overrides._get_current_function_mode_stack": dispatch.function_modes,
        "torch._C._len_torch_dispatch_stack": dispatch.num_dispatch_modes,
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack": dispatch.dispatch_modes,
        "torch.utils._python_dispatch.TorchDispatchMode": classed,
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass": with_numbers(dispatch.holds_tensors),
        "torch._subclasses.fake_tensor.FakeTensorMode": lambda: dispatch.FakeTensorMode(),
        "torch._C._get_dispatch_mode": dispatch.makes_fake,
        "torch._C._functorch.peek_interpreter_stack": dispatch.is_transformed,
        "torch._C._functorch.is_functorch_wrapped_tensor": with_numbers(dispatch.unwrapped),
        "torch._C._functorch.is_batchedtensor": with_numbers(dispatch.is_batch_of_gradients),
        "torch._C._dispatch_get_registrations_for_dispatch_key": lambda: dispatch.registered("AutocastCPU"),
        "torch._C._nn": lambda: mezzo.policy.ops.names.callables("gelu"),
        "torch._ops.HigherOrderOperator": lambda: isinstance(1, dispatch.HigherOrderOperator),
        "torch.nn.modules.batchnorm._NormBase": lambda: isinstance(1, NORM),
        **{f"torch.utils._pytree.{name}": getattr(tensors, name) for name in (
            "tree_flatten", "tree_is_leaf", "tree_unflatten")},
        **{f"torch._{name}": getattr(tensors, name) for name in (
            "foreach_copy_", "foreach_mul", "foreach_mul_", "foreach_norm", "foreach_zero_")},
    }
    said = {}
    for name, use in uses.items():
        try:
            use()
            said[name] = "nothing"
        except mezzo.UnsupportedError as error:
            said[name] = str(error).partition("\\n")[0]
    print(json.dumps([gone, said]))
"""


def test_importing_mezzo_needs_no_private_name_and_the_first_use_of_one_names_it(tmp_path):
    """All names at once are deleted that can be; torch's own modules have taken them before."""
    run = functools.partial(
        subprocess.run,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    listed = "import sys, torch; before = {*sys.modules}; import mezzo, mezzo.overflow, mezzo.plan, mezzo.explanation\n"
    listed += "import mezzo.session.capture, mezzo.session.attach, mezzo.numerics, mezzo.compat.torch\n"
    listed += "print(*(name for name in {*sys.modules} - before if name.split('.')[0] != 'mezzo'))"
    modules = run([sys.executable, "-c", listed]).stdout.split()
    names = [name for name, file in OWNER.items() if file != ANYWHERE and name not in OF_TORCH]
    done = run([sys.executable, "-c", textwrap.dedent(PLANTED)], input=json.dumps([names, modules]))
    assert done.returncode == 0, done.stderr[-3000:]
    gone, message = json.loads(done.stdout)
    assert len(gone) > 50
    assert {name: text for name, text in message.items() if text != f"torch {torch.__version__} has no {name}"} == {}
    assert message.keys() <= {*gone}


# The inventory, against the source ------------------------------------------------------------------------


def private_texts(source):
    """Yield the texts of a file that name something private of torch's by its whole path."""
    for node in nodes(source):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node.value.startswith("torch.") and "\n" not in node.value and " " not in node.value:
            yield node.value


def dotted(node):
    """Return the path of a chain of attributes that begins with ``torch``; nothing of another one."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(["torch", *reversed(parts)]) if isinstance(node, ast.Name) and node.id == "torch" else ""


def is_private(path):
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def may_take(file, path):
    """Whether a file may take a name, or what leads to one that it owns."""
    rows = [name for name in OWNER if f"{name}.".startswith(f"{path}.") or path.startswith(f"{name}.")]
    return any(OWNER[name] in (file, ANYWHERE) for name in rows)


def test_each_private_path_is_taken_by_the_file_that_owns_it():
    wrong = []
    for file, text in sources().items():
        if file == "releases.py":
            continue
        paths = [path for path in private_texts(text) if is_private(path) and path not in TEXTS]
        for node in nodes(text):
            if isinstance(node, ast.Attribute) and (path := dotted(node)):
                paths.append(path)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                paths += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                paths += [alias.name for alias in node.names if alias.name.startswith("torch.")]
        wrong += [f"{file}: {path}" for path in paths if is_private(path) and not may_take(file, path)]
    assert wrong == []


def test_each_private_attribute_is_read_by_a_file_that_owns_it():
    ours = set().union(*map(own_names, sources().values()))
    wrong = []
    for file, text in sources().items():
        for node in nodes(text):
            name = ""
            if isinstance(node, ast.Attribute):
                name = node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "getattr",
                "setattr",
                "hasattr",
                "attrgetter",
            ):
                texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                name = next((argument for argument in texts if isinstance(argument, str)), "")
            is_ours = name in ours and name not in OWNERS_OF_ATTRIBUTES
            if not is_private(name) or name.startswith("__") or name in OTHERS | TEXTS or is_ours:
                continue
            is_path = isinstance(node, ast.Attribute) and dotted(node)  # which the test above looks at
            if (
                not is_path
                and not OWNERS_OF_ATTRIBUTES.get(name, set()) & {file, ANYWHERE}
                and not is_own(node, name, ours)
            ):
                wrong.append(f"{file}:{node.lineno} {ast.unparse(node)}")
    assert wrong == []


def is_own(node, name, ours):
    """Whether an attribute is of mezzo's own classes, which have one of that name, too."""
    return name in ours and isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")


def own_names(source):
    """Return the private names that a file binds."""
    names = set()
    for node in nodes(source):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_no_row_is_left_over():
    unused = []
    for file, names in PRIVATE.items():
        texts = [text for path, text in sources().items() if path != "releases.py"]
        texts = texts if file == ANYWHERE else [(SOURCE / file).read_text()]
        for name in names:
            parts = name.rpartition(".")[2].split("|")
            if not any(part in text for part in parts for text in texts):
                unused.append(f"{file}: {name}")
    assert unused == []


def test_no_name_has_two_owners():
    assert len(OWNER) == sum(map(len, PRIVATE.values()))
