"""From scaled gradients to new weights: what one step does to them, and how they lie in memory.

``update`` holds the rules as pure functions of an element, ``storage`` how a weight is kept (as a low-precision value
and 16 remainder bits, or without them), ``moments`` how its moments are in 8 bits, ``verdict`` the two passes of a step
that join these, ``gradients`` the gradients of a step, and ``executors`` what carries all of it out: C++, Triton, or
torch's own operations.

Knows nothing of policies' op rules, regions or loss scales' rules; it is handed gradients and a multiplier.
"""
