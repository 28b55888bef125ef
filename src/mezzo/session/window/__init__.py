"""The accumulation window: what gradients carry from one backward pass to the step that takes them.

Whether a step is taken, and what it does, is decided outside.
"""
