"""From a comparison's runs to a verdict, a table, a picture and a page; and histograms of recorded numbers.

Nothing here runs a script, and nothing here prints.
"""

from mezzo.report.page import draw_curves, require_report, write_page
from mezzo.report.verdict import OperandRow, PolicyRow, operand_rows, rows, table, verdict

__all__ = [
    "OperandRow",
    "PolicyRow",
    "draw_curves",
    "operand_rows",
    "require_report",
    "rows",
    "table",
    "verdict",
    "write_page",
]
