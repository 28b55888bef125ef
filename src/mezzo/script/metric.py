"""The number that a script is judged by: what it prints in words, a number and a unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from mezzo.errors import PolicyError

__all__ = ["TRAINING_LOSS", "Better", "Metric", "better_of", "number_after", "printed_last"]

Better = Literal["higher", "lower"]

_NUMBER: Final = r"[-+]?(?:\d[\d_,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|inf(?:inity)?\b|nan\b)"
#: Words, a number, and perhaps a unit: ``test accuracy 99.33 %``, ``loss: 0.25``.
_LAST: Final = re.compile(rf"^(.*[^\W\d_].*?)[\s:=]+({_NUMBER})(?:\s*([^\s\d]\S*))?\s*\.?$", re.IGNORECASE)
_BEHIND: Final = re.compile(rf"[^\d\n]*?(?<![\w.])({_NUMBER})[^\S\n]*(%|[^\W\d]\S*)?", re.IGNORECASE)
#: What a line ends with that says how long something took.
_TIMES: Final = frozenset("s sec secs second seconds ms min mins minute minutes h hour hours".split())

#: Words of metrics, by the direction in which they are better.
_WORDS: Final[dict[Better, frozenset[str]]] = {
    "higher": frozenset(
        "accuracy acc top1 top5 bleu rouge meteor map ap precision recall f1 auc auroc score matches match iou miou "
        "dice psnr ssim r2 reward return correct correlation likelihood".split()
    ),
    "lower": frozenset(
        "loss losses error errors err perplexity ppl distance fid mse mae rmse wer cer bpc bpb bits nats nll entropy "
        "divergence".split()
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What runs are judged by.

    Attributes:
        name: The words before the number.
        unit: What stands behind it, if anything.
        better: In which direction it is better.
    """

    name: str
    unit: str = ""
    better: Better


#: What is compared where a script prints no metric.
TRAINING_LOSS: Final = Metric(name="training loss", better="lower")


def printed_last(text: str) -> tuple[str, float, str] | None:
    r"""Read the metric off a script's last line.

    Args:
        text: What the script printed.

    Returns:
        Words, number and unit; ``None`` where the last line that is not empty has another form, or says a time.

    Example:
        >>> printed_last("epoch 1\ntest accuracy 99.33 %\n")
        ('test accuracy', 99.33, '%')
    """
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    found = _LAST.match(lines[-1]) if lines else None
    if found is None or (found[3] or "").rstrip(".").lower() in _TIMES:
        return None
    words = re.split(r"[,;|]\s*|:\s+", found[1].strip(" :=\t"))[-1]  # "epoch 3: val loss"
    return words, _number(found[2]), (found[3] or "").rstrip(".,;")


def number_after(words: str, text: str) -> tuple[float, str] | None:
    r"""Return the last number that stands behind some words on one line, and what follows it at once.

    Args:
        words: Upper and lower case are one.
        text: What the script printed.

    Example:
        >>> number_after("test accuracy", "test accuracy: 98 %\ntest accuracy: 99.1 %\ndone\n")
        (99.1, '%')
    """
    lowered, sought, place = text.lower(), words.strip().lower(), len(text)
    while (place := lowered.rfind(sought, 0, place)) >= 0:
        if found := _BEHIND.match(text, place + len(sought)):
            return _number(found[1]), found[2] or ""
    return None


def better_of(name: str) -> Better:
    """Say in which direction a metric is better, by its words.

    Raises:
        PolicyError: They do not say.

    Example:
        >>> better_of("test accuracy"), better_of("character error rate")
        ('higher', 'lower')
    """
    words = re.findall(r"[^\W_]+", name.lower())
    for word in reversed(words):  # the noun is behind: "accuracy loss" is a loss
        for better, known in _WORDS.items():
            if word in known:
                return better
    raise PolicyError(
        f"is a higher or a lower {name!r} better?",
        why="its words do not say",
        write="--better higher, or --better lower",
    )


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))
