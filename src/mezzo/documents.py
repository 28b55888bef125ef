"""What explanations and overflows share: they go to JSON, which names the version of its fields, and back."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from mezzo.errors import StateError

__all__ = ["Document"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A value whose fields are plain ones, other dataclasses and tuples of these."""

    _version: ClassVar[int] = 1
    #: Properties that are written for readers of the JSON, and follow from the fields when it is read back.
    _derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them."""
        data: dict[str, Any] = json.loads(self.to_json())
        return data

    def to_json(self) -> str:
        """Write everything as one JSON object; ``from_json`` reads it back."""
        derived = {name: dataclasses.asdict(getattr(self, name)) for name in self._derived}
        data = {"version": self._version, **derived, **dataclasses.asdict(self)}
        return json.dumps(data, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            StateError: It is not JSON, not a document of this class, or one of another version.
        """
        name = cls.__name__.lower()

        def refused(why: str, what: str = f"this is not an {name}") -> StateError:
            return StateError(what, why=why, write=f"{name}.to_json(), read back with {cls.__name__}.from_json(text)")

        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise refused(f"not JSON: {error}") from error
        if not isinstance(data, dict) or "version" not in data:
            raise refused("it names no version")
        if (version := data.pop("version")) != cls._version:
            raise refused(f"this mezzo reads version {cls._version}", f"the {name} has version {version!r}")
        for derived in cls._derived:
            data.pop(derived, None)
        try:
            built: Self = _built(cls, data)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise refused(f"a field is wrong: {error}") from error
        return built


def _built(kind: Any, value: Any) -> Any:
    """Build a value of a type from JSON, whose lists stand for tuples."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: _built(kinds[name], item) for name, item in value.items()})
    if get_origin(kind) is not tuple:
        return value
    inner = get_args(kind)
    if inner[-1] is ...:
        return tuple(_built(inner[0], item) for item in value)
    return tuple(_built(each, item) for each, item in zip(inner, value, strict=True))
