"""The number that a script is judged by: what it prints in words, a number and a unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from mezzo.errors import PolicyError

Better = Literal["higher", "lower"]

_DIGITS: Final = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?(?![\d,])|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
#: A number that stands by itself: not one in ``top-1``, ``mAP@0.5``, ``model_2.pt``, ``3/10`` or ``99,33``.
_NUMBER: Final = re.compile(
    rf"(?<![\w.@/-])(?<!\d,)([-+]?(?:{_DIGITS}|(?:inf(?:inity)?|nan)\b))(?!\d|[.,]\d)", re.IGNORECASE
)
_WORD: Final = r"[^\W\d_][^\s\d,;|()\[\]{}]*"
#: What stands behind a number at once: its unit, or of how many it is.
_UNIT: Final = re.compile(rf"\s*(%|/\s*\d+)|({_WORD})|\s+({_WORD}(?:\s+{_WORD}){{0,2}})[\s.)\]}}]*$")
#: All that may stand behind the last number of a line: a unit, a spread, a remark in brackets, what closes the line.
_END: Final = re.compile(
    r"(?:\s*(?:%|/\s*\d+|(?!(?:nan|inf)\b)[^\W\d_][^\s\d()\[\]]*))?(?:\s+(?!(?:nan|inf)\b)[^\W\d_]+){0,2}"
    rf"(?:\s*(?:±|\+/?-)\s*{_DIGITS}\s*%?)?(?:\s*[(\[][^()\[\]]*[)\]])?[\s\"'\])}}|.,;!*]*",
    re.IGNORECASE,
)
#: How long something took, at the end of a line.
_TIME: Final = re.compile(
    rf"[\s,;|(\[-]*(?:\b(?:in|after|took|time|elapsed)\b)?[\s:=]*(?<![\w.]){_DIGITS}\s*"
    r"(?:s|secs?|seconds?|ms|mins?|minutes?|h|hours?)[\s)\].]*$",
    re.IGNORECASE,
)
#: What terminals do not show, and numbers as torch and NumPy write them.
_COLOUR: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_WRAPPED: Final = re.compile(rf"\b(?:tensor|array|(?:np|numpy)\.\w+)\(\s*([-+]?(?:{_DIGITS}|inf|nan))[^()]*\)")
#: What parts the metrics of one line, and what a log writes in front.
_BETWEEN: Final = re.compile(r",(?!\d{3})|[;|\t\]{}]|\s[-–—•·]+\s")
_FRONT: Final = re.compile(r"^\W*(?:INFO|DEBUG|WARNING)\b")
_BEHIND: Final = re.compile(r"(?:[\s:=~≈>→.(\[\"'*-]|\b(?:is|was|of)$)+$", re.IGNORECASE)

#: Words of metrics, by the direction in which they are better.
_WORDS: Final[dict[Better, frozenset[str]]] = {
    "higher": frozenset(
        "accuracy acc acc1 acc5 top1 top5 bleu chrf rouge meteor map ap ap50 precision recall f1 auc auroc score match "
        "matches em iou miou dice psnr ssim snr sdr r2 r² reward return correct correlation likelihood elbo mrr ndcg "
        "kappa mcc success wins similarity".split()
    ),
    "lower": frozenset(
        "loss losses error errors err perplexity ppl distance fid kid lpips mse mae rmse mape wer cer ter bpc bpb bits "
        "nats nll bce xent kl cost regret residual ece brier entropy divergence".split()
    ),
}
#: Those that end longer words, too: ``valloss``, ``TestAccuracy``.
_ENDINGS: Final = ("accuracy", "acc", "score", "reward", "loss", "error", "perplexity")


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


def last_line(text: str) -> str:
    """Return the last line of what a script printed that is not empty."""
    return next((line for line in reversed(_lines(text)) if line), "")


def printed_last(text: str) -> tuple[str, float, str] | None:
    r"""Read the metric off a script's last line; of several on that line it is the last.

    Args:
        text: What the script printed.

    Returns:
        Words, number and unit; ``None`` where the last line that is not empty has another form, or says a time.

    Example:
        >>> printed_last("epoch 1\ntest accuracy 99.33 %\n")
        ('test accuracy', 99.33, '%')
        >>> printed_last("Average loss: 0.0285, Accuracy: 9911/10000 (99%)")
        ('Accuracy', 9911.0, '/10000')
    """
    line = _TIME.sub("", last_line(text))
    for match in _NUMBER.finditer(line):
        if _END.fullmatch(line, match.end()) and (name := _name(line[: match.start()])):
            return name, _value(match[1]), _unit(line, match.end())
    return None


def number_after(words: str, text: str) -> tuple[float, str] | None:
    r"""Return the last number that stands behind some words on one line, and what follows it at once.

    Args:
        words: Upper and lower case are one, as are blanks, hyphens and underscores between words.
        text: What the script printed.

    Example:
        >>> number_after("test accuracy", "test accuracy: 98 %\ntest accuracy: 99.1 %\ndone\n")
        (99.1, '%')
    """
    last = printed_last(text)
    # "best accuracy at epoch 7" in one run is "best accuracy at epoch 8" in another.
    if last is not None and _normalised(last[0]) == _normalised(words):
        return last[1], last[2]
    sought, lines = r"[\s_-]+".join(map(re.escape, words.split())), _lines(text)
    word_end = "" if re.search(r"\W$", words.strip()) else r"(?![^\W_])"
    for pattern in (rf"(?<![^\W_]){sought}{word_end}", sought):  # whole words before parts of words
        for line in reversed(lines):
            for end in reversed([match.end() for match in re.finditer(pattern, line, re.IGNORECASE)]):
                if number := _first(line, end):
                    return _value(number[1]), _unit(line, number.end())
    return None


def better_of(name: str) -> Better:
    """Return in which direction a metric is better, by its words.

    Raises:
        PolicyError: Its words do not say.

    Example:
        >>> better_of("test accuracy"), better_of("character error rate")
        ('higher', 'lower')
    """
    if (direction := _direction(name)) is not None:
        return direction
    raise PolicyError(
        f"is a higher or a lower {name!r} better?",
        why="its words do not say",
        write="--better higher, or --better lower",
    )


def _direction(name: str) -> Better | None:
    words = re.findall(r"[^\W_]+", name.lower())
    flipped: dict[Better, Better] = {"higher": "lower", "lower": "higher"}
    for word in reversed(words):  # the noun is behind: "accuracy loss" is a loss
        parts = {word, *(ending for ending in _ENDINGS if word.endswith(ending))}
        for better, metric_words in _WORDS.items():
            if parts & metric_words:
                return flipped[better] if {"negative", "neg"} & set(words) else better
    return None


def _lines(text: str) -> list[str]:
    """Return the lines as they were seen, each state of a progress bar as one of its own."""
    plain = _WRAPPED.sub(r"\1", _COLOUR.sub("", text).replace("−", "-"))
    return [line.strip() for line in re.split(r"[\r\n\b\v\f]+", plain)]


def _name(before: str) -> str:
    """Return the words of the number that comes next; empty where there are none.

    Numbers part the metrics of a line, but belong to its words where only a colon says which number is meant:
    ``accuracy on the 10000 test images: 55 %``.
    """
    is_marked = re.search(r"[:=]\W*$|\b(?:is|was)\s*$", before) is not None
    parts = [_BEHIND.sub("", part) for part in _BETWEEN.split(before)]
    part = next((part for part in reversed(parts) if re.search(r"\w", part)), "")
    chunk = _clean(re.split(r"[:=]", part)[-1])
    piece = _clean(_NUMBER.split(chunk)[-1])
    if is_marked and _direction(piece) is None and _direction(chunk) is not None:
        return chunk
    return piece


def _clean(words: str) -> str:
    words = re.sub(r"^\W+|\W+$", "", _BEHIND.sub("", _FRONT.sub("", words)))
    words += ")" * (words.count("(") - words.count(")"))
    return words if re.search(r"[^\W\d_]", words) else ""


def _normalised(words: str) -> str:
    return " ".join(re.split(r"[\s_-]+", re.sub(r"(?<=\s)\d+\b", "0", words.strip().lower())))


def _first(line: str, start: int) -> re.Match[str] | None:
    """Return the number that some words mean which end here: at once, else behind a colon, else the first."""
    matches = list(_NUMBER.finditer(line, start))
    if not matches or re.search(r"[,;|].*[^\W\d_]", line[start : matches[0].start()]):  # that is another metric's
        return None
    if not re.search(r"[^\W\d_]", line[start : matches[0].start()]):
        return matches[0]
    marked = (match for match in matches if re.search(r"[:=]\s*$|\b(?:is|was)\s+$", line[start : match.start()]))
    return next(marked, matches[0])


def _unit(line: str, start: int) -> str:
    match = _UNIT.match(line, start)
    return "" if match is None else re.sub(r"/\s+", "/", next(filter(None, match.groups()))).rstrip(".,;!\"'")


def _value(text: str) -> float:
    return float(text.replace(",", ""))
