"""One-line faults of the source, each with the tests that are to catch it: what guards a rebuild of any room.

A fault is what a slip, or a change that looks harmless, leaves behind: a sign, a missing cast, a check that is skipped,
the scale of the step before. It imports and runs; only a test that knows the right number notices. An entry of
``research/defects.md`` is named by its letter and number. Every change that cures a fault adds it here; a test file
goes only while all of them are caught without it: ``make faults``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one line, or of few.

    Attributes:
        name: What it is about, and what is wrong.
        file: Below ``src/mezzo``.
        text: What stands there, once in the file.
        planted: What stands there instead.
        tests: Files of tests, or single ones of them, that ``make test`` runs and that fail.
        reason: What a user would see.
    """

    name: str
    file: str
    text: str
    planted: str
    tests: tuple[str, ...]
    reason: str


def in_file(file: str, *faults: tuple[str, str, str, str | tuple[str, ...], str]) -> tuple[Fault, ...]:
    """Return faults of one file: each its name, the text, what is planted, the tests, and the reason."""
    return tuple(
        Fault(
            name=name,
            file=file,
            text=text,
            planted=planted,
            reason=reason,
            tests=(tests,) if isinstance(tests, str) else tests,
        )
        for name, text, planted, tests, reason in faults
    )
