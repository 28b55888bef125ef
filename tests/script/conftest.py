"""What tests of scripts share."""

import re
import warnings
from pathlib import Path

import pytest

from mezzo.script import Program, run

collect_ignore = ["scripts"]  # which train when they are imported
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def script(capsys):
    """Run a script in this process, under a policy or as it is: (how it ended, what it printed as name and number)."""

    def outcome(name, *arguments, policy=None, **options):
        program = Program(name=str(SCRIPTS / f"{name}.py"), arguments=tuple(map(str, arguments)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names that the script has from older versions of torch
            ended = program.run() if policy is None else run(program, policy, **options)
        if ended is not None and ended.error is not None:
            raise ended.error
        printed = re.findall(r"^(\w+) (-?[\d.]+)$", capsys.readouterr().out, re.MULTILINE)
        return ended, {metric: float(value) for metric, value in printed}

    return outcome
