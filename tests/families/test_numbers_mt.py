"""numbers_mt: the sentences and their split, what the models may see, greedy decoding, and the two scores."""

import math

import pytest
import torch


@pytest.fixture(scope="module")
def script(load_family):
    return load_family("numbers_mt")


@pytest.fixture(scope="module")
def sentences(script):
    return script.load()


@pytest.fixture
def model(script):
    torch.manual_seed(0)
    return script.Translator(40, 32).eval()


def test_held_out_numbers_are_not_trained_on(sentences):
    assert [len(side) for side in sentences] == [800, 800, 200, 200]
    for train, held_out in (sentences[::2], sentences[1::2]):
        assert len(set(train)) == 800
        assert len({*train, *held_out}) == 1000


def test_each_word_of_the_test_is_known_and_each_translation_fits(script, sentences):
    for train, held_out in (sentences[::2], sentences[1::2]):
        words = script.vocabulary(train)
        assert {word for sentence in held_out for word in sentence.split()} <= set(words)
        assert len(words) == len(set(words))
        assert len(words) % 8 == 0
    assert max(len(sentence.split()) + 1 for sentence in sentences[1] + sentences[3]) <= script.LONGEST


def test_encoding_by_hand_and_back(script):
    words = script.vocabulary(["b a", "c"])
    assert words[:6] == ["<pad>", "<start>", "<end>", "a", "b", "c"]
    rows = script.encode(["b a", "c", "a b c"], words)
    assert rows.tolist() == [[4, 3, 2, 0], [5, 2, 0, 0], [3, 4, 5, 2]]
    assert script.decode(rows, words) == ["b a", "c", "a b c"]


def test_greedy_decoding_agrees_with_writing_each_sentence_anew(script, model):
    """The slow way: no state is carried, each word is chosen after all words before it."""
    model.head.weight.data *= 20.0  # an untrained model's choices are close: spread them
    source = torch.randint(3, 30, (3, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        translations = model.translate(source)
        for row, sentence in zip(translations, source, strict=True):
            written = [script.START]
            for _ in range(script.LONGEST):
                written.append(int(model(sentence[None], torch.tensor([written]))[0, -1].argmax()))
            assert row.tolist() == written[1:]
    assert len(translations.unique()) > 2


def test_bleu_of_a_corpus_by_hand(script):
    written, wanted = ["cent vingt et un", "deux cent mille six"], ["cent vingt et un", "deux cent mille dix sept"]
    # shared of found: 7 of 8 words, 5 of 6 pairs, 3 of 4 triples, 1 of 2 fours; 8 words for 9
    hand = 100 * math.exp(1 - 9 / 8) * (7 / 8 * 5 / 6 * 3 / 4 * 1 / 2) ** 0.25
    assert script.judge(written, wanted)[0] == pytest.approx(hand, abs=1e-6)
