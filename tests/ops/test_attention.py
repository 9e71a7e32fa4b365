"""Attention: the shared contract for both implementations, and what is particular to each."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from plga_jax.ops import attention as attention_module
from plga_jax.ops.attention import attention, merge_partials
from plga_jax.ops.masks import Mask
from tests.ops.attention_cases import CASES, AttentionContract, Case, cotangents, evaluate, oracle

dense = functools.partial(attention, implementation="dense")
blockwise = functools.partial(attention, implementation="blockwise")


class TestDense(AttentionContract):
    attend = staticmethod(dense)


class TestBlockwise(AttentionContract):
    """Blocks of 3: several per case, the last one ragged, many of them empty."""

    attend = staticmethod(functools.partial(blockwise, block_size=3))


@pytest.mark.parametrize("block_size", [1, 2, 4, 5, 16, 1000])
@pytest.mark.parametrize("name", ["pairs", "more keys"])
def test_every_block_size_is_dense(name, block_size, x64):
    q, k, v, mask, _ = CASES[name].make(jnp.float64)
    blocks = functools.partial(blockwise, block_size=block_size)
    got, want = (evaluate(f, q, k, v, mask, *cotangents(q, v)) for f in (blocks, dense))
    chex.assert_trees_all_close(got, want, rtol=1e-12, atol=1e-12)


def test_float32_blocks_at_a_real_length():
    """200 keys, blocks of 64. Largest differences: out and lse 1e-6, gradients 3e-6 (numbers up to 10)."""
    q, k, v, mask, _ = Case(B=1, T=200, N=4, K=2, H=16, mask=lambda rng: Mask(window=90)).make(jnp.float32)
    blocks = functools.partial(blockwise, block_size=64)
    got, want = (evaluate(f, q, k, v, mask, *cotangents(q, v)) for f in (blocks, dense))
    chex.assert_trees_all_close(got[0], want[0], rtol=0, atol=3e-6)
    chex.assert_trees_all_close(got[1], want[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("attend", [dense, blockwise], ids=["dense", "blockwise"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_agrees_with_jax_nn(attend, window):
    q, k, v, _, _ = Case(N=4, K=2, T=9).make(jnp.float32)
    local = None if window is None else (window - 1, 0)  # theirs counts the keys before the query
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)
    np.testing.assert_allclose(attend(q, k, v, Mask(window=window)), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("attend", [dense, blockwise], ids=["dense", "blockwise"])
@pytest.mark.parametrize("T, S", [(3, 0), (0, 3), (0, 0)])
def test_no_keys_or_no_queries(attend, T, S):
    q, k, v = jnp.ones((2, T, 4, 3)), jnp.ones((2, S, 2, 3)), jnp.ones((2, S, 2, 5))
    (out, lse), grads = evaluate(attend, q, k, v, Mask(), jnp.ones((2, T, 4, 5)), jnp.ones((2, T, 4)))
    np.testing.assert_array_equal(out, np.zeros((2, T, 4, 5)))
    np.testing.assert_array_equal(lse, np.full((2, T, 4), -np.inf))
    for grad, x in zip(grads, (q, k, v)):
        np.testing.assert_array_equal(grad, np.zeros(x.shape))


def test_second_derivatives_of_both_agree(x64):
    q, k, v, mask, _ = Case(B=1, T=4, N=1, H=2).make(jnp.float64)

    def curvature(attend):
        slope = jax.grad(lambda q: jnp.sum(attend(q, k, v, mask) ** 2))
        return jax.grad(lambda q: jnp.sum(slope(q) ** 2))(q)

    want = jax.jit(lambda: curvature(dense))()
    assert np.abs(want).max() > 1e-3
    got = jax.jit(lambda: curvature(functools.partial(blockwise, block_size=3)))()
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_dense_has_forward_mode(x64):
    q, k, v, mask, _ = Case().make(jnp.float64)
    f = lambda q: dense(q, k, v, mask)  # noqa: E731
    chex.assert_trees_all_close(jax.jit(jax.jacfwd(f))(q), jax.jit(jax.jacrev(f))(q), rtol=1e-12, atol=1e-12)


def temporary_bytes(f, T, N=2, K=1, H=8):
    q, k, v = (jax.ShapeDtypeStruct((1, T, heads, H), jnp.float32) for heads in (N, K, K))
    return jax.jit(f).lower(q, k, v).compile().memory_analysis().temp_size_in_bytes


def forward(q, k, v, attend):
    return attend(q, k, v, Mask(window=1000))


def backward(q, k, v, attend):
    return jax.grad(lambda *qkv: attend(*qkv, Mask(window=1000)).sum(), (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("program", [forward, backward])
def test_blockwise_memory_grows_with_the_length_not_its_square(program):
    blocks = functools.partial(program, attend=functools.partial(blockwise, block_size=64))
    short, long = temporary_bytes(blocks, 4096), temporary_bytes(blocks, 16384)
    assert long < 4.2 * short
    scores = 2 * 16384**2 * 4
    assert long < scores / 100
    assert temporary_bytes(functools.partial(program, attend=dense), 4096) > 2 * 4096**2 * 4


def test_keys_are_not_repeated_for_grouped_heads():
    """16 query heads on one key head: K and V repeated would be 2 · 16 · S · H numbers more than the one of each."""
    S, H = 4096, 64
    for attend in (dense, functools.partial(blockwise, block_size=64)):
        q, k, v = (jax.ShapeDtypeStruct((1, t, n, H), jnp.float32) for t, n in ((2, 16), (S, 1), (S, 1)))
        memory = jax.jit(attend).lower(q, k, v, Mask()).compile().memory_analysis().temp_size_in_bytes
        assert memory < 8 * S * H * 4


def test_blocks_that_meet_nothing_are_skipped(monkeypatch):
    """Of 4 x 4 blocks a causal mask leaves 10 and a window of one block 7, forward and again backward."""
    computed = []
    scores = attention_module._scores

    def counted(*args):
        jax.debug.callback(lambda: computed.append(1))
        return scores(*args)

    monkeypatch.setattr(attention_module, "_scores", counted)
    q, k, v, _, _ = Case(B=1, T=16, N=1, H=2).make(jnp.float32)
    for mask, blocks in ((Mask(), 10), (Mask(window=4), 7), (None, 16)):
        computed.clear()
        loss = lambda q, mask=mask: blockwise(q, k, v, mask, block_size=4).sum()  # noqa: E731
        jax.block_until_ready(jax.jit(jax.grad(loss))(q))
        jax.effects_barrier()
        assert len(computed) == 2 * blocks


class TestMerge:
    @pytest.mark.parametrize("cuts", [[3], [1, 2, 6], [0, 5]])
    def test_parts_of_the_keys_merge_into_the_whole(self, cuts, x64):
        q, k, v, mask, _ = CASES["packed"].make(jnp.float64)
        table = jnp.asarray(mask.as_array(12, 12))
        edges = [0, *cuts, 12]

        def merged(q, k, v, mask=None, *, scale=None, return_lse=True):
            parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
            partial = lambda p: dense(  # noqa: E731
                q, k[:, p], v[:, p], Mask(causal=False, pairs=table[..., p]), return_lse=True
            )
            return merge_partials([partial(p) for p in parts])

        got, want = (evaluate(f, q, k, v, mask, *cotangents(q, v)) for f in (merged, dense))
        assert (want[0][1] == -jnp.inf).any()
        chex.assert_tree_all_finite(got[1])
        chex.assert_trees_all_close(got, want, rtol=1e-12, atol=1e-13)

    def test_order_does_not_matter_when_maxima_are_far_apart(self, x64):
        """Blocks with scores of -1e4, 0, 1e4 in every order: each rescales what came before, both ways."""
        q, k, v, _, _ = Case(B=1, T=2, S=6, N=1, H=1).make(jnp.float64)
        q, k = jnp.ones_like(q), jnp.array([-1e4, -1e4 + 1, 0.0, 1.0, 1e4, 1e4 - 1]).reshape(1, 6, 1, 1)
        order = np.arange(6).reshape(3, 2)
        attend = jax.jit(functools.partial(blockwise, block_size=2, return_lse=True))
        for permutation in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]):
            at = order[permutation].ravel()
            out, lse = attend(q, k[:, at], v[:, at])
            want_out, want_lse = oracle(q, k, v, np.ones((1, 1, 2, 6), bool), None)
            np.testing.assert_allclose(out, want_out, rtol=1e-12)
            np.testing.assert_allclose(lse, want_lse, rtol=1e-15)

    def test_nothing_and_nothing_is_nothing_with_no_gradient(self):
        out, lse = jnp.full((2, 3), jnp.nan), jnp.full((2,), -jnp.inf)
        merged, pullback = jax.vjp(lambda o, s: merge_partials([(o, s), (o, s)]), out, lse)
        np.testing.assert_array_equal(merged[0], np.zeros((2, 3)))
        np.testing.assert_array_equal(merged[1], np.full(2, -np.inf))
        for grad in pullback((jnp.full((2, 3), jnp.nan), jnp.ones(2))):
            np.testing.assert_array_equal(grad, np.zeros(grad.shape))

    def test_nothing_changes_nothing(self):
        out, lse = jnp.arange(6.0).reshape(2, 3), jnp.array([-3.0, 200.0])
        nothing = jnp.full((2, 3), jnp.nan), jnp.full((2,), -jnp.inf)
        for partials in ([(out, lse), nothing], [nothing, (out, lse)], [(out, lse)]):
            chex.assert_trees_all_equal(merge_partials(partials), (out, lse))

    def test_a_broken_part_breaks_its_row_only(self):
        out, lse = jnp.ones((2, 3)), jnp.zeros(2)
        broken = out.at[0].set(jnp.nan), lse.at[0].set(jnp.nan)
        merged = merge_partials([(out, lse), broken])
        assert np.isnan(merged[0][0]).all() and np.isnan(merged[1][0])
        np.testing.assert_array_equal(merged[0][1], np.ones(3))

    def test_keeps_the_dtypes(self):
        part = jnp.ones((2, 3), jnp.bfloat16), jnp.zeros(2, jnp.float32)
        out, lse = merge_partials([part, part])
        assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)

    def test_bad_partials(self):
        part = jnp.ones((2, 3)), jnp.zeros(2)
        with pytest.raises(ValueError, match="at least one"):
            merge_partials([])
        with pytest.raises(ValueError, match=r"agree in shape.*\(4,\)"):
            merge_partials([part, (jnp.ones((4, 3)), jnp.zeros(4))])
        with pytest.raises(ValueError, match="agree in shape"):
            merge_partials([(jnp.ones((2, 3)), jnp.zeros((2, 3)))])


@pytest.mark.parametrize("attend", [dense, functools.partial(blockwise, block_size=3)], ids=["dense", "blockwise"])
@pytest.mark.parametrize("split", ["batch", "queries"])
def test_inside_shard_map(split, attend):
    """Each of four devices holds a row of the batch, or a quarter of the queries and all keys."""
    q, k, v, _, _ = Case(B=4, T=8, N=2, K=1).make(jnp.float32)
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,))
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32)[None], (4, 8))
    rows, keys = (P("x"), P("x")) if split == "batch" else (P(None, "x"), P())

    def here(q, k, v, p):
        return attend(q, k, v, Mask(q_positions=p))

    total = lambda f: jax.value_and_grad(lambda q, k, v, p: jnp.sum(f(q, k, v, p) ** 2), (0, 1, 2))  # noqa: E731
    got = jax.jit(total(jax.shard_map(here, mesh=mesh, in_specs=(rows, keys, keys, rows), out_specs=rows)))
    want = jax.jit(total(here))
    # Sums in another order; largest difference 8e-6, in a sum of 1e2.
    chex.assert_trees_all_close(got(q, k, v, positions), want(q, k, v, positions), rtol=1e-5, atol=1e-5)


def test_none_chooses_by_shape(monkeypatch):
    chosen = []
    for name in ("_dense", "_blockwise"):
        original = getattr(attention_module, name)
        monkeypatch.setattr(
            attention_module, name, lambda *args, name=name, f=original: chosen.append(name) or f(*args)
        )
    for T, S in [(1, 100_000), (512, 512), (513, 512), (2048, 2048)]:
        q, kv = jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32), jax.ShapeDtypeStruct((1, S, 1, 8), jnp.float32)
        jax.eval_shape(attention, q, kv, kv)
    assert chosen == ["_dense", "_dense", "_blockwise", "_blockwise"]


Q, KV = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 5, 2, 8), np.float32)
BAD = {
    "unknown implementation": (dict(implementation="flash"), r"'dense', 'blockwise'.*'flash'"),
    "three axes": (dict(q=Q[0]), r"q \[3, 4, 8\]"),
    "batches": (dict(q=Q[:1]), r"agree in B.*q \[1, 3, 4, 8\]"),
    "lengths": (dict(v=KV[:, :4]), r"agree in B, S.*v \[2, 4, 2, 8\]"),
    "widths": (dict(q=Q[..., :4]), r"agree.*q \[2, 3, 4, 4\]"),
    "heads": (dict(q=Q[:, :, :3]), r"multiple.*q \[2, 3, 3, 8\]"),
    "no heads": (dict(k=KV[:, :, :0], v=KV[:, :, :0]), "at least 1"),
    "dtypes": (dict(k=KV.astype(jnp.bfloat16)), "one floating dtype.*bfloat16"),
    "integers": (dict(q=Q.astype(int), k=KV.astype(int), v=KV.astype(int)), "floating"),
    "array scale": (dict(scale=np.ones(1)), "fold a traced scale into q"),
    "block of none": (dict(block_size=0), "block_size must be an integer >= 1, got 0"),
    "mask of other lengths": (dict(mask=Mask(k_valid=np.ones((2, 4), bool))), r"S=5.*got \[2, 4\]"),
    "mask of other heads": (dict(mask=Mask(pairs=np.ones((2, 3, 3, 5), bool))), "N=4"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_say_what_would_do(name):
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        attention(**(dict(q=Q, k=KV, v=KV) | arguments))
