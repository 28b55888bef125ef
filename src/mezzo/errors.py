"""The error tree, and the one builder of messages.

Every message answers four questions, in this order: *what* went wrong, *where*, *why*, and *what to
write instead*. Mistakes in closed vocabularies name the nearest valid word, and all the problems of
one input are reported in one error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "MezzoError",
    "NumericsError",
    "PolicyError",
    "ScaleCollapsed",
    "StateError",
    "UnsupportedError",
    "message",
    "nearest",
    "some_of",
]


def message(what: str, *, where: str = "", why: str = "", write: str = "") -> str:
    """Build the text of an error.

    Args:
        what: One line that states the fault; the first line of the message.
        where: Module path, op, dtype, shape, step or rank at which it happened.
        why: The reason it is a fault.
        write: What the user can write instead, as text to paste.

    Returns:
        The lines that are not empty, labelled and aligned.

    Example:
        >>> print(message("unknown level 'O4'", why="the levels are O0, O1, O2, O3", write="Policy.O2()"))
        unknown level 'O4'
          why    the levels are O0, O1, O2, O3
          write  Policy.O2()
    """
    lines = [what]
    for label, text in (("where", where), ("why", why), ("write", write)):
        if text:
            first, *rest = text.splitlines()
            lines.append(f"  {label:<5}  {first}")
            lines.extend(f"  {'':<5}  {line}" for line in rest)
    return "\n".join(lines)


class MezzoError(Exception):
    """The root of every error that mezzo raises on purpose.

    Args:
        what: See :func:`message`, which builds the text from these four.
        where: See :func:`message`.
        why: See :func:`message`.
        write: See :func:`message`.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", write: str = "") -> None:
        super().__init__(message(what, where=where, why=why, write=write))

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
        texts = (f"{number}. {error}" for number, error in enumerate(errors, start=1))
        return cls("\n".join((f"{len(errors)} problems", *texts)))


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


def nearest(name: str, vocabulary: Iterable[str]) -> str:
    """Suggest the nearest word of a closed vocabulary.

    Args:
        name: The word that is not in the vocabulary.
        vocabulary: The valid words.

    Returns:
        ``"did you mean 'x'? (valid: …)"``, without the question when nothing is near.

    Example:
        >>> nearest("flaot16", ["float16", "bfloat16"])
        "did you mean 'float16'? valid: float16, bfloat16"
    """
    words = list(vocabulary)
    lowered = {word.lower(): word for word in words}
    match = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    question = f"did you mean {lowered[match[0]]!r}? " if match else ""
    return f"{question}valid: {', '.join(words)}"


def some_of(names: Sequence[str], limit: int = 5) -> str:
    """List the first few names and count the rest.

    Example:
        >>> some_of(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
