"""What explanations and overflows share: they go to JSON, which names the version of its fields, and back."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["Document"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A value whose fields are plain ones and other dataclasses; ``from_json`` is the subclass's own."""

    _version: ClassVar[int] = 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them."""
        data: dict[str, Any] = json.loads(self.to_json())
        return data

    def to_json(self) -> str:
        """Write everything as one JSON object; ``from_json`` reads it back."""
        return json.dumps({"version": self._version, **dataclasses.asdict(self)}, indent=2, ensure_ascii=False)

    @staticmethod
    def _opened(text: str) -> tuple[Any, dict[str, Any]]:
        """Return the version that JSON names, and its fields.

        Raises:
            ValueError: It is not JSON.
            KeyError: It names no version.
            TypeError: It is a list, and no object.
            AttributeError: It is a word or a number.
        """
        data = json.loads(text)
        return data.pop("version"), data
