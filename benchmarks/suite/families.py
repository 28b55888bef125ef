"""Which scripts the suite runs, under what, and what the paper says of each."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SEEDS: Final = 3
POLICIES: Final = "O1,fp16; O2,fp16; O1,bf16; O2,bf16"
#: Steps from one whose numbers are recorded to the next.
EVERY: Final = 25


@dataclass(frozen=True, kw_only=True)
class Family:
    """One script, and what stands beside its figures.

    Attributes:
        name: What its results are called.
        title: What it is, in words.
        script: Its file in ``examples/families``.
        arguments: Its own.
        paper: What the paper found.
    """

    name: str
    title: str
    script: str
    arguments: tuple[str, ...] = ()
    paper: str

    @property
    def path(self) -> Path:
        """The script, from where the repository is."""
        return Path("examples") / "families" / self.script

    @property
    def margin(self) -> str:
        """What its docstring says is equal, in its metric's unit."""
        docstring = ast.get_docstring(ast.parse((ROOT / self.path).read_text())) or ""
        found = re.search(r"^Margin: ([\d.]+) ", docstring, re.MULTILINE)
        if found is None:
            raise SystemExit(f"{self.path} states no margin")
        return found[1]


#: In the order of the paper's results: https://arxiv.org/abs/1710.03740, section 4.
FAMILIES: Final = (
    Family(
        name="digits_cnn",
        title="Image classification",
        script="digits_cnn.py",
        paper="ImageNet, top-1 accuracy: ResNet-50 75.92 % in FP32 and 76.04 % in FP16, Inception v3 73.85 and 74.13, "
        "AlexNet 56.77 and 56.93; none of them needed a loss scale.",
    ),
    Family(
        name="digits_ssd",
        title="Detection",
        script="digits_ssd.py",
        paper="Pascal VOC, mAP: SSD 76.9 % in FP32, divergence in FP16 without a loss scale, 77.1 at a scale of 8; "
        "Faster R-CNN 69.1, 68.6 without and 69.7 with one.",
    ),
    Family(
        name="digits_ctc",
        title="Speech recognition",
        script="digits_ctc.py",
        paper="DeepSpeech 2, character error rate: English 2.20 % in FP32 and 1.99 % in FP16, Mandarin 15.82, 15.01.",
    ),
    Family(
        name="numbers_mt",
        title="Machine translation",
        script="numbers_mt.py",
        paper="English to French with LSTMs: curves of FP16 with a loss scale lie on those of FP32.",
    ),
    Family(
        name="docs_lm_lstm",
        title="Language modelling, LSTM",
        script="docs_lm.py",
        arguments=("--lstm",),
        paper="bigLSTM on the 1 Billion Word benchmark: as in FP32 at a loss scale of 128, divergence late in training "
        "without one; a curve, no table.",
    ),
    Family(
        name="docs_lm",
        title="Language modelling, GPT",
        script="docs_lm.py",
        paper="Transformers are younger than the paper.",
    ),
    Family(
        name="digits_gan",
        title="Generation",
        script="digits_gan.py",
        paper="DCGAN on faces: judged by eye, alike in FP32 and in FP16 without a loss scale.",
    ),
)
