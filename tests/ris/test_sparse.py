"""The sparse cache against a dense oracle that is told which blocks were chosen."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.probe import ProbeGeometry
from ris_jax.sparse import SparseCache

CONFIG = DecoderConfig(
    vocab_size=40, num_layers=3, num_heads=6, num_kv_heads=2, head_width=8, model_width=24, hidden_width=32,
    context=256, param_dtype="float64", compute_dtype="float64",
)  # fmt: skip
T = 75
GEOMETRY = ProbeGeometry(
    length=96,
    local=9,
    anchors=3,
    block=4,
    blocks=3,
    stride=8,
    recall=((0, 1), (2, 0), (2, 1)),
    recall_stride=1,
    ranking="best",
)


@pytest.fixture
def model(x64):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    # Embeddings of deviation 1 and larger maps, so that attention is uneven and blocks differ.
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: 3 * x if x.ndim > 2 else x, state))


@pytest.fixture
def tokens(x64):
    return jnp.asarray(np.random.default_rng(0).integers(0, 40, (1, T)), jnp.int32)


def read(model, tokens, cache, chunks, segments=None):
    extend = jax.jit(lambda m, t, c, s: m.extend(t, c, segment_ids=s))
    logits, start = [], 0
    for size in chunks:
        part = None if segments is None else segments[:, start : start + size]
        found, cache = extend(model, tokens[:, start : start + size], cache, part)
        logits.append(found)
        start += size
    return jnp.concatenate(logits, axis=1), cache


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Dense attention with the mask that the geometry's words describe, made row by row in NumPy."""

    geometry: ProbeGeometry

    def __call__(self, layer, q, k, v):
        geometry = self.geometry
        T, N, H = q.shape
        K = k.shape[1]
        scores = np.einsum("tkgh,skh->kgts", q.reshape(T, K, N // K, H), k) * H**-0.5
        causal = np.tril(np.ones((T, T), bool))
        out, pairs = np.zeros((T, K, N // K, H)), np.zeros(K)
        for head in range(K):
            stride = geometry.recall_stride if (layer, head) in geometry.recall else geometry.stride
            for t in range(T):
                probe = t - t % stride
                wanted = {}
                seen = np.where(causal[probe], scores[head, :, probe], -np.inf)
                ranking = "best" if (layer, head) in geometry.recall else geometry.ranking
                wants = np.full((N // K, probe // geometry.block + 1), -np.inf)
                for block in range(wants.shape[1]):
                    keys = np.arange(block * geometry.block, min((block + 1) * geometry.block, T))
                    if ranking == "pooled" and keys[-1] <= probe:
                        mean = k[keys, head].mean(0)
                        wants[:, block] = q.reshape(T, K, N // K, H)[probe, head] @ mean * H**-0.5
                    elif ranking != "pooled":
                        wants[:, block] = (
                            seen[:, keys].max(-1) if ranking == "best" else np.log(np.exp(seen[:, keys]).sum(-1))
                        )
                top = wants.max(-1) if ranking != "mass" else np.log(np.exp(wants).sum(-1))
                relative = (wants - np.where(top == -np.inf, 0, top)[:, None]).max(0)
                for block in range(probe // geometry.block + 1):
                    first = block * geometry.block
                    if first > probe + stride - 1 - geometry.local or first + geometry.block <= geometry.anchors:
                        continue
                    if relative[block] > -np.inf:
                        wanted[block] = relative[block]
                best = sorted(wanted, key=lambda b: -wanted[b])[: int(geometry.chosen(np.int64(probe)))]
                s = np.arange(T)
                meet = (s <= t) & (
                    (t - s < geometry.local) | (s < geometry.anchors) | np.isin(s // geometry.block, best)
                )
                pairs[head] += meet.sum()
                p = np.exp(scores[head, :, t] - scores[head, :, t][:, meet].max(-1, keepdims=True)) * meet
                out[t, head] = p / p.sum(-1, keepdims=True) @ v[:, head]
        return out.reshape(T, N, H), pairs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stride": 64, "density": 0.5},
        {"ranking": "mass"},
        {"block": 8, "anchors": 0, "ranking": "pooled", "recall": ()},
    ],
)
def test_reads_what_the_words_say(model, tokens, changes):
    geometry = GEOMETRY.replace(**changes)
    oracle = Oracle(geometry)
    cache = SparseCache.open(geometry, CONFIG)
    rng = np.random.default_rng(1)
    slots, valid = jnp.arange(T, dtype=jnp.int32)[None], jnp.ones((1, T), bool)
    for layer in range(3):
        q, k, v = (rng.normal(size=(1, T, heads, 8)) for heads in (6, 2, 2))
        cache = cache.append(layer, jnp.asarray(k), jnp.asarray(v), slots, valid)
        out, cache = jax.jit(lambda c, q, i=layer: c.attend(i, q, slots, valid, None, scale=8**-0.5))(
            cache, jnp.asarray(q)
        )
        expected, pairs = oracle(layer, q[0], k[0], v[0])
        chex.assert_trees_all_close(out[0], expected, atol=1e-12)
        chex.assert_trees_all_close(np.asarray(cache.pairs[layer, 0], np.float64), pairs)


@pytest.mark.parametrize("chunks", [[1] * T, [64, 1, 10]])
@pytest.mark.parametrize("changes", [{}, {"stride": 64, "recall_stride": 4, "random": 1, "density": 0.4}])
def test_chunks_change_nothing(model, tokens, chunks, changes):
    geometry = GEOMETRY.replace(**changes)
    whole, _ = read(model, tokens, SparseCache.open(geometry, CONFIG), [T])
    parts, cache = read(model, tokens, SparseCache.open(geometry, CONFIG), chunks)
    chex.assert_trees_all_close(parts, whole, atol=1e-10)
    assert int(cache.length[0]) == T


def test_later_tokens_change_nothing(model, tokens):
    other = tokens.at[:, 50:].set((tokens[:, 50:] + 1) % 40)
    a, _ = read(model, tokens, SparseCache.open(GEOMETRY, CONFIG), [T])
    b, _ = read(model, other, SparseCache.open(GEOMETRY, CONFIG), [T])
    chex.assert_trees_all_equal(a[:, :50], b[:, :50])
    assert not np.allclose(a[:, 50:], b[:, 50:])


def test_everything_chosen_is_dense(model, tokens):
    geometry = GEOMETRY.replace(blocks=24)
    found, cache = read(model, tokens, SparseCache.open(geometry, CONFIG), [T])
    dense, _ = model(tokens)
    chex.assert_trees_all_close(found, dense, atol=1e-10)
    chex.assert_trees_all_close(cache.real_share(), jnp.ones(1), atol=1e-6)


def test_batches_and_padding_change_nothing(model, tokens):
    lengths = (T, 30, 51)
    rows = [tokens[:, :n] for n in lengths]
    singles = [read(model, row, SparseCache.open(GEOMETRY, CONFIG), [row.shape[1]])[0] for row in rows]
    block, segments = np.zeros((3, T), np.int32), np.zeros((3, T), np.int32)
    for i, (row, lead) in enumerate(zip(rows, (0, 4, 0))):
        block[i, lead : lead + row.shape[1]], segments[i, lead : lead + row.shape[1]] = row[0], 1
    together, cache = read(
        model, jnp.asarray(block), SparseCache.open(GEOMETRY, CONFIG, batch=3), [40, 35], jnp.asarray(segments)
    )
    for i, single in enumerate(singles):
        chex.assert_trees_all_close(together[i][segments[i] > 0], single[0], atol=1e-10)
    chex.assert_trees_all_equal(cache.length, jnp.asarray(lengths, jnp.int32))


def test_rewinding_is_exact(model, tokens):
    extend = jax.jit(lambda m, t, c: m.extend(t, c), donate_argnums=2)
    _, cache = extend(model, tokens[:, :45], SparseCache.open(GEOMETRY, CONFIG))
    mark = cache.mark()
    first, cache = extend(model, tokens[:, 45:], cache)
    _, cache = extend(model, tokens[:, :9], cache.rewind(mark))
    again, _ = extend(model, tokens[:, 45:], cache.rewind(mark))
    chex.assert_trees_all_equal(again, first)


@pytest.mark.parametrize("block", [1, 4])
def test_shared_samples_equal_their_mask(model, tokens, block):
    geometry = BlockSharedGeometry(length=T, budget=8, local=9, anchors=4, tile=16, block=block)
    cache = SparseCache.open(geometry, CONFIG)
    rng = np.random.default_rng(1)
    slots, valid = jnp.arange(T, dtype=jnp.int32)[None], jnp.ones((1, T), bool)
    q, k, v = (jnp.asarray(rng.normal(size=(1, T, heads, 8))) for heads in (6, 2, 2))
    cache = cache.append(1, k, v, slots, valid)
    out, cache = cache.attend(1, q, slots, valid, None, scale=8**-0.5)
    for head in range(2):
        mask = np.unpackbits(geometry.rows(0, T, layer=2 + head), axis=1)[:, :T].astype(bool)
        scores = jnp.where(
            mask, jnp.einsum("tgh,sh->gts", q[0, :, 3 * head : 3 * head + 3], k[0, :, head]) * 8**-0.5, -jnp.inf
        )
        expected = jnp.einsum("gts,sh->tgh", jax.nn.softmax(scores, -1), v[0, :, head])
        chex.assert_trees_all_close(out[0, :, 3 * head : 3 * head + 3], expected, atol=1e-12)
        assert int(cache.pairs[1, 0, head]) == mask.sum()


def test_memory_at_64k():
    """A chunk needs no T×T bits, and a narrow cache is never widened whole."""
    T = 2**16
    config = dataclasses.replace(CONFIG, param_dtype="float32", compute_dtype="float32", context=T)
    model = Decoder(config, rngs=nnx.Rngs(0))
    geometry = ProbeGeometry(length=T, recall=((0, 1),))
    caches = {
        dtype: jax.eval_shape(lambda dtype=dtype: SparseCache.open(geometry, config, dtype=dtype))
        for dtype in (jnp.float32, jnp.bfloat16)
    }
    extend = jax.jit(lambda m, t, c: m.extend(t, c, last_only=True), donate_argnums=2)
    programs = {
        dtype: extend.lower(model, jax.ShapeDtypeStruct((1, 64), jnp.int32), cache).compile().memory_analysis()
        for dtype, cache in caches.items()
    }
    wide, narrow = programs[jnp.float32], programs[jnp.bfloat16]
    assert wide.temp_size_in_bytes < T * T / 8 / 16
    held = 2 * caches[jnp.float32].keys.size * 4
    assert narrow.temp_size_in_bytes < wide.temp_size_in_bytes + held / 4
    assert wide.alias_size_in_bytes >= held


def test_a_narrow_cache_rounds_once():
    config = dataclasses.replace(CONFIG, param_dtype="float32", compute_dtype="float32")
    geometry = GEOMETRY.replace(blocks=24)
    k, v, q = (jax.random.normal(jax.random.key(i), (1, 20, heads, 8)) for i, heads in enumerate((2, 2, 6)))
    slots, valid = jnp.arange(20, dtype=jnp.int32)[None], jnp.ones((1, 20), bool)
    outs = []
    for dtype, rounded in ((jnp.bfloat16, k), (jnp.float32, k.astype(jnp.bfloat16).astype(jnp.float32))):
        cache = SparseCache.open(geometry, config, dtype=dtype)
        values = v.astype(jnp.bfloat16).astype(jnp.float32)
        outs.append(cache.append(0, rounded, values, slots, valid).attend(0, q, slots, valid, None, scale=1.0)[0])
    chex.assert_trees_all_equal(*outs)


def test_answers_choose_as_they_are_told(model, tokens):
    extend = jax.jit(lambda m, t, c: m.extend(t, c))
    _, cache = extend(model, tokens[:, :40], SparseCache.open(GEOMETRY, CONFIG))

    def answer(**policy):
        lent = cache.respond(**policy)
        for t in range(40, 48):
            logits, lent = extend(model, tokens[:, t : t + 1], lent)
        return logits, lent

    default, lent = answer()
    # A short text is ranked for an answer as it is for reading, so decoding goes on as reading would.
    read_on, _ = read(model, tokens[:, :48], SparseCache.open(GEOMETRY, CONFIG), [48])
    chex.assert_trees_all_close(default[:, 0], read_on[:, -1], atol=1e-10)
    frozen, held = answer(policy="frozen")
    chex.assert_trees_all_equal(held.chosen, cache.chosen)
    own, _ = answer(policy="own")
    assert not np.allclose(frozen, default) and not np.allclose(own, frozen)
    assert lent.close().geometry == held.close().geometry == GEOMETRY
    assert held.geometry.stride > 2**20 and held.reading == GEOMETRY
    with pytest.raises(ValueError, match="policy = 'never'"):
        cache.respond(policy="never")


def test_ranking_stays_cheap_in_long_windows():
    short, long = (ProbeGeometry(length=length, recall=((0, 0),)) for length in (8192, 131_072))
    assert short.thinned() == short
    assert (long.thinned().stride, long.thinned().recall_stride) == (512, 8)
    assert short.answering().recall_stride == 2 and long.answering().recall_stride == 32
    # One head of 90 at every query, the others at every 64th.
    assert short.ranking_share(30, 3) == pytest.approx(1 / 90 + 89 / 90 / 64)
