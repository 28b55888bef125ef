"""Bridges to other tools: what a session knows, told where its user looks.

Everything here reads a session's public face, and nothing of a tool is imported before it is used. Nothing here trains,
and nothing of mezzo depends on it.
"""

from __future__ import annotations

from mezzo.integrations.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
