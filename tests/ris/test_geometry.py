"""The published geometry against goldens of the published program, bit for bit; and what every geometry promises."""

import hashlib
import json
import tracemalloc

import numpy as np
import pytest

from ris_jax import density
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.geometry import Geometry, PublishedGeometry, fit_share
from ris_jax.mask_stream import MaskStream
from ris_jax.packed import unpack_rows
from ris_jax.patterns import DenseGeometry, RandomBlockGeometry, StridedGeometry, WindowGeometry


def published(case, **changes):
    """The geometry of a golden's parameters."""
    fields = dict(
        mode=case["mode"],
        length=case["T"],
        seeds=case["n_seeds"],
        density=case["density"],
        local=case["w_local"],
        anchors=case["w_global"],
        base_seed=case["base_seed"],
        block_max=case["b_max"],
    )
    return PublishedGeometry(**fields | changes)


@pytest.fixture(scope="module")
def cases(golden):
    return json.loads(str(golden("ris/masks")["cases"]))


STOCHASTIC = PublishedGeometry(length=301, seeds=3, density=0.02, local=9, anchors=5)
STRUCTURAL = STOCHASTIC.replace(mode="structural", block_max=16)

EVERY_KIND = [
    STOCHASTIC,
    STRUCTURAL,
    STRUCTURAL.replace(budget="total", block_max=None, density=0.05),
    STOCHASTIC.replace(local=0, anchors=0),
    STRUCTURAL.replace(local=0, anchors=0, block_max=0),
    STOCHASTIC.replace(length=3, anchors=8),
    STRUCTURAL.replace(length=1),
    DenseGeometry(length=301),
    WindowGeometry(length=301, local=10, anchors=7),
    StridedGeometry(length=301, local=1, anchors=3, stride=11),
    RandomBlockGeometry(length=301, local=10, anchors=7, block=16, blocks=3),
    BlockSharedGeometry(length=301, budget=24, local=10, anchors=7, tile=16, block=8),
    BlockSharedGeometry(length=301, budget=20, local=30, anchors=0, tile=16),
    BlockSharedGeometry(length=3, budget=20, local=1, anchors=8),
]
each_kind = pytest.mark.parametrize("geometry", EVERY_KIND, ids=lambda g: f"{g.kind}-{EVERY_KIND.index(g)}")


class TestGoldens:
    def test_masks_are_equal_bit_for_bit(self, golden, cases):
        assert len(cases) == 22
        for name, case in cases.items():
            packed = np.concatenate(list(published(case).chunks(100)))
            rows = golden("ris/masks")[f"{name}/mask_packed"]
            assert np.array_equal(packed[:: case["step"]], rows), name
            assert hashlib.sha256(packed.tobytes()).hexdigest() == case["sha256"], name
            counts = np.bitwise_count(packed).sum(axis=1, dtype=np.int64)
            assert np.array_equal(counts, golden("ris/masks")[f"{name}/row_union"]), name

    def test_sizes_and_expected_shares(self, cases):
        for name, case in cases.items():
            geometry = published(case)
            assert (geometry.block_size, geometry.num_samples) == (case["block_size"], case["num_global"]), name
            expected = geometry.expected()
            assert expected.share == pytest.approx(case["expected_causal_fraction"], rel=1e-14), name
            assert expected.probability == pytest.approx(case["p_pick"], rel=1e-12), name

    def test_index_maps_are_equal(self, golden, cases):
        """For each row and seed: the anchors, the samples as they are drawn, and the row itself."""
        found = 0
        for name, case in cases.items():
            index_map = golden("ris/masks").get(f"{name}/index_map")
            if index_map is None:
                continue
            found += 1
            T, S, anchors = case["T"], case["n_seeds"], case["w_global"]
            samples = MaskStream(published(case)).samples(T).reshape(T, S, -1)
            assert np.array_equal(samples, index_map[:, :, anchors:-1]), name
            assert (index_map[:, :, -1] == np.arange(T)[:, None]).all(), name
        assert found == 12

    def test_decode_unions_are_equal(self, golden):
        """Anchor set frozen at the first row, united with the window of each step; within and past the window."""
        unions = golden("ris/decode_unions")
        checked = 0
        for name, case in json.loads(str(unions["cases"])).items():
            geometry = published(case)
            for schedule, lengths in case["schedules"].items():
                kept = geometry.anchor_row(lengths[0] - 1)
                for length in lengths:
                    row = min(length - 1, geometry.length - 1)
                    local = np.arange(max(0, row - geometry.local), length)
                    assert np.array_equal(np.union1d(kept, local), unions[f"{name}/{schedule}/kv{length}"])
                    checked += 1
        assert checked == 45

    @pytest.mark.parametrize(
        ("keys", "fields"),
        [
            (1595, dict(length=32768, seeds=1)),
            (4276, dict(length=32768, seeds=10)),
            (10752, dict(length=40960, seeds=10, density=0.03, local=16)),
            (4289, dict(length=32768, seeds=10, mode="structural", budget="total")),
            (13677, dict(length=32768, seeds=10, mode="structural", budget="total", density=0.05)),
            (17969, dict(length=65536, seeds=100, mode="structural", budget="total", density=0.003)),
            (17800, dict(length=32768, seeds=10, mode="structural")),
        ],
    )
    def test_last_rows_of_full_size(self, keys, fields):
        """Counts taken along the published program's own streams."""
        geometry = PublishedGeometry(**fields)
        _, counts = geometry.union([geometry.length - 1])
        assert counts.tolist() == [keys]


