"""The op table and the names under which it is asked.

*The* place where ops are classified, in four parts: what other systems' lists say
(:mod:`mezzo.policy.lists`), what mezzo makes of them (:mod:`mezzo.policy.table`), the synonyms
(:mod:`mezzo.policy.aliases`), and how a spelling finds its row (:mod:`mezzo.policy.names`).
"""

from mezzo.policy.names import System, callables, functions, is_in_place, matching, out_of_place, resolve, written_form
from mezzo.policy.table import NORMS, OPS, TREATMENTS, VIEWS, Op, Reason, Treatment

__all__ = [
    "NORMS",
    "OPS",
    "TREATMENTS",
    "VIEWS",
    "Op",
    "Reason",
    "System",
    "Treatment",
    "callables",
    "functions",
    "is_in_place",
    "matching",
    "out_of_place",
    "resolve",
    "written_form",
]
