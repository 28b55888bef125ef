"""The op table and the names under which it is asked.

*The* place where ops are classified, in four parts: what other systems' lists say
(:mod:`mezzo.policy.ops.lists`), what mezzo makes of them (:mod:`mezzo.policy.ops.table`), the synonyms
(:mod:`mezzo.policy.ops.aliases`), and how a spelling finds its row (:mod:`mezzo.policy.ops.names`).
"""

from mezzo.policy.ops.names import (
    System,
    callables,
    functions,
    is_in_place,
    matching,
    out_of_place,
    resolve,
    written_form,
)
from mezzo.policy.ops.table import NORMS, OPS, TREATMENTS, VIEWS, Op, Reason, Treatment

__all__ = [
    "NORMS", "OPS", "TREATMENTS", "VIEWS", "Op", "Reason", "System", "Treatment", "callables", "functions",
    "is_in_place", "matching", "out_of_place", "resolve", "written_form",
]  # fmt: skip
