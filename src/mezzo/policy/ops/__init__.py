"""The op table and the names under which it is asked.

*The* place where ops are classified: what other systems' lists and names say and what mezzo makes of them
(:mod:`mezzo.policy.ops.table`), and how a spelling finds its row (:mod:`mezzo.policy.ops.names`).
"""

from mezzo.policy.ops.names import (
    callables,
    functions,
    in_place_forms,
    is_in_place,
    matching,
    out_of_place,
    resolve,
    written_form,
)
from mezzo.policy.ops.table import (
    MOVES,
    NORMS,
    OPS,
    QUANTISABLE,
    QUANTISED,
    TREATMENTS,
    VIEWS,
    Op,
    Reason,
    Treatment,
    named_for,
)

__all__ = [
    "MOVES", "NORMS", "OPS", "QUANTISABLE", "QUANTISED", "TREATMENTS", "VIEWS", "Op", "Reason", "Treatment",
    "callables", "functions", "in_place_forms", "is_in_place", "matching", "named_for", "out_of_place", "resolve",
    "written_form",
]  # fmt: skip
