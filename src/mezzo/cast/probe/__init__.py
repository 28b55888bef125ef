"""How ``mezzo.cast.device`` finds out what a device can do.

Children that may die, a trial in a forked copy, the values they report, and the cache of reports. Nothing here
decides what a policy does; nothing outside ``device.py`` and ``mezzo doctor`` imports it.
"""
