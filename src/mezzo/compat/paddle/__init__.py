"""``paddle.amp`` as its programs call it: ``auto_cast``, ``decorate`` and ``GradScaler``, over sessions of mezzo's.

``from mezzo.compat import paddle as amp`` stands for ``from paddle import amp``: models and optimizers are torch's, or
mezzo's.
"""

from mezzo.compat.paddle.decorate import decorate
from mezzo.compat.paddle.grad_scaler import GradScaler
from mezzo.compat.paddle.regions import auto_cast

__all__ = ["GradScaler", "auto_cast", "decorate"]
