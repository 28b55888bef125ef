"""Set-up that must happen before torch is imported."""

import os
import tempfile
from pathlib import Path

# On some virtual machines oneDNN's AMX path dies with an illegal instruction on BF16 products. The
# library protects its users by itself; the tests must not depend on that when they test something else.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# The device probe's cache: shared by the workers of a run, apart from the user's own.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"mezzo-tests-{os.getuid()}")

import torch
from hypothesis import settings

if torch.backends.mkldnn.is_available():
    torch.ops.mkldnn._is_mkldnn_bf16_supported()  # oneDNN reads its limit here, whatever a test does to the environment

settings.register_profile("mezzo", deadline=None)  # time says nothing on a shared machine
settings.load_profile("mezzo")
