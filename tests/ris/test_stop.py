"""Answers end where they should, whatever pieces their text comes in, and nothing is shown that is cut off later."""

import collections
import itertools

import numpy as np
import pytest

from ris_jax.stop import INSTRUCTIONS, StopStrings, TopicStop, correlation, filter_all, flush_all


def run(filters, text, size):
    """What is shown of a text that comes in pieces of `size` characters."""
    shown = "".join(filter_all(filters, text[i : i + size]) for i in range(0, len(text), size))
    return shown + flush_all(filters)


SIZES = (1, 2, 3, 7, 1000)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("strings", "text", "shown"),
    [
        (["###"], "one ## two ### three", "one ## two "),
        (["END"], "EEND", "E"),
        (["aab"], "aaaab!", "aa"),
        (["abcabd"], "abcabcabd", "abc"),
        (["ab", "b"], "xab", "x"),
        (["nd of", "end"], "the end of", "the "),
        (["\n\nUser:", "é"], "caf\né\n\nUser:", "caf\n"),
        (["zz"], "nothing to cut z", "nothing to cut z"),
        ([], "all of it", "all of it"),
        (["all"], "all", ""),
    ],
)
def test_stop_strings(strings, text, shown, size):
    stop = StopStrings(strings)
    assert run([stop], text, size) == shown
    assert (stop.stopped is None) == (shown == text)


def test_stop_strings_show_as_early_as_they_can():
    stop = StopStrings(["###", "END"])
    assert [stop.push(piece) for piece in ("a#", "b##", "c", "E", "N", "E", "ND", "x")] == [
        "a", "#b", "##c", "", "", "EN", "", "",
    ]  # fmt: skip
    assert stop.stopped == "stop string 'END'" and stop.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop string is empty"):
        StopStrings(["a", ""])


HARBOUR = [
    f"The harbour master counted vessels number {word}." for word in ("one", "two", "three", "four", "five", "six")
]
OFF = " Bananas ripen quicker beside apples."
ON = " The harbour master counted vessels again."


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("First. Second.\n# Section\nmore", "First. Second.\n"),
        ("First.\n  ## Section", "First.\n"),
        ("Issue #12 is closed. #hashtag too.", "Issue #12 is closed. #hashtag too."),
        ("Fine. Sorry, As an AI Language Model I cannot", "Fine."),
        ("no end of a sentence", "no end of a sentence"),
        ("", ""),
    ],
)
def test_headings_and_instructions_end_an_answer(text, shown, size):
    assert run([TopicStop("What?")], text, size) == shown


@pytest.mark.parametrize("size", SIZES)
def test_leaving_the_subject_ends_an_answer(size):
    text = " ".join(HARBOUR) + ON + OFF + ON
    stop = TopicStop("What did the harbour master do?", opening=6)
    assert run([stop], text, size) == " ".join(HARBOUR) + ON
    assert stop.stopped == "the answer left its subject"
    assert run([TopicStop("What did the harbour master do?", opening=8)], text, size) == text
    assert run([TopicStop("What did the harbour master do?", opening=6, threshold=-1)], text, size) == text


def test_numbers_and_short_words_do_not_count_as_leaving():
    text = " ".join(HARBOUR) + " In all 3.14 of it. So: no."
    assert run([TopicStop("harbour", opening=6)], text, 3) == text


def test_the_instructions_are_written_as_they_are_compared():
    assert all(phrase == phrase.lower() and phrase.strip() == phrase for phrase in INSTRUCTIONS)


def test_correlation_is_pearson():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = (collections.Counter({w: int(n) for w, n in zip("abcdefgh", rng.integers(0, 4, 8)) if n}) for _ in "ab")
        union = sorted(a.keys() | b.keys())
        x, y = ([counts[word] for word in union] for counts in (a, b))
        expected = np.corrcoef(x, y)[0, 1] if np.std(x) and np.std(y) else 0.0
        np.testing.assert_allclose(correlation(a, b), expected, rtol=0, atol=1e-12)
    assert correlation(collections.Counter("abc"), collections.Counter("xyz")) == pytest.approx(-1)
    assert correlation(collections.Counter(), collections.Counter()) == 0


@pytest.mark.parametrize(
    ("arguments", "message"), [({"threshold": 1.5}, "within -1 … 1"), ({"opening": -1}, "at least 0")]
)
def test_bad_choices(arguments, message):
    with pytest.raises(ValueError, match=message):
        TopicStop("", **arguments)


@pytest.mark.parametrize("size", SIZES)
def test_filters_follow_one_another(size):
    for order in itertools.permutations(["strings", "topic"]):
        made = {"strings": StopStrings(["<end"]), "topic": TopicStop("x")}
        filters = [made[name] for name in order]
        assert run(filters, "One. Two <end of it.\n# Three", size) == "One. Two "
        assert made["strings"].stopped == "stop string '<end'" or order[0] == "topic"