class TestEveryKind:
    @each_kind
    def test_rows_are_causal_and_never_empty(self, geometry):
        mask = geometry.mask()
        assert mask.shape == (geometry.length, geometry.length)
        assert not np.triu(mask, 1).any()
        assert mask.diagonal().all()

    @each_kind
    @pytest.mark.parametrize("size", [1, 7, 10_000])
    def test_chunk_size_does_not_matter(self, geometry, size):
        packed = geometry.rows(0, geometry.length)
        assert packed.dtype == np.uint8
        assert np.array_equal(np.concatenate(list(geometry.chunks(size))), packed)

    @each_kind
    def test_rows_can_be_entered_anywhere(self, geometry):
        T = geometry.length
        packed = geometry.rows(0, T)
        for start, stop in ((T // 2, T), (T // 3, T // 3), (T - 1, T)):
            assert np.array_equal(geometry.rows(start, stop), packed[start:stop])
            assert np.array_equal(np.concatenate([packed[:0], *geometry.chunks(5, start, stop)]), packed[start:stop])

    @each_kind
    def test_union_lists_the_bits(self, geometry):
        mask = geometry.mask()
        rows = [geometry.length - 1, 0, geometry.length // 2, 0]
        indices, counts = geometry.union(rows)
        assert indices.dtype == counts.dtype == np.int32
        for row, keys, count in zip(rows, indices, counts):
            assert keys[:count].tolist() == np.flatnonzero(mask[row]).tolist()
            assert (keys[count:] == -1).all()
        wide, _ = geometry.union(rows, width=400)
        assert np.array_equal(wide[:, : indices.shape[1]], indices) and (wide[:, indices.shape[1] :] == -1).all()

    @each_kind
    def test_share_is_what_is_counted(self, geometry):
        """Exact without chance; with it, the mean over 16 seeds within four standard errors."""
        field = {"published": "base_seed", "random_block": "seed", "block_shared": "seed"}.get(geometry.kind)
        seeds = range(0, 16000, 1000) if field else [None]  # far apart: seeds i and i+1 share published streams
        counted = [
            density.real_share((geometry.replace(**{field: seed}) if field else geometry).chunks(64), geometry.length)
            for seed in seeds
        ]
        error = np.std(counted) / len(counted) ** 0.5
        assert abs(np.mean(counted) - geometry.share()) <= 4 * error + 1e-12

    @each_kind
    def test_config_round_trip(self, geometry):
        config = json.loads(json.dumps(geometry.to_config()))
        again = Geometry.from_config(config)
        assert again == geometry and type(again) is type(geometry)
        assert again.fingerprint() == geometry.fingerprint()

    def test_fingerprints_tell_every_field_apart(self):
        prints = {geometry.fingerprint() for geometry in EVERY_KIND}
        changed = [
            STRUCTURAL.replace(seeds=4),
            STRUCTURAL.replace(density=0.03),
            STRUCTURAL.replace(local=10),
            STRUCTURAL.replace(anchors=6),
            STRUCTURAL.replace(base_seed=43),
            STRUCTURAL.replace(block_max=17),
        ]
        prints |= {geometry.fingerprint() for geometry in changed}
        assert len(prints) == len(EVERY_KIND) + len(changed)
        assert STOCHASTIC.replace(seeds=np.int64(3)).fingerprint() == STOCHASTIC.fingerprint()

    @pytest.mark.parametrize(
        "config", [None, [], {}, {"kind": "other"}, {"kind": "dense"}, {"kind": "dense", "length": 4, "stride": 2}]
    )
    def test_configs_that_are_none(self, config):
        with pytest.raises(ValueError, match="Not a geometry"):
            Geometry.from_config(config)

    def test_rows_out_of_range(self):
        for start, stop in ((-1, 3), (5, 4), (0, 302)):
            with pytest.raises(ValueError, match="must be within 0 … 301"):
                STOCHASTIC.rows(start, stop)
            with pytest.raises(ValueError, match="must be within 0 … 301"):
                next(WindowGeometry(length=301).chunks(8, start, stop))
        for row in (-1, 301):
            with pytest.raises(ValueError, match="must be within 0 … 300"):
                STOCHASTIC.union([row])
            with pytest.raises(ValueError, match="must be within 0 … 300"):
                DenseGeometry(length=301).union([row])
        with pytest.raises(ValueError, match="size = 0"):
            next(STOCHASTIC.chunks(0))
        with pytest.raises(ValueError, match="width = 3 is too small: row 300"):
            STOCHASTIC.union([0, 300], width=3)
        with pytest.raises(ValueError, match="take rows or chunks"):
            STOCHASTIC.replace(length=20000).mask()


class TestPublished:
    def test_mask_is_the_union_of_its_parts(self):
        for geometry in (STOCHASTIC, STRUCTURAL):
            mask, samples = geometry.mask(), MaskStream(geometry).samples(geometry.length)
            for row in range(geometry.length):
                keys = {int(c) for c in samples[row] if 0 <= c <= row}
                assert geometry.samples(row).tolist() == sorted(keys)
                keys |= set(range(max(0, row - 9), row + 1)) | set(range(min(5, row + 1)))
                assert np.flatnonzero(mask[row]).tolist() == sorted(keys)
                fixed = set(range(max(0, row - 9), row + 1)) | set(range(min(5, row + 1)))
                assert geometry.fixed_count(row) == len(fixed)

    def test_rows_of_a_clique_share_their_members(self):
        """Seeing through a clique is mutual, so that two rows of one block list the same members."""
        geometry = STRUCTURAL.replace(seeds=1)
        members = MaskStream(geometry).samples(geometry.length)[:, :16]
        for row in range(geometry.length):
            assert row in members[row]
            for other in members[row][members[row] >= 0]:
                assert np.array_equal(members[other], members[row])

    def test_parts_can_be_left_out(self):
        bare = STRUCTURAL.replace(local=0, anchors=0)
        samples = MaskStream(bare).samples(bare.length)
        assert [set(np.flatnonzero(line)) for line in bare.mask()] == [
            {c for c in keys.tolist() if 0 <= c <= row} | {row} for row, keys in enumerate(samples)
        ]
        alone = bare.replace(block_max=0, density=0.0)
        assert alone.block_size == alone.num_samples == 1
        assert MaskStream(alone).samples(301)[:, ::2].tolist() == [[row] * 3 for row in range(301)]

    def test_both_budgets(self):
        additive = PublishedGeometry(length=65536, mode="structural", density=0.03)
        total = additive.replace(budget="total")
        assert (additive.block_size, additive.num_samples) == (2048, 1966)
        assert (total.block_size, total.num_samples) == (655, 1310)
        assert total.share() < additive.share()
        below = total.replace(density=0.008)
        assert (below.block_size, below.num_samples) == (524, 1)
        # Without a clique there is nothing to carve out.
        assert total.replace(mode="stochastic").num_samples == 1966

    def test_stream_can_be_restarted_at_any_row(self):
        for geometry in (STOCHASTIC, STRUCTURAL):
            packed, stream = geometry.rows(0, geometry.length), MaskStream(geometry, 100)
            for row in (100, 250, 3, 300, 0):
                stream.seek(row)
                assert np.array_equal(stream.take(1), packed[row : row + 1])
                assert stream.row == row + 1
            stream.seek(301)
            assert stream.take(0).shape == (0, 38)
            with pytest.raises(ValueError, match="1 rows were asked for, but 0 are left"):
                stream.take(1)
            with pytest.raises(ValueError, match="must be within 0 … 301"):
                stream.seek(302)

    def test_anchor_rows(self):
        for geometry in (STOCHASTIC, STRUCTURAL, STOCHASTIC.replace(anchors=500)):
            for row in (0, 2, 150, 300):
                keys = geometry.anchor_row(row)
                assert keys.dtype == np.int32
                expected = {*range(min(geometry.anchors, row + 1)), *geometry.samples(row).tolist(), row}
                assert keys.tolist() == sorted(expected)
            assert np.array_equal(geometry.anchor_row(1000), geometry.anchor_row(300))
        with pytest.raises(ValueError, match="row = -1"):
            STOCHASTIC.anchor_row(-1)

    def test_memory_grows_with_the_chunk_not_with_the_square(self):
        """64k rows packed are 537 MB; the walk may hold a chunk, a few megabytes of scratch and the generators."""
        geometry = PublishedGeometry(length=65536, seeds=10, density=0.001)
        tracemalloc.start()
        for chunk in geometry.chunks(64, 0, 512):
            assert chunk.shape == (64, 8192)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**24

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (dict(length=0), "length = 0"),
            (dict(length=2.5), "length = 2.5 must be an integer"),
            (dict(length=True), "length = True"),
            (dict(length=2**28), "length"),
            (dict(mode="random"), "mode = 'random' is unknown"),
            (dict(budget="paper"), "budget = 'paper' is unknown"),
            (dict(seeds=0), "seeds = 0"),
            (dict(density=1.5), "density = 1.5 must be within 0 … 1"),
            (dict(density=-0.1), "density = -0.1"),
            (dict(density=float("nan")), "density = nan"),
            (dict(density="1%"), "must be a number"),
            (dict(local=-1), "local = -1"),
            (dict(anchors=-1), "anchors = -1"),
            (dict(block_max=-1), "block_max = -1"),
            (dict(block_max=64, budget="total"), "budget='total' decides"),
        ],
    )
    def test_refuses_what_is_out_of_range(self, fields, message):
        with pytest.raises(ValueError, match=message):
            PublishedGeometry(**{"length": 100, **fields})


class TestPatterns:
    def test_masks_by_their_definitions(self):
        T = 97
        t, c = np.arange(T)[:, None], np.arange(T)
        window = (c <= t) & ((t - c < 6) | (c < 3))
        strided = window | ((c <= t) & ((t - c) % 7 == 0))
        assert np.array_equal(WindowGeometry(length=T, local=6, anchors=3).mask(), window)
        assert np.array_equal(StridedGeometry(length=T, local=6, anchors=3, stride=7).mask(), strided)
        assert np.array_equal(DenseGeometry(length=T).mask(), c <= t)

    def test_random_blocks_are_whole_earlier_and_distinct(self):
        geometry = RandomBlockGeometry(length=97, local=1, anchors=0, block=8, blocks=3, seed=5)
        mask = geometry.mask() & ~np.eye(97, dtype=bool)
        for query_block in range(13):
            drawn = geometry.key_blocks(query_block)
            assert len(set(drawn.tolist())) == min(3, query_block) and (drawn < query_block).all()
            keys = np.zeros(97, bool)
            for key_block in drawn:
                keys[key_block * 8 : key_block * 8 + 8] = True
            for row in range(query_block * 8, min(97, query_block * 8 + 8)):
                assert np.array_equal(mask[row], keys)
        assert not np.array_equal(mask, geometry.replace(seed=6).mask() & ~np.eye(97, dtype=bool))

    @pytest.mark.parametrize(
        ("kind", "fields", "message"),
        [
            (WindowGeometry, dict(local=0), "local = 0"),
            (WindowGeometry, dict(anchors=-2), "anchors = -2"),
            (StridedGeometry, dict(stride=0), "stride = 0"),
            (RandomBlockGeometry, dict(blocks=-1), "blocks = -1"),
            (RandomBlockGeometry, dict(blocks=1, block=0), "block = 0"),
            (RandomBlockGeometry, dict(blocks=1, seed=-1), "seed = -1"),
        ],
    )
    def test_refuses_what_is_out_of_range(self, kind, fields, message):
        with pytest.raises(ValueError, match=message):
            kind(length=100, **fields)

    @pytest.mark.parametrize(
        "make",
        [
            lambda i: WindowGeometry(length=2000, local=i, anchors=16),
            lambda i: StridedGeometry(length=2000, local=32, anchors=16, stride=2001 - i),
            lambda i: RandomBlockGeometry(length=2000, local=32, anchors=16, block=8, blocks=i),
            lambda i: PublishedGeometry(length=2000, seeds=i, density=0.001, local=31, anchors=16),
            lambda i: BlockSharedGeometry(length=2000, budget=i, local=32, anchors=16),
        ],
    )
    def test_families_can_be_matched_in_share(self, make):
        fitted = fit_share(make, 0.1, low=1, high=2000)
        # The step to the next member: 6 % of the pairs at most in these families (a stride of 15 or 16).
        assert 0.094 < fitted.share() <= 0.1

    def test_matching_refuses_what_cannot_be(self):
        with pytest.raises(ValueError, match="is too little"):
            fit_share(lambda i: WindowGeometry(length=100, local=i, anchors=50), 0.1, low=1, high=100)
        with pytest.raises(ValueError, match=r"share = 1.2 must be within"):
            fit_share(lambda i: WindowGeometry(length=100, local=i), 1.2, low=1, high=100)


def test_packed_bits_are_in_numpys_order():
    packed = WindowGeometry(length=11, local=2, anchors=1).rows(9, 10)
    assert np.flatnonzero(np.unpackbits(packed[0])).tolist() == [0, 8, 9]
    assert unpack_rows(packed, 11).shape == (1, 11)
