"""Lists shared by the rows of a tile: distinct, before the tile, reproducible, and as dense as they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ris_jax.block_shared import BlockSharedGeometry, _multiply_high

SMALL = BlockSharedGeometry(length=1000, budget=24, local=40, anchors=10, tile=16)


@pytest.mark.parametrize(
    "fields", [{}, dict(block=8), dict(block=8, local=5), dict(local=1, anchors=0), dict(budget=0)]
)
def test_lists_are_distinct_ascending_and_before_the_tile(fields):
    geometry = SMALL.replace(**fields)
    sampled = jax.jit(geometry.samples)
    for tile in range(geometry.num_tiles):
        keys = np.asarray(sampled(jnp.int32(tile), jnp.int32(2)))
        assert keys.shape == (geometry.budget,) and keys.dtype == np.int32
        count = int((keys >= 0).sum())
        assert (keys[count:] == -1).all() and (np.diff(keys[:count]) > 0).all()
        start = tile * geometry.tile
        assert (keys[:count] < start).all()
        # As many as there are to choose from: those that some row of the tile sees neither by window nor as anchors.
        end = min(start, start + geometry.tile - geometry.local)
        blocks = max(0, -(-end // geometry.block) - geometry.anchors // geometry.block)
        assert count == min(geometry.budget, blocks * geometry.block)
        starts = keys[:count].reshape(-1, geometry.block)
        assert (starts[:, 0] % geometry.block == 0).all()
        assert (starts - starts[:, :1] == np.arange(geometry.block)).all()


def test_one_key_comes_from_each_stratum():
    geometry = SMALL.replace(local=1, anchors=0, budget=7)
    edges = np.array([0, 23, 46, 69, 92, 115, 138, 160])  # 160 keys before tile 10: six strata of 23 and one of 22
    keys = np.stack([np.asarray(geometry.samples(10, layer)) for layer in range(200)])
    assert (keys >= edges[:-1]).all() and (keys < edges[1:]).all()
    # All of a stratum is reached: 200 draws miss one of its 23 keys with probability 23·(22/23)^200 = 0.3 %.
    assert [len(set(column)) for column in keys.T.tolist()] == np.diff(edges).tolist()


def test_lists_are_pinned_down():
    """Counter-based and in integers: the same on every version and device. Values of this program's first version."""
    geometry = BlockSharedGeometry(length=300, budget=10, local=10, anchors=4, tile=16, seed=5)
    assert geometry.samples(3, 1).tolist() == [7, 11, 17, 21, 26, 31, 32, 36, 43, 44]
    assert geometry.samples(18, 1).tolist() == [14, 50, 70, 107, 136, 164, 177, 222, 253, 260]
    assert geometry.samples(0, 1).tolist() == [-1] * 10


def test_lists_differ_by_layer_tile_and_seed_unless_shared():
    lists = [SMALL.samples(50, layer).tolist() for layer in range(3)]
    assert lists[0] != lists[1] != lists[2] != lists[0]
    assert SMALL.replace(seed=1).samples(50, 0).tolist() != lists[0]
    shared = SMALL.replace(per_layer=False)
    assert shared.samples(50, 0).tolist() == shared.samples(50, 2).tolist()
    assert not np.array_equal(SMALL.rows(900, 950, layer=0), SMALL.rows(900, 950, layer=1))


def test_blocks_and_keys_agree_and_can_be_mapped():
    geometry = SMALL.replace(block=4)
    tiles = jnp.arange(geometry.num_tiles, dtype=jnp.int32)
    blocks = np.asarray(jax.vmap(geometry.sample_blocks)(tiles))
    keys = np.asarray(jax.vmap(geometry.samples)(tiles))
    assert np.array_equal(np.where(blocks < 0, -1, blocks * 4), keys[:, ::4])
    assert np.array_equal(keys[30], geometry.samples(30))


