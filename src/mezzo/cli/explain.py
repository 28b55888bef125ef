"""``mezzo explain``: which precision each op in each module gets, and why."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import Tensor, nn

from mezzo import recipes
from mezzo.cli.app import app
from mezzo.cli.output import UsualPolicy, note, require_free, show_explanation, usual_policy
from mezzo.cli.script.first_step import explain_script
from mezzo.cli.script.words import IsModule, OnSubject, refuse_for_script, subject_of
from mezzo.errors import PolicyError, nearest
from mezzo.explanation import Explanation
from mezzo.explanation.answer import comparison
from mezzo.explanation.page import require_jinja2, save
from mezzo.explanation.run import explain as explained
from mezzo.explanation.sections import different_rows
from mezzo.explanation.table import difference_renderables, differences_json, renderables, terms
from mezzo.machine import default_device
from mezzo.policy import Policy
from mezzo.recipes.recipe import first_step
from mezzo.script import Program

__all__ = ["explain"]

ModelAndInputs = tuple[nn.Module, Any, Callable[[Any], Tensor] | None]

_SUBJECTS = "mezzo explain digits-cnn, or mezzo explain package.module:factory for a model of yours"
_FACTORY = "def factory():\n    return model, inputs   # or (model, inputs, loss)"


@app.command("explain", cls=OnSubject)
def explain(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE | MODEL | SCRIPT [ARGUMENTS]...",
            help=f"One of {', '.join(recipes.RECIPES)}; package.module:factory; or a script, and its arguments.",
        ),
    ],
    is_module: IsModule = False,
    policy: UsualPolicy = None,
    against: Annotated[
        str | None, typer.Option(metavar="POLICY", help="Show only what another policy would change.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show every row: each op in each module, each cast.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with the same content, too.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Say what runs in low precision, what does not and why, what casts cost, and what to write.

    [bold]mezzo explain digits-cnn[/bold]                        a recipe, at level O1

    [bold]mezzo explain docs-lm --policy O1,bf16,low=softmax[/bold]

    [bold]mezzo explain docs-lm --policy O1,bf16 --against O2,bf16[/bold]  what changes

    [bold]mezzo explain docs-lm --full[/bold]                    every op, every cast

    [bold]mezzo explain docs-lm --html page.html[/bold]          a page with all of it

    [bold]mezzo explain mypackage.models:tiny --json[/bold]      your own model, for a program

    [bold]mezzo explain --policy O2,bf16 train.py --epochs 3[/bold]  your script

    A factory takes no argument and returns (model, inputs) or (model, inputs, loss): inputs are a tensor, a tuple of
    arguments or a mapping of keyword arguments; loss maps the model's output to a scalar. Modules are looked up from
    the working directory, too.

    A script runs in FP32 until an optimizer has stepped, as with mezzo run --dry; options before it are mezzo's, those
    behind it are its own. Each model that it has called is explained.

    All is measured in one forward and backward pass. The answer comes first, then the rows that matter, alike modules
    folded: products left in FP32, round trips low, FP32, low with the rule that saves them, the dearest casts, products
    whose dimensions should be padded, findings, and the precision of each op with who decided; (!) marks ops where
    what was measured is not what was decided.
    """
    given = None if policy is None else Policy.of(policy)
    other = None if against is None else Policy.of(against)
    subject = subject_of(words, is_module)
    if isinstance(subject, Program):
        refuse_for_script(against=against, html=html)
        explain_script(subject, usual_policy(given), full=full, as_json=as_json)
    if html is not None:
        require_jinja2()
        require_free(html, "--html", overwrite)
    if ":" in subject:
        model, inputs, loss = _from_factory(subject)
    else:
        recipe = recipes.get(subject, write=_SUBJECTS)
        model, inputs, loss = first_step(recipe, recipe.load(), 0, default_device())
    chosen = usual_policy(given)
    with Console(stderr=True).status("tracing one forward and backward pass"):
        first = explained(model, inputs, chosen, loss=loss)
        second = None if other is None else explained(model, inputs, other, loss=loss)
    if html is not None:
        _write(html, first, second)
    if as_json:
        typer.echo(first.to_json() if second is None else differences_json(first, second))
    elif second is None:
        show_explanation(list(renderables(first, full=full)), full)
    else:
        show_explanation(list(difference_renderables(first, second, full=full)), full)


def _write(path: Path, first: Explanation, second: Explanation | None) -> None:
    """Write the page, and say so on stderr.

    Raises:
        PolicyError: There can be no such file.
    """
    try:
        if second is None:
            first.save_html(path)
        else:
            rows = (list(different_rows(first, second, full=full)) for full in (False, True))
            save(path, comparison(first, second), terms(first), *rows)
    except OSError as error:
        raise PolicyError(f"the page {path} cannot be written", why=error.strerror or str(error)) from error
    note(f"page: {path}")


def _from_factory(text: str) -> ModelAndInputs:
    """Import ``package.module:factory`` and call it.

    Raises:
        PolicyError: No such module or function, or a result of another kind. What the module or the factory raises by
            itself passes through.
    """
    module_name, _, name = text.partition(":")
    with _importing_from_here():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # an import inside the user's module
            raise PolicyError(
                f"there is no module {module_name!r}",
                where=text,
                why=f"looked up from {os.getcwd()} and where Python finds packages: {error}",
                write="mezzo explain package.module:factory, without .py",
            ) from error
        except (ValueError, TypeError) as error:
            if module_name and not module_name.startswith("."):
                raise
            raise PolicyError(
                f"{text!r} names no module", where=text, write="mezzo explain package.module:factory"
            ) from error
        factory = getattr(module, name, None)
        if factory is None:
            public = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            why = nearest(name, public) if public else "the module has no public function"
            raise PolicyError(f"{module_name} has no {name!r}", why=why, write=_FACTORY)
        if not callable(factory):
            raise PolicyError(f"{text} is no function but of type {type(factory).__name__}", write=_FACTORY)
        result = factory()
    if type(result) is not tuple or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        shown = tuple(type(each).__name__ for each in result) if isinstance(result, tuple) else type(result).__name__
        raise PolicyError(f"{text} returned {shown}, not a model and its inputs", write=_FACTORY)
    loss = result[2] if len(result) == 3 else None
    if loss is not None and not callable(loss):
        raise PolicyError(
            f"the loss that {text} returned is a {type(loss).__name__}",
            write="a function of the model's output: lambda output: criterion(output, target)",
        )
    return result[0], result[1], loss


@contextmanager
def _importing_from_here() -> Iterator[None]:
    """Let modules in the working directory be imported, as ``python -m`` does."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's module may have changed it, too
            sys.path.remove(here)
