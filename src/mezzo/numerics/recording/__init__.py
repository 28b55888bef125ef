"""The recorder, and what follows one step for it: passes through modules, weights, gradients, updates.

What was recorded is a value of :mod:`mezzo.numerics.evidence`; nothing here judges it.
"""
