"""Prints its arguments, and trains nothing."""

import sys

print(__name__, sys.argv[1:], sys.path[0] == __file__.rpartition("/")[0])
