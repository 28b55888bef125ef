"""The emitter: source in C++ and Triton of pure functions of tensors, traced once and written operation by operation.

Here belong the trace (``tracing``) and one table of operations for each language (``cpp``, ``triton``). Where elements
lie, and how kernels walk over them, is said by the rooms that have kernels: ``mezzo.formats``, ``mezzo.step`` and
``mezzo.trace``.
"""
