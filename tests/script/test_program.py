"""A script as the interpreter would run it: arguments, paths, exits, tracebacks; and every name of torch put back."""

import gc
import subprocess
import sys
import traceback
import types
from pathlib import Path

import pytest
import torch
import torch._dynamo  # replaces torch.manual_seed when something imports it first
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mezzo import PolicyError
from mezzo.script import Program, run
from mezzo.script.program import options_of

from ..support.refusals import refused
from .conftest import SCRIPTS

POLICY = "O2,dtype=bfloat16"


@pytest.fixture(autouse=True, scope="module")
def _no_session_of_other_tests():
    gc.collect()


def names():
    """Return whatever a run may replace."""
    places = (
        torch, torch.amp, torch.cuda.amp, torch.cpu.amp, torch.autograd, clip_grad, nn.utils, nn.Module, Optimizer,
        LRScheduler, AveragedModel, DistributedDataParallel,
    )  # fmt: skip
    kinds = [cls for cls in vars(torch.optim.lr_scheduler).values() if isinstance(cls, type)]
    ids = {
        (str(owner), name): id(value)
        for owner in (*places, *kinds)
        for name, value in vars(owner).items()
        if not isinstance(value, types.ModuleType)  # a script imports more of torch
    }
    cells = (getattr(clip_grad, name).__closure__ or () for name in ("clip_grad_norm_", "clip_grad_value_"))
    ids["cells", ""] = [id(cell.cell_contents) for closure in cells for cell in closure]
    ids["sys", ""] = (sys.argv, list(sys.path), sys.modules["__main__"])
    ids["modes", ""] = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
    return ids


def ended(name, *arguments):
    return run(Program(name=str(SCRIPTS / f"{name}.py"), arguments=arguments), POLICY)


@pytest.mark.parametrize("name", ["scaled", "averages", "crashes", "leaves"])
def test_every_name_is_the_original_object_again(name, tmp_path, capsys):
    arguments = {"leaves": ["3"]}.get(name, [])
    before = names()
    ended(name, *arguments)
    after = names()
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set()
    assert not torch.is_autocast_enabled("cpu")


def test_a_script_finds_of_itself_what_it_finds_without_mezzo(tmp_path, capfd, monkeypatch):
    (tmp_path / "inner").mkdir()
    text = (
        "import pickle, sys\ndef f(): pass\nclass C: pass\nx: int = 1\n"
        "print(__file__, sys.argv, sys.path[0], f.__code__.co_filename, f.__module__)\n"
        "print(__name__, __spec__, __package__, __doc__)\n"
        "print(type(pickle.loads(pickle.dumps(C()))) is C)\n"
    )
    for path in ("script.py", "inner/script", "inner/__main__.py"):
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("script.py", "./script.py", "inner/../script.py", str(tmp_path / "script.py"), "inner/script"):
        subprocess.run([sys.executable, name, "--fast"], check=True)
        plain = capfd.readouterr().out
        assert run(Program(name=name, arguments=("--fast",)), POLICY).error is None
        assert capfd.readouterr().out == plain
    assert run(Program(name="inner"), POLICY).error is None  # its __main__
    assert str(Path("inner") / "__main__.py") in capfd.readouterr().out


def test_a_module_is_run_as_with_dash_m(capsys, monkeypatch):
    monkeypatch.chdir(SCRIPTS)
    ended_run = run(Program(name="packaged", arguments=("--fast",), is_module=True), POLICY)
    assert (ended_run.error, ended_run.report.steps) == (None, 3)
    assert capsys.readouterr().out == "__main__ ['--fast']\n"


def test_what_a_script_raises_has_the_traceback_of_the_script_alone():
    error = ended("crashes").error
    path = SCRIPTS / "crashes.py"
    assert "".join(traceback.format_exception(error)) == (
        f'Traceback (most recent call last):\n  File "{path}", line 9, in <module>\n'
        "    raise ValueError(\"the script's own\")\nValueError: the script's own\n"
    )


def test_what_mezzo_raises_keeps_its_frames(tmp_path):
    path = tmp_path / "twice.py"
    path.write_text(
        "import mezzo, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters()), 'O9')\n"
    )
    error = run(Program(name=str(path)), POLICY).error
    assert isinstance(error, PolicyError)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert files[0] == str(path)
    assert "mezzo/policy" in files[-1]


def test_options_are_refused_before_the_script_begins(capsys):
    for policy, norm, message in (("O9", None, "unknown level 'O9'"), ("O1", -1.0, "max_grad_norm is -1.0")):
        with refused(PolicyError, message):
            run(Program(name=str(SCRIPTS / "untrained.py")), policy, max_grad_norm=norm)
    assert capsys.readouterr().out == ""


def test_a_script_that_is_not_there(tmp_path, monkeypatch):
    words = "there is no script 'absent.py'", "write  a path that is there", "or -m package.module"
    with refused(PolicyError, *words):
        Program(name="absent.py")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(tmp_path)
    Program(name="own_package.train", is_module=True)  # known by its package, which is not imported yet
    for absent in ("absent_module", "absent_package.train", ".train", "__main__"):
        with refused(PolicyError, f"there is no module '{absent}'"):
            Program(name=absent, is_module=True)
    with refused(PolicyError, "there is no __main__.py in the folder 'own_package'"):
        Program(name="own_package")


@pytest.mark.parametrize(
    "text",
    [
        'parser.add_argument("-s", "--seeds")',
        'parser.add_argument("--seeds_of_runs")',  # argparse takes the beginning of an option
        'flags.DEFINE_integer("seeds", 3, "")',
        "def main(seeds: int = 3): ...",
        "@dataclass\nclass Options:\n    seeds: int = 3",
        '"""Usage: train.py [--seeds=N]"""',
        "import options",
        "from inner import options",
        "from transformers import HfArgumentParser as Parser",
        "print(sys.argv)",
        "def (",
    ],
)
def test_a_script_has_an_option_if_a_parser_of_its_files_may_know_it(tmp_path, text):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "__init__.py").write_text("")
    (tmp_path / "inner" / "options.py").write_text("from .names import SEEDS")
    (tmp_path / "inner" / "names.py").write_text('SEEDS = "--seeds"')
    (tmp_path / "options.py").write_text("import options\nimport inner.options")
    script = tmp_path / "train.py"
    script.write_text(text)
    assert options_of(script)("--seeds")
    assert options_of(script)("--seeds=3")
    assert options_of(tmp_path)("--seeds")  # a folder


def test_a_script_has_no_option_that_its_files_do_not_name(tmp_path):
    script = tmp_path / "train.py"
    script.write_text('import torch\nseeds = "as seeds are"\nparser.add_argument("--seed", help="of --seeding")\n')
    assert not options_of(script)("--seeds")
    assert options_of(script)("--seed")
