"""Cast placement: which ops run in low precision, so that the casts between them cost least.

The placement is pure (``cut.py``), and so is what other systems do, to be compared with (``heuristics.py``): neither
knows torch. Nothing here changes what precision an op gets: ``mezzo.cast`` does.
"""
