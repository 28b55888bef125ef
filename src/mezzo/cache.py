"""Where mezzo keeps on disk what takes time to find out or to build."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["folder"]


def folder() -> Path:
    """Return the folder of the cache; it need not exist.

    Raises:
        RuntimeError: If this user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "mezzo"
