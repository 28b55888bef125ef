"""Which precision each op in each module gets, and why: one traced forward and backward pass.

Watches only: the policy decides, ``mezzo.cast`` carries it out. The answer in words, tables
and JSON are views of one value; printing is ``cli``'s.
"""

from mezzo.explanation.explaining import explain
from mezzo.explanation.explanation import Answer, Explanation
from mezzo.explanation.rows import Cast, Emulated, Finding, Misaligned, Product, Row

__all__ = ["Answer", "Cast", "Emulated", "Explanation", "Finding", "Misaligned", "Product", "Row", "explain"]