def test_mask_is_window_anchors_and_list():
    mask = SMALL.mask()
    t, c = np.arange(1000)[:, None], np.arange(1000)
    expected = (c <= t) & ((t - c < 40) | (c < 10))
    for tile in range(SMALL.num_tiles):
        keys = np.asarray(SMALL.samples(tile))
        expected[tile * 16 : (tile + 1) * 16, keys[keys >= 0]] = True
    assert np.array_equal(mask, expected)


@pytest.mark.parametrize("fields", [{}, dict(block=8, local=5, anchors=12), dict(local=1, anchors=0), dict(budget=0)])
def test_expected_rows_sum_the_chances_of_all_keys(fields):
    geometry = SMALL.replace(**fields)
    expected = []
    for row in range(1000):
        chance = np.zeros(1000)
        start = row // 16 * 16
        end = max(0, min(start, start + 16 - geometry.local))
        blocks = np.arange(geometry.anchors // geometry.block, -(-end // geometry.block))
        for stratum in np.array_split(blocks, max(geometry.budget // geometry.block, 1)):
            for block in stratum:
                chance[block * geometry.block :][: geometry.block] = bool(geometry.budget) / len(stratum)
        chance[: geometry.anchors] = 1
        chance[max(0, row + 1 - geometry.local) :] = 1
        expected.append(chance[: row + 1].sum())
    np.testing.assert_allclose(geometry.expected_row(np.arange(1000)), expected, rtol=1e-12)


def test_budgets_by_what_is_wanted():
    assert BlockSharedGeometry.with_log_budget(65536, factor=64).budget == 1024
    assert BlockSharedGeometry.with_log_budget(65536, factor=3, block=32).budget == 64  # 48 rounds half to even
    assert BlockSharedGeometry.with_density(65536, density=0.01).budget == 655
    fitted = BlockSharedGeometry.with_share(65536, share=0.1, block=64)
    assert fitted.share() <= 0.1 < fitted.replace(budget=fitted.budget + 64).share()
    assert BlockSharedGeometry.with_share(500, share=1.0, local=1, anchors=0, tile=4).share() < 1


def test_twice_the_log_of_work_not_twice_the_square():
    """From 64k to 1M tokens a log budget grows by 20/16, a density by 16."""
    log = [BlockSharedGeometry.with_log_budget(length, factor=16).budget for length in (2**16, 2**20)]
    part = [BlockSharedGeometry.with_density(length, density=0.01).budget for length in (2**16, 2**20)]
    assert log == [256, 320]
    assert part == [655, 10486]


def test_multiply_high_is_exact():
    a = np.array([0, 1, 0xFFFF, 0x10000, 0x89ABCDEF, 0xFFFFFFFF], np.uint32)
    a, b = (x.reshape(-1) for x in np.meshgrid(a, a))
    expected = (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)
    assert np.array_equal(np.asarray(_multiply_high(jnp.asarray(a), jnp.asarray(b))), expected.astype(np.uint32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(budget=-8), "budget = -8"),
        (dict(budget=20, block=8), "budget = 20 must be a multiple of block = 8"),
        (dict(budget=24, block=3), "tile = 16 must be a multiple of block = 3"),
        (dict(tile=0), "tile = 0"),
        (dict(local=0), "local = 0"),
        (dict(block=0), "block = 0"),
        (dict(per_layer=1), "per_layer = 1 must be True or False"),
    ],
)
def test_refuses_what_is_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        SMALL.replace(**fields)


def test_refuses_budgets_that_cannot_be():
    with pytest.raises(ValueError, match=r"real share of 10.00% is too little.*28.81% of the causal pairs"):
        BlockSharedGeometry.with_share(8192, share=0.1)
    with pytest.raises(ValueError, match="block = 0"):
        BlockSharedGeometry.with_share(8192, share=0.5, block=0)
    with pytest.raises(ValueError, match=r"density = 1.5 must be within 0 … 1"):
        BlockSharedGeometry.with_density(8192, density=1.5)
    with pytest.raises(ValueError, match="factor = nan"):
        BlockSharedGeometry.with_log_budget(8192, factor=float("nan"))
