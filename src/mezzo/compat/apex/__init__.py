"""``apex.amp``, as NVIDIA's documentation taught it, over a session: ``from mezzo.compat.apex import amp``.

One module-level session lives from :func:`initialize` to :func:`deinitialize`. At O1 casts hold for the thread between
the two, inside modules and outside; a backward pass goes through :func:`scale_loss`; ``optimizer.step()`` is the
session's, and skips where gradients overflowed.

What differs from apex, since it was a fault of apex's:

- A constant loss scale skips a step whose gradients are not finite, too; apex wrote infinities into the weights.
- A loss that is itself not finite skips the step, and leaves the scale alone, which could not cure it.
- The step is taken over once, with closures and on the optimizer itself, in a way that learning-rate schedulers accept;
  apex replaced it on each overflow.
- ``clip_grad_norm_(model.parameters(), …)`` sees unscaled FP32 gradients at O2 as well, not only
  ``amp.master_params(optimizer)``.
- Gradients of optimizers that ``scale_loss`` does not name are left as they were, where apex left scaled ones behind.
- Gradients that are still scaled when a step comes (``delay_unscale=True`` for all passes) are unscaled by that step.
- Casts of weights see weights that were written in between; state dicts at O2 hold the masters' own FP32 values, so
  that a run goes on bit for bit.
- A function that is pinned to FP32 has what it calls run in FP32 as well; no function of torch's is replaced, but
  what is registered by name where no rule of a policy can say it.
- The optimizer's own products (Shampoo, Muon) are never cast. Nothing needs a GPU.
- On several ranks the scale moves with the step, on all of them alike, and not with each block.

Refused with what to write instead: float16 gradients that would have to be unscaled in float16, so a loss scale at O3,
and O2 without masters but with a scale.

References:
    NVIDIA/apex, ``apex/amp`` and ``apex/fp16_utils``, until its removal in 2025.
"""

import sys

from mezzo.compat.apex.fp16_optimizer import FP16_Optimizer
from mezzo.compat.apex.frontend import (
    deinitialize,
    disable_casts,
    initialize,
    load_state_dict,
    master_params,
    scale_loss,
    state_dict,
)  # fmt: skip
from mezzo.compat.apex.functions import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)  # fmt: skip

__all__ = [
    "FP16_Optimizer", "amp", "bfloat16_function", "deinitialize", "disable_casts", "float_function", "half_function",
    "initialize", "load_state_dict", "master_params", "promote_function", "register_bfloat16_function",
    "register_float_function", "register_half_function", "register_promote_function", "scale_loss", "state_dict",
]  # fmt: skip

amp = sys.modules[__name__]  # as programs import it: from apex import amp
