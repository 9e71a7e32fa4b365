"""Prefix consistency: exact zeros where nothing can move, movement where a Gram sees all rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.audit import prefix
from plga_jax.audit.toys import GlobalSum, RunningMean
from plga_jax.models.pldr_layers import OPERATORS
from plga_jax.models.pldr_transforms import constant_operator_model
from tests.models.conftest import run

V, K, S = 97, 3, 8
PAIRS = prefix.suffix_pairs(V, pairs=4, length=S, shared=K, seed=3)
TOKENS = PAIRS[0]


class TestPairs:
    @pytest.mark.parametrize("pad_id", [0, 5, 12])
    def test_share_a_prefix_and_nothing_else_and_hold_no_padding(self, pad_id):
        pairs = prefix.suffix_pairs(13, pairs=200, length=9, shared=4, pad_id=pad_id)
        first, second = pairs
        assert first.shape == second.shape == (200, 9)
        np.testing.assert_array_equal(first[:, :4], second[:, :4])
        assert (first[:, 4:] != second[:, 4:]).all()
        real = sorted(set(range(13)) - {pad_id})
        for part in (first, second):
            assert np.unique(part).tolist() == real

    def test_offsets_are_uniform_and_seeded(self):
        first, second = prefix.suffix_pairs(5, pairs=4000, length=3, shared=1)
        counts = np.bincount(((second - first)[:, 1:] % 4).ravel(), minlength=4)
        assert counts[0] == 0
        # Three offsets of 8000 draws: a standard deviation of 42.
        np.testing.assert_allclose(counts[1:], 8000 / 3, atol=5 * 42)
        again, other = (prefix.suffix_pairs(5, pairs=4000, length=3, shared=1, seed=seed)[0] for seed in (0, 1))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()

    @pytest.mark.parametrize("sizes", [{"vocab_size": 2}, {"pairs": 0}, {"shared": 0}, {"shared": 12}])
    def test_bad_sizes_are_refused(self, sizes):
        with pytest.raises(ValueError, match="1 ≤ shared < length"):
            prefix.suffix_pairs(**({"vocab_size": 9} | sizes))


class TestToys:
    def test_a_running_mean_never_moves(self):
        found = prefix.historical_rows(RunningMean(vocab_size=V), *PAIRS, shared=K)
        assert found.largest.shape == found.changed.shape == (4, K) and found.entries == V
        assert found.fraction == 0 and found.largest.max() == 0

    def test_a_global_sum_moves_everywhere_in_its_first_row_too(self):
        toy = GlobalSum(vocab_size=V)
        found = prefix.historical_rows(toy, *PAIRS, shared=K)
        assert found.fraction == 1 == found.first_row.fraction
        moved = toy.table[PAIRS[1][:, K:]].sum(axis=1) - toy.table[PAIRS[0][:, K:]].sum(axis=1)
        wanted = np.broadcast_to(np.abs(moved).max(axis=-1)[:, None], (4, K))
        np.testing.assert_allclose(found.largest, wanted, rtol=1e-12)

    def test_a_suffix_marked_as_padding_moves_only_what_lets_padding_in(self):
        marked = {"shared": K, "suffix_is_padding": True}
        assert prefix.historical_rows(GlobalSum(vocab_size=V), *PAIRS, **marked).fraction == 0
        assert prefix.historical_rows(GlobalSum(vocab_size=V, gram_rows="all"), *PAIRS, **marked).fraction == 1

    def test_only_the_entries_that_differ_are_counted(self):
        def decoder(tokens, valid):
            logits = np.zeros((*tokens.shape, 5))
            logits[:, 1, 2] = tokens[:, -1]
            return logits

        found = prefix.historical_rows(decoder, [[1, 1, 1]], [[1, 1, 4]], shared=2)
        assert found.changed.tolist() == [[0, 1]] and found.largest.tolist() == [[0, 3]]
        assert found.fraction == 0.1 and found.first_row.fraction == 0

    @pytest.mark.parametrize(("gram_rows", "moves"), [("valid", False), ("all", True)])
    def test_padding_behind_a_sequence(self, gram_rows, moves):
        toy = GlobalSum(vocab_size=V, gram_rows=gram_rows)
        found = prefix.padding_effect(toy, TOKENS, count=4)
        assert found.restored
        wanted = 4 * np.abs(toy.table[0]).max() if moves else 0
        np.testing.assert_allclose(found.largest, np.full(4, wanted), rtol=1e-12)

    def test_a_decoder_that_remembers_is_found_out(self):
        calls = []

        def decoder(tokens, valid):
            calls.append(tokens)
            return RunningMean(vocab_size=V)(tokens) + 1e-9 * len(calls)

        assert prefix.repeats_bitwise(RunningMean(vocab_size=V), TOKENS, calls=3)
        assert not prefix.repeats_bitwise(decoder, TOKENS)
        assert not prefix.padding_effect(decoder, TOKENS).restored


class TestModel:
    """On float32 tensors, as published: bits are what is compared."""

    @pytest.fixture
    def learned(self, published):
        return published("float32")

    def test_padding_by_place_is_padding_by_token(self, published):
        model = published("float32", gram_rows="all")
        ids = np.where(np.arange(S) < S - 2, TOKENS, 0)
        logits, _ = run(model, jnp.asarray(ids))
        np.testing.assert_array_equal(prefix.pldr_decoder(model)(ids, ids != 0), logits)
        # Other tokens under the mask: the published Gram sees them, ours does not.
        assert np.abs(prefix.pldr_decoder(model)(TOKENS, ids != 0) - logits)[ids != 0].max() > 1e-2
        kept = prefix.pldr_decoder(published("float32"))
        np.testing.assert_array_equal(kept(TOKENS, ids != 0)[ids != 0], kept(ids, ids != 0)[ids != 0])

    def test_a_masked_key_is_hidden_wherever_it_stands(self, published):
        constant = constant_operator_model(
            published("float32", gram_rows="all"), jnp.broadcast_to(jnp.eye(16), (2, 4, 16, 16))
        )
        decoder, valid = prefix.pldr_decoder(constant), np.arange(S) != 2
        logits = [decoder(np.where(valid, TOKENS, token), np.broadcast_to(valid, TOKENS.shape)) for token in (7, 8)]
        np.testing.assert_array_equal(logits[0][:, valid], logits[1][:, valid])
        assert (logits[0][:, 2] != logits[1][:, 2]).any()

    def test_a_suffix_moves_history_but_not_its_first_row(self, learned):
        found = prefix.historical_rows(prefix.pldr_decoder(learned), *PAIRS, shared=K)
        assert found.first_row.fraction == 0
        assert (found.changed[:, 1:] > 0.9 * V).all() and found.largest[:, 1:].min() > 1e-3

    def test_and_every_operator_of_every_layer(self, learned):
        found = prefix.operator_movement(learned, *PAIRS, shared=K)
        assert tuple(found) == OPERATORS
        for name, moved in found.items():
            assert moved.largest.shape == (2, 4) and moved.entries == 4 * 16 * 16
            assert (moved.largest > 0).all() and moved.fraction > 0.9, name
        alike = prefix.operator_movement(learned, PAIRS[0], PAIRS[0], shared=S)
        assert all(moved.fraction == 0 for moved in alike.values())

    @pytest.mark.parametrize(("gram_rows", "moves"), [("valid", False), ("all", True)])
    def test_a_suffix_marked_as_padding_moves_only_what_lets_padding_in(self, published, gram_rows, moves):
        model = published("float32", gram_rows=gram_rows)
        marked = {"shared": K, "suffix_is_padding": True}
        rows = prefix.historical_rows(prefix.pldr_decoder(model), *PAIRS, **marked)
        assert (rows.fraction > 0.5) == moves == (rows.largest.max() > 0)
        for moved in prefix.operator_movement(model, *PAIRS, **marked).values():
            assert (moved.fraction > 0.9) == moves == (moved.largest.max() > 0)

    def test_constant_operators_are_prefix_consistent_bit_for_bit(self, learned):
        constant = constant_operator_model(learned, jnp.broadcast_to(jnp.eye(16), (2, 4, 16, 16)))
        found = prefix.historical_rows(prefix.pldr_decoder(constant), *PAIRS, shared=K)
        assert found.fraction == 0

    def test_padding_at_the_gram(self, published):
        found = {}
        for gram_rows in ("valid", "all"):
            decoder = prefix.pldr_decoder(published("float32", gram_rows=gram_rows))
            assert prefix.repeats_bitwise(decoder, TOKENS)
            effect = prefix.padding_effect(decoder, TOKENS[:, :4], count=4)
            assert effect.restored
            found[gram_rows] = effect.largest
        # Sums of another length, which the power stage amplifies: measured 2e-6 at most, against 0.5 at least.
        assert found["valid"].max() < 1e-3 and found["all"].min() > 0.1


@pytest.mark.parametrize(
    ("first", "second", "shared", "message"),
    [
        ([1, 2], [1, 2], 1, r"\[P, S\]"),
        ([[1, 2]], [[1, 2, 3]], 1, r"\(1, 3\)"),
        ([[1, 2]], [[1, 2]], 3, "shared=3"),
        ([[1, 2, 3]], [[1, 4, 3]], 2, "first 2 tokens"),
    ],
)
def test_bad_pairs_are_refused(first, second, shared, message):
    with pytest.raises(ValueError, match=message):
        prefix.historical_rows(RunningMean(vocab_size=V), first, second, shared=shared)


def test_bad_counts_and_values_are_refused():
    toy = RunningMean(vocab_size=V)
    with pytest.raises(ValueError, match="count=0"):
        prefix.padding_effect(toy, TOKENS, count=0)
    with pytest.raises(ValueError, match="calls=1"):
        prefix.repeats_bitwise(toy, TOKENS, calls=1)
    with pytest.raises(ValueError, match="not finite"):
        prefix.historical_rows(lambda tokens, valid: np.full((*tokens.shape, 2), np.nan), *PAIRS, shared=K)
