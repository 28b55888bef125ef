"""The error tree, and the one builder of messages.

Every message answers four questions, in this order: *what* went wrong, *where*, *why*, and *what to
write instead*. Mistakes in closed vocabularies name the nearest valid word, and all the problems of
one input are reported in one error.
"""

from __future__ import annotations

import difflib
import importlib
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, Final, TypeAlias

#: Characters of a line, beyond which its middle is left out, and problems of one input, beyond which they are counted.
_LONGEST_LINE: Final = 2000
MOST_PROBLEMS: Final = 20
#: Characters of a word that is echoed, or compared with a vocabulary.
_LONGEST_WORD: Final = 200
#: Words of a vocabulary, beyond which they are counted.
_MOST_WORDS: Final = 20

#: What fits each field of a value, and that in words: see :func:`misfits`.
Fields: TypeAlias = Mapping[str, tuple[Callable[[Any], bool], str]]


def message(what: str, *, where: str = "", why: str = "", write: str = "") -> str:
    """Build the text of an error.

    Args:
        what: One line that states the fault; the first line of the message.
        where: Module path, op, dtype, shape, step or rank at which it happened.
        why: The reason it is a fault.
        write: What the user can write instead, as text to paste.

    Returns:
        The lines that are not empty, labelled and aligned. Characters that would not be seen are spelled out, and
        the middle of a very long line is left out.

    Example:
        >>> print(message("unknown level 'O4'", why="the levels are O0, O1, O2, O3", write="Policy.O2()"))
        unknown level 'O4'
          why    the levels are O0, O1, O2, O3
          write  Policy.O2()
    """
    lines = what.split("\n")
    for label, text in (("where", where), ("why", why), ("write", write)):
        if text:
            first, *rest = text.rstrip("\n").split("\n")
            lines.append(f"  {label:<5}  {first}")
            lines.extend(f"  {'':<5}  {line}" for line in rest)
    return "\n".join(_elided(printable(line), _LONGEST_LINE) for line in lines)


def printable(text: str, *, keep: str = "") -> str:
    r"""Spell out every character that would not be seen, or would do something to a terminal.

    Names of modules and parameters, paths and the texts of checkpoints may hold any. Control characters would move the
    cursor or change the colours, and marks of direction show a text in another order than it has.

    Args:
        text: Any text.
        keep: Characters to leave as they are, such as the line breaks of a text that has lines.

    Example:
        >>> print(printable("fc\x1b[31m"))
        fc\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep or unicodedata.category(character) == "Zs"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def shown(value: object) -> str:
    """Write a wrong value as Python would, in one line that is not too long.

    Example:
        >>> shown("float61")
        "'float61'"
    """
    try:
        text = repr(value)
    except Exception:  # of a stranger's class, or an integer of more digits than Python writes
        text = f"a {type(value).__name__}"
    return _elided(printable(text), _LONGEST_WORD)


def _elided(text: str, longest: int) -> str:
    """Leave out the middle of a text that is too long, and say how long it was."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} … {text[-longest // 4 :]} ({len(text):,} characters)"


class MezzoError(Exception):
    """The root of every error that mezzo raises on purpose.

    Args:
        what: See :func:`message`, which builds the text from these four.
        where: See :func:`message`.
        why: See :func:`message`.
        write: See :func:`message`.
    """

    #: Whether the module that runs is to add its path, which the function that raises does not know.
    awaits_place = False

    def __init__(self, what: str, *, where: str = "", why: str = "", write: str = "") -> None:
        super().__init__(message(what, where=where, why=why, write=write))
        self._said = {"what": what, "where": where, "why": why, "write": write}

    def happened_in(self, path: str) -> None:
        """Prepend the path of the module where the error was raised to ``where``; later calls are not needed."""
        self._said |= {"where": f"{path}, {self._said['where']}"}
        self.args, self.awaits_place = (message(**self._said),), False

    @classmethod
    def together(cls, errors: Sequence[MezzoError]) -> MezzoError:
        """Join several problems of one input into one error of this class.

        Args:
            errors: At least one error; a single one is returned as it is.

        Returns:
            An error whose text numbers the problems.
        """
        if len(errors) == 1:
            return errors[0]
        texts = [f"{number}. {error}" for number, error in enumerate(errors[:MOST_PROBLEMS], start=1)]
        more = [f"and {len(errors) - MOST_PROBLEMS} more"] if len(errors) > MOST_PROBLEMS else []
        return cls("\n".join((f"{len(errors)} problems", *texts, *more)))


class PolicyError(MezzoError, ValueError):
    """A request that makes no sense, whatever the device: an unknown name, an impossible combination."""


class UnsupportedError(MezzoError, RuntimeError):
    """A request that makes sense but that this device, model or installation cannot honour."""


class NumericsError(MezzoError, FloatingPointError):
    """Values that left the range where training can go on."""


class ScaleCollapsed(NumericsError):  # noqa: N818 - a public name of the contract
    """The loss scale stood at its floor, and still every step overflowed, for as long as its patience allows."""


class StateError(MezzoError, RuntimeError):
    """A call at the wrong moment, or a saved state that does not belong here."""


class DistributedError(StateError):
    """Another rank failed, did not answer, or does not do what this one does."""


