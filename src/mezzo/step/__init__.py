"""From scaled gradients to new weights: FP32 masters around any torch optimizer.

Knows nothing of policies' op rules, regions or loss scales' rules; it is handed gradients and a multiplier.
"""

from mezzo.step.master import MasterWeights

__all__ = ["MasterWeights"]
