"""One watched forward and backward pass: calls, kernels, casts, names of tensors, the way back to the user's line.

Nothing here judges what it sees: ``mezzo.explanation`` and ``mezzo.overflow`` read it.
"""
