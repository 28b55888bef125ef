"""What strangers print at the end of a training, and the number that it is judged by."""

import math

import pytest

from mezzo.errors import PolicyError
from mezzo.script.metric import better_of, number_after, printed_last

from ..support.refusals import refused

#: A last line, and what a reader says of it: the metric's words, its number, its unit.
LAST = [
    ("test accuracy 99.33 %", "test accuracy", 99.33, "%"),
    ("test accuracy = 99.33%.", "test accuracy", 99.33, "%"),
    ("Final test accuracy is 0.93!", "Final test accuracy", 0.93, ""),
    ("test loss 1.5e-03", "test loss", 0.0015, ""),
    ("loss .25", "loss", 0.25, ""),
    ("log-likelihood -1,234.5 nats", "log-likelihood", -1234.5, "nats"),
    ("elbo −103.2", "elbo", -103.2, ""),
    ("validation loss nan", "validation loss", math.nan, ""),
    ("perplexity: Infinity", "perplexity", math.inf, ""),
    ("bpc 1.23 bits/char", "bpc", 1.23, "bits/char"),
    ("test loss 2.134 nats per byte", "test loss", 2.134, "nats per byte"),
    ("test: 99.33 % accuracy, loss 0.3", "loss", 0.3, ""),
    # several on one line
    ("acc 0.9 loss NaN", "loss", math.nan, ""),
    ("epoch 3/10 - loss: 0.5 - acc: 0.9", "acc", 0.9, ""),
    ("Epoch 10: test accuracy: 0.99", "test accuracy", 0.99, ""),
    ("Epoch [10/10], Loss: 0.1234, Acc: 97.50%", "Acc", 97.5, "%"),
    ("loss 0.3 acc 0.9", "acc", 0.9, ""),
    (" * Acc@1 75.210 Acc@5 92.300", "Acc@5", 92.3, ""),
    ("mAP@0.5: 0.61", "mAP@0.5", 0.61, ""),
    # remarks, spreads, counts
    ("best val acc: 99.1% (epoch 7)", "best val acc", 99.1, "%"),
    ("test accuracy 99.3 ± 0.2 %", "test accuracy", 99.3, ""),
    ("Test set: Average loss: 0.0285, Accuracy: 9911/10000 (99%)", "Accuracy", 9911.0, "/10000"),
    (
        "Accuracy of the network on the 10000 test images: 55 %",
        "Accuracy of the network on the 10000 test images",
        55.0,
        "%",
    ),
    ("best accuracy at epoch 7: 99.1", "best accuracy at epoch 7", 99.1, ""),
    ("error (CER) 3.4 %", "error (CER)", 3.4, "%"),
    ("test accuracy: 0.99, took 12.3 s", "test accuracy", 0.99, ""),
    ("accuracy 0.99 in 12.3s", "accuracy", 0.99, ""),
    # as programs write it
    ('{"epoch": 3, "acc": 0.99}', "acc", 0.99, ""),
    ("{'acc': np.float64(0.93)}", "acc", 0.93, ""),
    ("test accuracy tensor(0.9933, device='cuda:0', dtype=torch.float64)", "test accuracy", 0.9933, ""),
    ("| test accuracy | 99.33 |", "test accuracy", 99.33, ""),
    ("test accuracy ........ 99.33%", "test accuracy", 99.33, "%"),
    ("2026-11-24 20:01:22 INFO acc=0.93", "acc", 0.93, ""),
    ("2026-11-24 20:01:22,123 - train - INFO - acc: 0.93", "acc", 0.93, ""),
    ("\x1b[1;32mtest accuracy\x1b[0m: \x1b[1m99.33\x1b[0m %", "test accuracy", 99.33, "%"),
    ("✅ Genauigkeit der Prüfung: 99.33 %", "Genauigkeit der Prüfung", 99.33, "%"),
    ("10%|█   | 1/10\r100%|████| 10/10\rtest accuracy 0.93", "test accuracy", 0.93, ""),
]


