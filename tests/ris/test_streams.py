"""The published random streams, against their definition in plain integers (the masks' goldens pin them down too)."""

import numpy as np
import pytest

from ris_jax.streams import MAX_PERMUTATION, Stream, outputs_per_integer


def raw_outputs(seed, count):
    """Raw outputs by NumPy's documented accessor, another path than the one under test."""
    bits = np.random.MT19937()
    bits.state = np.random.RandomState(seed).get_state(legacy=False)
    return [int(u) for u in bits.random_raw(count)]


def test_first_outputs_of_seed_42():
    # Mersenne Twister outputs that any implementation gives after init_genrand(42).
    assert Stream(42).raw(4).tolist() == [1608637542, 3421126067, 4083286876, 787846414]


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32 + 3, -1])
def test_seed_counts_modulo_2_to_the_32(seed):
    assert Stream(seed).raw(5).tolist() == raw_outputs(seed % 2**32, 5)


@pytest.mark.parametrize("high", [1, 2, 257, 65536, 65537, 2**28 - 1])
def test_integers_take_one_output_each(high):
    expected = [u % high for u in raw_outputs(42, 1000)]
    assert Stream(42).integers(high, 1000).tolist() == expected


@pytest.mark.parametrize("high", [2**28, 2**31 + 11, 2**32, 2**63 - 1])
def test_large_integers_take_two_outputs_each(high):
    u = raw_outputs(42, 2000)
    expected = [(u[i] * 2**32 + u[i + 1]) % high for i in range(0, 2000, 2)]
    stream = Stream(42)
    assert stream.integers(high, 1000).tolist() == expected
    assert stream.raw(1).tolist() == raw_outputs(42, 2001)[-1:]
    assert outputs_per_integer(high) == 2


@pytest.mark.parametrize("n", [1, 2, 5, 1000])
def test_permutation_is_the_published_shuffle(n):
    u, order = raw_outputs(3, n), list(range(n))
    for i in range(n - 1):
        j = i + u[i] % (n - i)
        order[i], order[j] = order[j], order[i]
    stream = Stream(3)
    assert stream.permutation(n).tolist() == order
    assert stream.raw(1).tolist() == [u[n - 1]], "n - 1 outputs are used"


def test_skipping_equals_drawing():
    drawn, skipped = Stream(5), Stream(5)
    drawn.integers(100, 12345)
    skipped.skip(12345)
    skipped.skip(0)
    assert drawn.integers(100, 50).tolist() == skipped.integers(100, 50).tolist()


def test_draws_do_not_depend_on_their_grouping():
    whole, pieces = Stream(9), Stream(9)
    parts = [pieces.integers(1000, count) for count in (1, 7, 0, 92)]
    assert np.array_equal(whole.integers(1000, 100), np.concatenate(parts))


@pytest.mark.parametrize("high", [0, -3, 2**63])
def test_integers_refuse_a_range_that_is_not_one(high):
    with pytest.raises(ValueError, match="must be within 1"):
        Stream(0).integers(high, 1)


@pytest.mark.parametrize("n", [0, MAX_PERMUTATION])
def test_permutation_refuses_lengths_that_are_drawn_otherwise(n):
    with pytest.raises(ValueError, match="not drawn this way"):
        Stream(0).permutation(n)
