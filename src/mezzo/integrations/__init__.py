"""Bridges to other tools: what a session knows, told where its user looks.

Everything here uses a session's public face, and nothing of a tool is imported before it is used: what derives from a
tool's classes has a module of that tool's name, ``lightning``, ``accelerate`` and ``transformers``. Nothing of mezzo
depends on it.
"""

from __future__ import annotations

from mezzo.integrations.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