def test_a_last_line_is_read_as_a_reader_reads_it():
    for line, words, value, unit in LAST:
        last = printed_last(f"epoch 1\ntest loss 7\n{line}\n\n  \n")
        assert last == (words, pytest.approx(value, nan_ok=True), unit), line
        behind = number_after(words, f"{words}: 77\n{line}\ndone\n")
        assert behind[0] == pytest.approx(value, nan_ok=True), line


def test_other_last_lines_are_no_metric():
    for text in (
        "",
        "\n \n",
        "done",
        "test accuracy",
        "test accuracy 99.33 %\ndone in 12.3 s",
        "total time: 12.3s",
        "took 0:01:23",
        "saved to model_2.pt",
        "3.2",
        "(0.93, 0.2)",
        "acc, loss = 0.93, 0.2",
        "torch 2.13.0",
        "accuracy 99,33 %",  # a decimal comma, or two numbers
        "100%|██████████| 10/10 [00:12<00:00]",
        "==========",
    ):
        assert printed_last(text) is None, text


def test_the_last_number_behind_words():
    for words, text, value, unit in (
        ("test accuracy", "test accuracy 98 %\nTEST ACCURACY: 99.1 %\ndone", 99.1, "%"),
        ("test accuracy", "test_accuracy=0.93, test_loss=0.1", 0.93, ""),
        ("test-accuracy", "Test  Accuracy 0.93", 0.93, ""),
        ("acc", "acc 0.9 loss 0.3", 0.9, ""),
        ("acc", "val_acc=0.93\naccumulated 4 batches", 0.93, ""),
        ("accu", "accuracy 0.93\n", 0.93, ""),  # a part of a word, where there is no such word
        ("acc", "acc: 0.9\nacc: n/a, loss: 0.3", 0.9, ""),
        ("acc", "acc (epoch 7): 0.99", 0.99, ""),
        ("accuracy", "Accuracy of the network on the 10000 test images: 55 %\ndone", 55.0, "%"),
        ("accuracy", "Accuracy: 9911/10000 (99%)\ndone", 9911.0, "/10000"),
        ("test accuracy:", "test accuracy:0.93", 0.93, ""),
        ("acc", "\x1b[32macc\x1b[0m 0.93\r\nx", 0.93, ""),
        ("loss", "loss nan\ninfo", math.nan, ""),
        ("loss", "loss: tensor(0.25, grad_fn=<MeanBackward0>)\n", 0.25, ""),
        ("İoU", "İİİİ İoU 0.5\n", 0.5, ""),  # whose lower case is longer
        ("best accuracy at epoch 7", "best accuracy at epoch 7: 1\nbest accuracy at epoch 9: 99.3", 99.3, ""),
        ("a+b (c)", "a+b (c) 3", 3.0, ""),
    ):
        assert number_after(words, text) == (pytest.approx(value, nan_ok=True), unit), text
    for text in ("", "loss 0.3", "accuracy\n0.93", "accuracy 99,33 %", "accuracy model_2.pt"):
        assert number_after("accuracy", text) is None, text


def test_words_say_what_is_better():
    for better, names in (
        (
            "higher",
            "accuracy|test_acc|Acc@1|val/acc|TestAccuracy|mAP@0.5|BLEU-4|F1|exact matches|mean IoU|AUC|mean reward"
            "|log-likelihood|ELBO|negative MSE|neg_mean_squared_error|R²|success rate",
        ),
        (
            "lower",
            "loss|val_loss|valloss|character error rate|CER|perplexity|bits per character|Fréchet distance|FID|RMSE"
            "|accuracy loss|negative log-likelihood|NLL|MAE",
        ),
    ):
        assert {name: better_of(name) for name in names.split("|")} == dict.fromkeys(names.split("|"), better)
    for name in ("epoch", "learning rate", "time", "bitmap", "", "Genauigkeit"):
        with refused(PolicyError, "is a higher or a lower", "--better higher, or --better lower"):
            better_of(name)
