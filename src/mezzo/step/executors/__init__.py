"""Executors of the two passes: ``cpp`` on the CPU, ``triton`` on NVIDIA's GPUs, ``portable`` everywhere.

Here belongs how tensors are cut, fused and launched. What happens to an element is defined in ``mezzo.step.update``,
``mezzo.step.storage`` and ``mezzo.step.verdict``; executors agree with those, and with each other.
"""
