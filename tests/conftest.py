"""Set-up that must happen before torch is imported."""

import os

# On some virtual machines oneDNN's AMX path dies with an illegal instruction on BF16 products. The
# library protects its users by itself; the tests must not depend on that when they test something else.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
