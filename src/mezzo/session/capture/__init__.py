"""Whole train steps as one CUDA graph: the batch, the recorded run, and what guards each replay.

What is here knows the session's core, and never its face.
"""

from mezzo.session.capture.captured import Captured, capture

__all__ = ["Captured", "capture"]
