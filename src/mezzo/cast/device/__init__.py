"""What this device can really do, found out once, and what mezzo does about it.

A fresh interpreter for each format that may die, what it answered and where that is kept, and the decision. Which
precision an op gets is not decided here: that is :class:`mezzo.Policy`'s.
"""

from mezzo.cast.device.decide import Action, Choice, arithmetic, fast_format, intended, probe
from mezzo.cast.device.probing import (
    ISA_LIMIT,
    ISA_VARIABLE,
    DeviceReport,
    FormatSupport,
    Kinds,
    default_kinds,
    devices,
    isa_setting,
    processor,
)

__all__ = ["ISA_LIMIT", "ISA_VARIABLE", "Action", "Choice", "DeviceReport", "FormatSupport", "Kinds", "arithmetic"]
__all__ += ["default_kinds", "devices", "fast_format", "intended", "isa_setting", "probe", "processor"]
