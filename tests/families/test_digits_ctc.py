"""digits_ctc: strips of disjoint images, decoding, and the character error rate."""

import pytest
import torch


@pytest.fixture(scope="module")
def script(load_family):
    return load_family("digits_ctc")


def test_error_rate_weighs_digits_not_strips(script):
    # one replaced of three, one left out and one put in of seven: 3 errors in 10 digits
    assert script.error_rate([[1, 2, 9], [2, 3, 4, 5, 6, 7, 8]], [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7]]) == pytest.approx(
        30
    )
    assert script.error_rate([[], [1, 2, 3]], [[4, 4], [1, 2]]) == pytest.approx(75)


@pytest.mark.parametrize(
    "columns, digits",
    [
        ([10, 10, 10], []),
        ([3, 3, 3], [3]),
        ([3, 10, 3], [3, 3]),
        ([10, 1, 1, 2, 10, 10, 2, 1], [1, 2, 2, 1]),
        ([0, 0, 10, 9], [0, 9]),
    ],
)
def test_decoding_merges_repeats_before_it_leaves_out_blanks(script, columns, digits):
    scores = torch.nn.functional.one_hot(torch.tensor(columns), 11).float()[:, None]  # (columns, 1, 11)
    assert script.decode(scores.repeat(1, 2, 1)) == [digits, digits]


def test_a_strip_shows_the_digits_of_its_text_from_left_to_right(script):
    images = torch.arange(1.0, 11.0).view(10, 1, 1).expand(10, 8, 8)  # a digit's pixels are its label + 1
    generator = torch.Generator().manual_seed(0)
    strips, texts = script.draw_strips(images, torch.arange(10), 200, generator)
    assert strips.shape == (200, 1, 12, 72)
    assert {len(text) for text in texts} == {3, 4, 5, 6, 7}
    for strip, text in zip(strips, texts, strict=True):
        assert strip.sum() == 64 * sum(digit + 1 for digit in text)  # whole, none over another
        columns = strip[0].amax(0)
        seen = columns[columns > 0].view(-1, 8)
        assert seen.tolist() == [[digit + 1.0] * 8 for digit in text]


def test_the_loss_is_the_sum_over_all_alignments(script):
    scores = torch.randn(3, 1, 11, generator=torch.Generator().manual_seed(0))
    shares = scores.double().softmax(2)[:, 0]
    b, one, two = shares[:, 10], shares[:, 1], shares[:, 2]
    ways = (one[0] * two[1] * two[2] + one[0] * one[1] * two[2] + b[0] * one[1] * two[2]
            + one[0] * b[1] * two[2] + one[0] * two[1] * b[2])  # fmt: skip
    # the mean is over strips, each divided by its number of digits
    assert script.ctc_loss(scores, [[1, 2]]).item() == pytest.approx(-ways.log().item() / 2, rel=1e-5)
