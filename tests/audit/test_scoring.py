"""Both scoring protocols: on decoders whose answer is known, by hand on scores small enough to read, on a PLDR-LLM."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.audit.scoring import Item, Scores, score_candidates
from plga_jax.audit.toys import GlobalSum, RunningMean
from plga_jax.models.pldr_transforms import constant_operator_model

V = 11


def questions(seed=0, count=6, shortest=1):
    """Items of 2…4 candidates of up to 4 tokens."""
    rng = np.random.default_rng(seed)

    def ids(low, high):
        return rng.integers(1, V, size=rng.integers(low, high)).tolist()

    items = []
    for _ in range(count):
        candidates = [ids(shortest, 5) for _ in range(rng.integers(2, 5))]
        characters = [3 * len(y) + 1 for y in candidates]
        items.append(Item(context=ids(2, 6), candidates=candidates, true=[0], characters=characters))
    return items


def log_softmax(x):
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_prefix_consistent_decoder_scores_the_same_bit_for_bit(batch):
    found = score_candidates(RunningMean(vocab_size=V), questions(), batch=batch)
    np.testing.assert_array_equal(found.gap, 0)
    np.testing.assert_array_equal(*found.mc2())
    summary = found.summary()
    assert summary["largest_gap"] == 0
    for name in ("flips", "close", "discordant", "flips_per_character", "close_per_character"):
        assert summary[name] == 0, name
    assert summary["accuracy_block"] == summary["accuracy_sequential"]


@pytest.mark.parametrize("batch", [1, 7])
def test_every_score_is_the_calls_it_claims_to_be(batch):
    decoder, items = GlobalSum(vocab_size=V), questions(1)
    found = score_candidates(decoder, items, batch=batch)
    pairs = [(item, y) for item in items for y in item.candidates]
    assert len(found.block) == len(pairs) == found.item.size
    for c, (item, y) in enumerate(pairs):
        whole = np.array([[*item.context, *y]])
        start = len(item.context)
        calls = [log_softmax(decoder(whole[:, :end])) for end in range(start, whole.shape[1])]
        wanted = sum(call[0, -1, token] for call, token in zip(calls, y))
        assert found.sequential[c] == pytest.approx(wanted, rel=1e-12)
        rows = calls[-1][0, start - 1 :]
        assert found.block[c] == pytest.approx(sum(row[token] for row, token in zip(rows, y)), rel=1e-12)
    assert np.abs(found.gap).max() > 1


def test_one_token_candidates_coincide_by_construction():
    found = score_candidates(GlobalSum(vocab_size=V), questions(2, count=20))
    np.testing.assert_array_equal(found.gap[found.tokens == 1], 0)
    assert (found.gap[found.tokens > 1] != 0).all()


def test_a_global_decoder_flips_and_every_flip_is_close():
    found = score_candidates(GlobalSum(vocab_size=V), questions(3, count=60, shortest=2))
    for per_character in (False, True):
        chosen = found.choices(per_character=per_character)
        assert 0 < chosen.flip.sum() < chosen.close.sum() < 60
        assert not (chosen.flip & ~chosen.close).any()
        assert chosen.discordant[chosen.flip].all()
    assert found.summary()["discordant"] < found.summary()["pairs"]


def test_calls_have_one_shape_and_shared_prefixes_are_run_once():
    seen = []

    def spy(tokens):
        seen.append(tokens.copy())
        return RunningMean(vocab_size=V)(tokens)

    score_candidates(spy, [Item(context=[1, 2], candidates=[[3, 4, 5], [3, 6], [7]], true=[1])], batch=2)
    assert {call.shape for call in seen} == {(2, 4)}
    rows = np.concatenate(seen)
    np.testing.assert_array_equal(rows[:3], [[1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4]])
    assert len(seen) == 2 and (rows[3] == rows[2]).all()


def by_hand(sequential, block, characters=None):
    n = len(block)
    return Scores(
        item=np.zeros(n, int),
        true=np.arange(n) == 0,
        tokens=np.ones(n, int),
        characters=characters,
        sequential=np.array(sequential),
        block=np.array(block),
    )


@pytest.mark.parametrize(
    ("sequential", "block", "tie", "flip", "close", "discordant"),
    [
        ([-1.0, -2.0, -4.0], [-1.0, -2.0, -4.0], False, False, False, 0),
        ([-1.0, -2.0, -4.0], [-2.5, -2.0, -4.0], False, True, True, 1),
        ([-1.0, -2.0, -4.0], [-1.6, -2.0, -4.0], False, False, True, 0),
        # Half the margin is reached exactly.
        ([-1.0, -2.5, -4.0], [-1.0, -2.0, -4.0], False, False, True, 0),
        # Equal best scores leave no choice to compare, under either protocol.
        ([-1.0, -2.0, -4.0], [-1.0, -1.0, -4.0], True, False, False, 0),
        ([-2.0, -2.0, -4.0], [-2.0, -1.0, -4.0], True, False, False, 0),
        # The first candidate only is misplaced: two pairs are in opposite orders.
        ([-9.0, -2.0, -4.0], [-1.0, -2.0, -4.0], False, True, True, 2),
    ],
)
def test_classes_by_hand(sequential, block, tie, flip, close, discordant):
    chosen = by_hand(sequential, block).choices()
    assert [chosen.tie[0], chosen.flip[0], chosen.close[0]] == [tie, flip, close]
    assert chosen.discordant[0] == discordant and chosen.pairs[0] == 3
    assert chosen.gap[0] == np.abs(np.subtract(sequential, block)).max()


def test_division_by_length_may_change_the_choice():
    found = by_hand([-6.0, -5.0], [-6.0, -5.0], np.array([3, 2]))
    assert found.choices().block[0] == 1
    per_character = found.choices(per_character=True)
    assert per_character.block[0] == 0
    assert per_character.margin[0] == pytest.approx(0.5)
    assert by_hand([-6.0, -5.0], [-6.0, -5.0]).summary().keys() < found.summary().keys()


def test_mc2_by_hand():
    ll = np.log([0.1, 0.3, 0.2])
    # Far below the smallest float64 when exponentiated: only differences count.
    sequential, block = by_hand(ll - 5000, ll[::-1]).mc2()
    assert sequential[0] == pytest.approx(1 / 6)
    assert block[0] == pytest.approx(1 / 3)


def test_summary_is_for_json():
    summary = score_candidates(GlobalSum(vocab_size=V), questions(4)).summary()
    assert summary["items"] == 6 and summary["candidates"] == sum(len(i.candidates) for i in questions(4))
    assert json.loads(json.dumps(summary)) == summary


def test_pldr_of_learned_operators_scores_differently_and_of_constant_ones_alike(x64, published):
    learned = published()
    constant = constant_operator_model(learned, jnp.broadcast_to(jnp.eye(16, dtype=jnp.float64), (2, 4, 16, 16)))
    run = jax.jit(lambda model, tokens: model(tokens)[0])
    gaps = [score_candidates(lambda tokens, m=m: run(m, tokens), questions(5)).gap for m in (learned, constant)]
    assert np.abs(gaps[0]).max() > 0.1
    # Padding and later tokens reach no real row, and all calls have one shape: measured 0.
    np.testing.assert_allclose(gaps[1], 0, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context": []}, "0 tokens"),
        ({"candidates": [[1]]}, "at least two candidates"),
        ({"candidates": [[1], []]}, r"candidates of \[1, 0\]"),
        ({"true": []}, "at least one of 2"),
        ({"true": [2]}, r"true=\[2\]"),
        ({"characters": [1]}, r"characters=\[1\]"),
        ({"characters": [1, 0]}, r"characters=\[1, 0\]"),
    ],
)
def test_bad_items_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Item(**({"context": [1], "candidates": [[1], [2, 3]], "true": [0]} | fields))


@pytest.mark.parametrize(
    ("tokens", "kwargs", "message"),
    [
        ([0], {}, "1 ids equal to pad_id=0"),
        ([-1], {}, "1 negative"),
        ([V], {}, f"id {V} is outside a vocabulary of {V}"),
        ([1], {"batch": 0}, "batch=0"),
    ],
)
def test_bad_ids_are_refused(tokens, kwargs, message):
    with pytest.raises(ValueError, match=message):
        score_candidates(RunningMean(vocab_size=V), [Item(context=[1], candidates=[[2], tokens], true=[0])], **kwargs)


def test_no_items_no_lengths_and_no_numbers_are_refused():
    with pytest.raises(ValueError, match="0 items"):
        score_candidates(RunningMean(vocab_size=V), [])
    with pytest.raises(ValueError, match="per character"):
        by_hand([-1.0, -2.0], [-1.0, -2.0]).choices(per_character=True)
    with pytest.raises(ValueError, match="not finite"):
        score_candidates(lambda tokens: np.full((*tokens.shape, V), np.nan), questions())
