"""Synthetic tasks: what is asked for is where the task says, and only there."""

import numpy as np
import pytest

from plga_jax.tokenizers import ByteTokenizer
from ris_jax import tasks

BYTES = ByteTokenizer()
FILLER = np.full(3000, BYTES.encode(".")[0], np.int32)


def find(context, piece) -> list[int]:
    windows = np.lib.stride_tricks.sliding_window_view(context, len(piece))
    return np.flatnonzero((windows == np.asarray(piece)).all(-1)).tolist()


def said(probe) -> str:
    return BYTES.decode(probe.prompt) + BYTES.decode(probe.answer)


def test_spread_gives_the_distances_of_the_protocol():
    assert tasks.spread(7168, 6, 96).tolist() == [645, 1839, 3033, 4227, 5421, 6615]


def test_copy_probes_stand_at_their_distance_and_leave_the_rest_alone():
    rng = np.random.default_rng(0)
    passages = rng.integers(1000, 2000, (6, 96))
    filler = rng.integers(0, 1000, 7168)
    distances = tasks.spread(7168, 6, 96)
    task = tasks.copy_probes(filler, passages, distances)
    assert task.context.shape == (7168,)
    for probe, passage in zip(task.probes, passages, strict=True):
        assert find(task.context, passage) == [7168 - probe.distance]
        np.testing.assert_array_equal(np.concatenate([probe.prompt, probe.answer]), passage)
        assert (len(probe.prompt), len(probe.answer)) == (16, 80)
    changed = task.context != filler
    assert changed.sum() == 6 * 96


@pytest.mark.parametrize("distance", [60, 1500, 3000])
def test_passkey_is_said_once_and_among_the_candidates(distance):
    task = tasks.passkey(BYTES.encode, FILLER, distance, seed=3)
    (probe,) = task.probes
    sentence = BYTES.encode(said(probe))
    assert find(task.context, sentence) == [3000 - distance]
    assert len(probe.candidates) == 16
    assert len({BYTES.decode(c) for c in probe.candidates}) == 16
    np.testing.assert_array_equal(probe.candidates[probe.correct], probe.answer)
    assert len(BYTES.decode(probe.answer).strip()) == 5


def test_seeds_decide_the_keys_and_where_the_right_one_stands():
    drawn = [tasks.passkey(BYTES.encode, FILLER, 1500, seed=seed).probes[0] for seed in range(12)]
    again = tasks.passkey(BYTES.encode, FILLER, 1500, seed=3).probes[0]
    np.testing.assert_array_equal(drawn[3].answer, again.answer)
    assert drawn[3].correct == again.correct
    assert len({said(probe) for probe in drawn}) == 12
    assert len({probe.correct for probe in drawn}) > 4


def test_key_table_says_each_name_once_with_its_key():
    task = tasks.key_table(BYTES.encode, FILLER, seed=1)
    assert len(task.probes) == 12
    assert [probe.distance for probe in task.probes] == sorted(probe.distance for probe in task.probes)
    for probe in task.probes:
        assert find(task.context, BYTES.encode(said(probe))) == [3000 - probe.distance]
        assert find(task.context, probe.prompt) == [3000 - probe.distance]
        assert {BYTES.decode(c) for c in probe.candidates} == {BYTES.decode(p.answer) for p in task.probes}


def test_one_key_of_a_table_can_be_asked_for():
    task = tasks.key_table(BYTES.encode, FILLER, keys=20, seed=1, asked=1)
    assert len(task.probes) == 1
    assert len(task.probes[0].candidates) == 20
    assert BYTES.decode(task.context).count("The key of") == 20


def test_two_hops_lead_to_the_answer_and_no_single_sentence_does():
    task = tasks.two_hop(BYTES.encode, FILLER, chains=5, seed=2)
    text = BYTES.decode(task.context)
    for probe in task.probes:
        name = BYTES.decode(probe.prompt).split()[-2]
        key = BYTES.decode(probe.answer).strip()
        place = text.split(f"The key of {name} is in the ")[1].split(".")[0]
        assert text.split(f"The key in the {place} is ")[1][:5] == key
        sentences = [s for s in text.split("\n") if name in s and key in s]
        assert not sentences
        first, second = (text.index(s) for s in (f"\nThe key of {name} ", f"\nThe key in the {place} "))
        assert probe.distance == 3000 - min(first, second)


def test_log_probs_read_the_rows_that_predict_the_answer():
    probe = tasks.passkey(BYTES.encode, FILLER, 100, seed=0).probes[0]
    inputs = probe.inputs()
    np.testing.assert_array_equal(inputs, np.concatenate([probe.prompt, probe.answer])[:-1])
    logits = np.random.default_rng(0).normal(size=(len(inputs), BYTES.vocab_size)).astype(np.float32)
    rows = logits[len(probe.prompt) - 1 :].astype(np.float64)
    wanted = np.log(np.exp(rows) / np.exp(rows).sum(-1, keepdims=True))[np.arange(len(rows)), probe.answer]
    # Float64 sums of 262 numbers in another order.
    np.testing.assert_allclose(tasks.log_probs(logits, probe.answer), wanted, rtol=1e-12)


def test_the_candidate_of_a_perfect_model_wins():
    probe = tasks.key_table(BYTES.encode, FILLER, seed=5).probes[4]
    scores = []
    for candidate in probe.candidates:
        inputs = probe.inputs(candidate)
        logits = np.zeros((len(inputs), BYTES.vocab_size))
        rows = np.arange(len(inputs) - len(probe.answer), len(inputs))
        logits[rows, probe.answer] = 9.0
        scores.append(tasks.log_probs(logits, candidate).mean())
    assert int(np.argmax(scores)) == probe.correct


def test_a_probe_without_candidates_has_no_place_among_them():
    task = tasks.copy_probes(np.zeros(50, int), [np.arange(20)], [30], prompt=4)
    with pytest.raises(ValueError, match="no candidates"):
        _ = task.probes[0].correct


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tasks.copy_probes(np.zeros(50, int), [np.arange(20)], [19]), "leaves the context of 50"),
        (lambda: tasks.copy_probes(np.zeros(50, int), [np.arange(20)], [51]), "leaves the context of 50"),
        (lambda: tasks.copy_probes(np.zeros(90, int), [np.arange(20)] * 2, [50, 31]), "overlap"),
        (lambda: tasks.copy_probes(np.zeros(50, int), [np.arange(16)], [30]), "prompt is 16"),
        (lambda: tasks.spread(100, 6, 17), "do not fit into 100"),
        (lambda: tasks.key_table(BYTES.encode, FILLER, keys=25, seed=0), "≤ 24"),
        (lambda: tasks.key_table(BYTES.encode, FILLER[:300], seed=0), "do not fit"),
        (lambda: tasks.two_hop(BYTES.encode, FILLER, chains=23, seed=0), "1 to 22"),
        (lambda: tasks.passkey(BYTES.encode, FILLER, 100, seed=0, choices=10, digits=1), "there are 9"),
        (lambda: tasks.log_probs(np.zeros((2, 5)), np.array([0, 1, 2])), "2 rows"),
        (lambda: tasks.log_probs(np.zeros((3, 5)), np.array([0, 1, 5])), "vocabulary of 5"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_tokenizer_that_joins_prompt_and_answer_is_refused():
    def encode(text):
        return [sum(word.encode()) for word in text.split()] if " 1" in text else [0, 1, 2]

    with pytest.raises(ValueError, match="joins"):
        tasks.continuation(encode, "a b", " 1")
