"""Saving and loading: a session's state, checkpoints on disk, the loss scales of other libraries.

What is here knows the session's core, and never its face.
"""
