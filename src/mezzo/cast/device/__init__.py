"""What this device can really do, found out once, and what mezzo does about it.

A fresh interpreter for each format that may die, what it answered and where that is kept, what the device says of
itself, and the decision. Which precision an op gets is not decided here: that is :class:`mezzo.Policy`'s.
"""

from mezzo.cast.device.child import FAMILIES, Family
from mezzo.cast.device.claims import Claim
from mezzo.cast.device.decide import (
    Action,
    Choice,
    arithmetic,
    emulated_families,
    fast_format,
    intended,
    is_right,
    probe,
    usual_policy,
)
from mezzo.cast.device.probing import (
    ISA_LIMIT,
    ISA_VARIABLE,
    KNOWN_DEVICE_TYPES,
    DeviceReport,
    FamilySupport,
    FormatSupport,
    default_device_types,
    devices,
    isa_setting,
    processor,
)

__all__ = [
    "FAMILIES",
    "ISA_LIMIT",
    "ISA_VARIABLE",
    "KNOWN_DEVICE_TYPES",
    "Action",
    "Choice",
    "Claim",
    "DeviceReport",
    "Family",
    "FamilySupport",
]
__all__ += ["FormatSupport", "arithmetic", "default_device_types", "devices", "emulated_families", "fast_format"]
__all__ += ["intended", "is_right", "isa_setting", "probe", "processor", "usual_policy"]
