"""What this device can really do, found out once, and what mezzo does about it.

Children that may die, a trial in a forked copy, the values they report, the cache of reports, and the decision. Which
precision an op gets is not decided here: that is :class:`mezzo.Policy`'s.
"""

from mezzo.cast.device.child import ISA_VARIABLE
from mezzo.cast.device.decide import Action, Choice, arithmetic, fast_format, intended, probe
from mezzo.cast.device.kinds import Kinds, default_kinds, devices
from mezzo.cast.device.probing import ISA_LIMIT, isa_setting, processor
from mezzo.cast.device.report import DeviceReport, FormatSupport

__all__ = ["ISA_LIMIT", "ISA_VARIABLE", "Action", "Choice", "DeviceReport", "FormatSupport", "Kinds", "arithmetic"]
__all__ += ["default_kinds", "devices", "fast_format", "intended", "isa_setting", "probe", "processor"]
