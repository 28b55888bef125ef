"""What this device can really do, found out once, and what mezzo does about it.

Children that may die, a trial in a forked copy, the values they report, the cache of reports, and the decision. Which
precision an op gets is not decided here: that is :class:`mezzo.Policy`'s.
"""