def raise_together(problems: Iterable[MezzoError]) -> None:
    """Raise several problems of one input as one error, of the first one's class; without any, nothing."""
    if errors := list(problems):
        raise type(errors[0]).together(errors)


def closest(name: str, vocabulary: Iterable[str], least: float = 0.5) -> str:
    """Return the nearest word of a closed vocabulary; empty where none is alike, by ``difflib``'s ratio."""
    lowered = {word.lower(): word for word in vocabulary}
    match = difflib.get_close_matches(_elided(name, _LONGEST_WORD).lower(), lowered, n=1, cutoff=least)
    return lowered[match[0]] if match else ""


def nearest(name: str, vocabulary: Iterable[str]) -> str:
    """Suggest the nearest word of a closed vocabulary.

    Args:
        name: The word that is not in the vocabulary.
        vocabulary: The valid words.

    Returns:
        ``"did you mean 'x'? valid: …"``, without the question when nothing is near; of many words the first twenty.

    Example:
        >>> nearest("flaot16", ["float16", "bfloat16"])
        "did you mean 'float16'? valid: float16, bfloat16"
    """
    words = list(vocabulary)
    match = closest(name, words)
    question = f"did you mean {match!r}? " if match else ""
    return f"{question}valid: {some_of(words, _MOST_WORDS)}"


def unknown_word(name: str, value: object, vocabulary: Collection[str]) -> PolicyError:
    """Return the error of an argument that is no word of its vocabulary.

    Example:
        >>> print(unknown_word("level", "O4", ["O1", "O2"]))
        unknown level 'O4'
          why    did you mean 'O2'? valid: O1, O2
          write  level="O1"
    """
    why = nearest(value if isinstance(value, str) else shown(value), vocabulary)
    return PolicyError(f"unknown {name} {shown(value)}", why=why, write=f'{name}="{next(iter(vocabulary))}"')


def not_switches(**switches: object) -> list[PolicyError]:
    """Return an error for each argument that is neither True nor False."""
    odd = {name: value for name, value in switches.items() if not isinstance(value, bool)}
    return [PolicyError(f"{n} is {shown(v)}", why="it is True or False", write=f"{n}=True") for n, v in odd.items()]


def misfits(value: Mapping[str, Any], fields: Fields) -> Iterator[str]:
    """Yield each field of a saved value that is missing, or does not fit.

    Args:
        value: The value.
        fields: A test of each field, and its words. A field with a dot is one of the mapping named before the dot.

    Example:
        >>> list(misfits({"a": {"x": 1.5}}, {"a.x": (lambda x: isinstance(x, int), "a count"), "b": (bool, "true")}))
        ['a.x is 1.5, not a count', 'b is missing']
    """
    for path, (fits, words) in fields.items():
        folder, _, name = path.rpartition(".")
        holder = value.get(folder) if folder else value
        if not isinstance(holder, Mapping) or name not in holder:
            yield f"{path} is missing"
        elif not fits(holder[name]):
            yield f"{path} is {shown(holder[name])}, not {words}"


def some_of(names: Sequence[str], limit: int = 5) -> str:
    """List the first few names and count the rest.

    Example:
        >>> some_of(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    first = ", ".join(map(printable, names[:limit]))
    return first if len(names) <= limit else f"{first} and {len(names) - limit} more"


def require_extra(extra: str, what: str, *modules: str, why: str = "") -> None:
    """Raise an error, before minutes of work, if a package that an extra installs is missing or too old.

    Args:
        extra: The extra of mezzo's that installs it.
        what: The first line of the error: what needs which package.
        *modules: The modules that are imported.
        why: What the package is needed for.

    Raises:
        UnsupportedError: A module cannot be imported, or a package of the extra is older than mezzo asks for.
    """
    oldest_versions = _oldest_versions(extra)
    packages = " ".join(f'"{name}>={oldest}"' for name, oldest in oldest_versions.items())
    write = f"pip install {packages}" if packages else f'pip install ".[{extra}]", in a clone of mezzo'
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        reason = f"{why}, and there is {error}" if why else str(error)
        raise UnsupportedError(what, why=reason, write=write) from error
    if old := ", ".join(_too_old(oldest_versions)):
        raise UnsupportedError(what, why=f"there is {old}", write=write)


def _oldest_versions(extra: str) -> dict[str, str]:
    """Return the oldest usable version of each package of an extra, by the installed metadata; {} without it."""
    try:
        lines = metadata.requires("mezzo") or []
    except metadata.PackageNotFoundError:
        return {}
    matches = (re.fullmatch(rf"([\w.-]+)>=([\d.]+); extra == ['\"]{extra}['\"]", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def _too_old(oldest_versions: Mapping[str, str]) -> Iterator[str]:
    """Yield the packages that are too old; one that is installed under another name cannot be looked up."""
    for name, oldest in oldest_versions.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version_numbers(version) < version_numbers(oldest):
            yield f"{name} {version}, and {oldest} is the oldest that will do"


def version_numbers(version: str) -> list[int]:
    """Return the numbers of a version, to compare releases by.

    Example:
        >>> version_numbers("2.14.1+cu130")
        [2, 14, 1]
    """
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
