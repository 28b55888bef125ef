"""``apex.amp``, as NVIDIA's documentation taught it, over an attached session: ``from mezzo.compat.apex import amp``.

One session lasts from :func:`initialize` to :func:`deinitialize`. At O1 and O2 ops are cast while the models
run; a backward pass goes through :func:`scale_loss`, and when it ends gradients are FP32, unscaled and checked;
``optimizer.step()`` is the session's, and skips where gradients overflowed. ``master_params`` are the parameters.

What differs from apex, since it was a fault of apex's:

- A constant loss scale skips a step whose gradients are not finite, too; apex wrote infinities into the weights.
- A loss that is itself not finite skips the step, and leaves the scale alone, which could not cure it.
- Weights at O2 are FP32 to everybody, stored in two halves, and ``clip_grad_norm_(model.parameters(), …)`` sees their
  unscaled gradients; nothing is left scaled, whichever optimizers ``scale_loss`` names.
- Casts of weights see weights that were written in between; state dicts at O2 hold FP32 values, so that a run goes on
  bit for bit.
- A function that is pinned to FP32 has what it calls run in FP32 as well; no function of torch's is replaced, but what
  is registered by name where no rule of a policy can say it.

All losses share one scale, whatever ``num_losses`` and ``loss_id`` say; a warning tells so once. Left out: casts
outside of the models, ``FP16_Optimizer``, batches of classes with a ``to`` of their own.

References:
    NVIDIA/apex, ``apex/amp``, until its removal in 2025.
"""

import sys

from mezzo.compat.apex.frontend import (
    deinitialize,
    disable_casts,
    initialize,
    load_state_dict,
    master_params,
    scale_loss,
    state_dict,
)
from mezzo.compat.apex.functions import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

__all__ = [
    "amp", "bfloat16_function", "deinitialize", "disable_casts", "float_function", "half_function", "initialize",
    "load_state_dict", "master_params", "promote_function", "register_bfloat16_function", "register_float_function",
    "register_half_function", "register_promote_function", "scale_loss", "state_dict",
]  # fmt: skip

amp = sys.modules[__name__]  # as programs import it: from apex import amp
