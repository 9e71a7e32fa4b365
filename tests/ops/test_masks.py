"""Masks against the rules spelled out pair by pair in Python."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plga_jax.ops.masks import Mask


def slow_mask(mask: Mask, B: int, N: int, T: int, S: int) -> np.ndarray:
    """The rules of the module docstring, one pair at a time: bool [B, N, T, S]."""
    at = lambda array, b, i: np.asarray(array)[min(b, len(array) - 1), i]  # noqa: E731
    table = np.zeros((B, N, T, S), bool)
    for b, n, t, s in itertools.product(range(B), range(N), range(T), range(S)):
        q = t if mask.q_positions is None else at(mask.q_positions, b, t)
        k = s if mask.k_positions is None else at(mask.k_positions, b, s)
        meet = not mask.causal or k <= q
        meet = meet and (mask.window is None or q - k < mask.window)
        if mask.q_segments is not None:
            meet = meet and at(mask.q_segments, b, t) == at(mask.k_segments, b, s)
        meet = meet and (mask.k_valid is None or at(mask.k_valid, b, s))
        if mask.pairs is not None:
            pairs = np.broadcast_to(mask.pairs, (B, N, T, S))
            meet = meet and pairs[b, n, t, s]
        table[b, n, t, s] = meet
    return table


def random_masks(B: int, N: int, T: int, S: int, seed: int = 0) -> dict[str, Mask]:
    """One mask for each rule, and one with all of them."""
    rng = np.random.default_rng(seed)
    positions = dict(
        q_positions=jnp.asarray(rng.integers(0, 9, (B, T)), jnp.int32),
        k_positions=jnp.asarray(rng.integers(0, 9, (B, S)), jnp.int32),
    )
    segments = dict(
        q_segments=jnp.asarray(rng.integers(0, 3, (B, T)), jnp.int32),
        k_segments=jnp.asarray(rng.integers(0, 3, (B, S)), jnp.int32),
    )
    valid = dict(k_valid=jnp.asarray(rng.random((B, S)) < 0.7))
    pairs = jnp.asarray(rng.random((B, N, T, S)) < 0.7)
    return {
        "causal": Mask(),
        "full": Mask(causal=False),
        "window": Mask(window=3),
        "positions": Mask(**positions),
        "shared positions": Mask(q_positions=positions["q_positions"][:1], window=4),
        "segments": Mask(causal=False, **segments),
        "valid": Mask(causal=False, **valid),
        "pairs": Mask(causal=False, pairs=pairs),
        "pairs of all heads": Mask(pairs=pairs[:, :1]),
        "all": Mask(window=5, pairs=pairs, **positions, **segments, **valid),
    }


B, N, T, S = 2, 3, 6, 7
MASKS = random_masks(B, N, T, S)


@pytest.mark.parametrize("name", MASKS)
def test_as_array_is_the_rules_pair_by_pair(name):
    mask = MASKS[name]
    got = mask.as_array(T, S)
    assert got.dtype == bool
    want = slow_mask(mask, B, N, T, S)
    assert 0 < want.sum() < want.size or name == "full"
    np.testing.assert_array_equal(np.broadcast_to(got, (B, N, T, S)), want)


@pytest.mark.parametrize("name", MASKS)
def test_block_is_a_part_of_the_table_and_false_beyond_it(name):
    mask = MASKS[name]
    table = np.broadcast_to(mask.as_array(T, S), (B, N, T, S))
    padded = np.pad(table, ((0, 0), (0, 0), (0, 3), (0, 2)))
    rows, columns = np.array([5, 0, 7, 2, 6]), np.array([8, 1, 6, 3])
    block = jax.jit(lambda m, r, c: m.block(r, c, T, S))(mask, rows, columns)
    want = padded[:, :, rows][..., columns]
    np.testing.assert_array_equal(np.broadcast_to(block, want.shape), want)


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_window_is_a_number_of_keys_self_included(window):
    keys = Mask(window=window).as_array(9, 9)[0, 0].sum(-1)
    np.testing.assert_array_equal(keys, [min(i + 1, window) for i in range(9)])
    assert Mask(window=window).as_array(9, 9)[0, 0].diagonal().all()


def test_one_new_token_per_row_sees_its_own_past():
    length = jnp.array([0, 3, 6], jnp.int32)
    table = Mask(q_positions=length[:, None]).as_array(1, 7)
    np.testing.assert_array_equal(table[:, 0, 0].sum(-1), length + 1)
    windowed = Mask(q_positions=length[:, None], window=2).as_array(1, 7)
    np.testing.assert_array_equal(windowed[:, 0, 0].sum(-1), [1, 2, 2])


def test_order_of_slots_does_not_matter_only_positions_do():
    """A ring buffer: slots permuted, positions with them."""
    order = np.array([3, 4, 5, 0, 1, 2])
    ring = Mask(window=3, k_positions=jnp.asarray(order)[None]).as_array(6, 6)
    np.testing.assert_array_equal(ring, Mask(window=3).as_array(6, 6)[..., order])


def test_packed_rows_keep_documents_apart_and_padding_out():
    segments = jnp.array([[1, 1, 1, 2, 2, 0]], jnp.int32)
    table = np.asarray(Mask.packed(segments).as_array(6, 6)[0, 0])
    want = np.zeros((6, 6), bool)
    want[:3, :3], want[3:5, 3:5] = np.tri(3, dtype=bool), np.tri(2, dtype=bool)
    np.testing.assert_array_equal(table, want)


def test_padding_hides_keys():
    valid = jnp.array([[False, True, True], [True, True, False]])
    table = Mask.padding(valid).as_array(3, 3)
    np.testing.assert_array_equal(table[:, 0], np.tri(3, dtype=bool) & np.asarray(valid)[:, None])
    both = Mask.padding(valid, causal=False).as_array(3, 3)
    np.testing.assert_array_equal(both[:, 0].sum(1), 3 * np.asarray(valid))


def test_integer_dtypes_may_be_mixed(x64):
    mask = Mask(
        window=2,
        q_positions=jnp.arange(4, dtype=jnp.uint32)[None],
        k_positions=jnp.arange(4, dtype=jnp.int64)[None],
        q_segments=jnp.ones((1, 4), jnp.int8),
        k_segments=jnp.ones((1, 4), jnp.int64),
    )
    np.testing.assert_array_equal(mask.as_array(4, 4), Mask(window=2).as_array(4, 4))


def test_a_mask_is_a_pytree_whose_arrays_do_not_retrace():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def table(mask):
        return mask.as_array(1, 5)

    for length in range(4):
        mask = Mask(window=3, q_positions=jnp.full((1, 1), length, jnp.int32))
        assert table(mask).sum() == min(length + 1, 3)
    assert len(jax.tree.leaves(mask)) == 1
    assert jax.tree.structure(mask) != jax.tree.structure(Mask(window=4, q_positions=mask.q_positions))


def test_vmap_maps_the_arrays():
    lengths = jnp.array([[[1]], [[4]]], jnp.int32)
    tables = jax.vmap(lambda m: m.as_array(1, 6))(Mask(q_positions=lengths))
    np.testing.assert_array_equal(tables.sum((1, 2, 3, 4)), [2, 5])


BAD = {
    "window 0": (dict(window=0), "window must be an integer in 1.."),
    "negative window": (dict(window=-2), "got -2"),
    "window beyond int32": (dict(window=2**31), "None for no window"),
    "fractional window": (dict(window=2.0), "window must be an integer"),
    "window without causality": (dict(causal=False, window=4), "needs causal=True"),
    "traced causality": (dict(causal=np.ones(())), "causal must be True or False"),
    "segments of one side": (dict(q_segments=np.ones((2, 6), int)), "k_segments is not"),
    "segments of the other side": (dict(k_segments=np.ones((2, 7), int)), "q_segments is not"),
    "positions without batch": (dict(q_positions=np.arange(6)), r"q_positions must have shape .*T=6.*got \[6\]"),
    "too few positions": (dict(k_positions=np.zeros((2, 6), int)), r"S=7.*got \[2, 6\]"),
    "fractional positions": (dict(q_positions=np.zeros((2, 6), np.float32)), "integers, got float32"),
    "integer validity": (dict(k_valid=np.ones((2, 7), int)), "k_valid must hold bools"),
    "float pairs": (dict(pairs=np.zeros((2, 1, 6, 7), np.float32)), "pairs must hold bools"),
    "pairs without heads": (dict(pairs=np.ones((2, 6, 7), bool)), "N or 1"),
    "batches that differ": (dict(k_valid=np.ones((2, 7), bool), q_positions=np.ones((3, 6), int)), "with B=3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_masks_say_what_would_do(name):
    fields, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        Mask(**fields).as_array(T, S)


def test_validate_knows_batch_and_heads():
    Mask(pairs=np.ones((2, 3, 6, 7), bool)).validate(T=6, S=7, B=2, N=3)
    with pytest.raises(ValueError, match="with B=2, N=4"):
        Mask(pairs=np.ones((2, 3, 6, 7), bool)).validate(T=6, S=7, B=2, N=4)


def test_numpy_window_is_an_integer_too():
    assert functools.reduce(jnp.add, Mask(window=np.int64(2)).as_array(4, 4)[0, 0, -1].astype(int)) == 2
