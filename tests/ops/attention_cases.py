"""What every implementation of attention must do: named shapes, a NumPy oracle, and one class of tests.

To hold an implementation to the contract, subclass and say how to call it:

    class TestRing(AttentionContract):
        attend = staticmethod(ring_attention)           # (q, k, v, mask=None, *, scale=None, return_lse=False)

`supports` may decline a case (shapes that do not divide over devices). Benchmarks use the same shapes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from plga_jax.ops.masks import Mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, and a mask made from a random generator; None means that everything meets."""

    B: int = 2
    T: int = 7
    S: int | None = None
    N: int = 2
    K: int | None = None
    H: int = 4
    V: int | None = None
    scale: float | None = None
    mask: Callable[[np.random.Generator], Mask] | None = lambda rng: Mask()

    @property
    def shapes(self):
        S, K, V = self.S or self.T, self.K or self.N, self.V or self.H
        return (self.B, self.T, self.N, self.H), (self.B, S, K, self.H), (self.B, S, K, V)

    def make(self, dtype, seed=0):
        """q, k, v, mask, and bool [B, N, T, S]."""
        rng = np.random.default_rng(seed)
        q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in self.shapes)
        mask = None if self.mask is None else self.mask(rng)
        (B, T, N, _), S = q.shape, k.shape[1]
        meet = True if mask is None else np.asarray(mask.as_array(T, S))
        return q, k, v, mask, np.broadcast_to(meet, (B, N, T, S))


def _some(rng, *shape):
    return jnp.asarray(rng.random(shape) < 0.6)


def _sorted(rng, high, *shape):
    return jnp.asarray(np.sort(rng.integers(0, high, shape), axis=-1), jnp.int32)


CASES = {
    "causal": Case(),
    "everything meets": Case(mask=None),
    "one": Case(B=1, T=1, N=1, H=1),
    "odd sizes": Case(B=3, T=11, S=5, N=3, H=5, V=3, mask=lambda rng: Mask(causal=False)),
    "grouped heads": Case(N=6, K=2, H=3),
    "one key head": Case(N=4, K=1),
    "wide values": Case(H=2, V=9, N=4, K=2),
    "more keys": Case(T=4, S=13, mask=lambda rng: Mask(q_positions=jnp.arange(9, 13)[None])),
    "more queries": Case(T=13, S=4),
    "decode": Case(B=3, T=1, S=9, N=4, K=2, mask=lambda rng: Mask(q_positions=jnp.array([[0], [5], [8]]))),
    "window": Case(T=12, mask=lambda rng: Mask(window=3)),
    "window 1": Case(mask=lambda rng: Mask(window=1)),
    "ring buffer": Case(mask=lambda rng: Mask(window=4, k_positions=jnp.array([[4, 5, 6, 0, 1, 2, 3]]))),
    "packed": Case(T=12, mask=lambda rng: Mask.packed(_sorted(rng, 4, 2, 12))),
    "left padding": Case(mask=lambda rng: Mask.padding(jnp.array([[False] * 3 + [True] * 4, [True] * 7]))),
    "right padding": Case(mask=lambda rng: Mask.padding(jnp.array([[True] * 4 + [False] * 3, [True] * 7]))),
    "pairs": Case(N=4, K=2, mask=lambda rng: Mask(causal=False, pairs=_some(rng, 2, 4, 7, 7))),
    "pairs of all heads": Case(N=4, K=2, mask=lambda rng: Mask(pairs=_some(rng, 1, 1, 7, 7))),
    "nothing meets": Case(mask=lambda rng: Mask(causal=False, pairs=jnp.zeros((1, 1, 7, 7), bool))),
    "own scale": Case(scale=1.5),
}


def oracle(q, k, v, meet, scale):
    """The definition in float64, one row at a time: out [B, T, N, V], lse [B, T, N]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (B, T, N, H), K = q.shape, k.shape[2]
    scale = H**-0.5 if scale is None else scale
    out, lse = np.zeros((B, T, N, v.shape[-1])), np.full((B, T, N), -np.inf)
    for b, t, n in itertools.product(range(B), range(T), range(N)):
        keys = np.flatnonzero(meet[b, n, t])
        if len(keys):
            head = n // (N // K)
            s = scale * k[b, keys, head] @ q[b, t, n]
            e = np.exp(s - s.max())
            lse[b, t, n] = s.max() + np.log(e.sum())
            out[b, t, n] = e @ v[b, keys, head] / e.sum()
    return out, lse


def oracle_gradients(q, k, v, meet, scale, d_out, d_lse):
    """The softmax Jacobian written out in float64: dq, dk, dv."""
    q, k, v, d_out, d_lse = (np.asarray(x, np.float64) for x in (q, k, v, d_out, d_lse))
    (B, _, N, H), K = q.shape, k.shape[2]
    scale = H**-0.5 if scale is None else scale
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, n in itertools.product(range(B), range(N)):
        head = n // (N // K)
        for t, keys in enumerate(meet[b, n]):
            keys = np.flatnonzero(keys)
            if not len(keys):
                continue
            s = scale * k[b, keys, head] @ q[b, t, n]
            p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
            ds = (np.diag(p) - np.outer(p, p)) @ v[b, keys, head] @ d_out[b, t, n] + p * d_lse[b, t, n]
            dq[b, t, n] += scale * ds @ k[b, keys, head]
            dk[b, keys, head] += scale * np.outer(ds, q[b, t, n])
            dv[b, keys, head] += np.outer(p, d_out[b, t, n])
    return dq, dk, dv


@functools.cache
def _evaluator(attend, scale):
    def evaluate(q, k, v, mask, d_out, d_lse):
        results, pullback = jax.vjp(lambda *qkv: attend(*qkv, mask, scale=scale, return_lse=True), q, k, v)
        return results, pullback((d_out, d_lse))

    return jax.jit(evaluate)


def evaluate(attend, q, k, v, mask, d_out, d_lse, scale=None):
    """((out, lse), (dq, dk, dv)) for given cotangents of out and lse, compiled once per implementation and shapes."""
    return _evaluator(attend, scale)(q, k, v, mask, d_out, d_lse)


def cotangents(q, v, dtype=None, seed=1):
    rng = np.random.default_rng(seed)
    B, T, N, _ = q.shape
    d_out = jnp.asarray(rng.standard_normal((B, T, N, v.shape[-1])), q.dtype)
    return d_out, jnp.asarray(rng.standard_normal((B, T, N)), dtype or q.dtype)


class AttentionContract:
    """The tests; `attend` is the implementation."""

    attend: Callable

    def supports(self, case: Case) -> bool:
        return True

    def case(self, name: str) -> Case:
        case = CASES[name]
        if not self.supports(case):
            pytest.skip(f"declines {case}")
        return case

    @pytest.mark.parametrize("name", CASES)
    def test_results_and_gradients_are_the_definition(self, name, x64):
        case = self.case(name)
        q, k, v, mask, meet = case.make(jnp.float64)
        d_out, d_lse = cotangents(q, v)
        results, grads = evaluate(self.attend, q, k, v, mask, d_out, d_lse, case.scale)
        assert {x.dtype for x in (*results, *grads)} == {jnp.dtype("float64")}
        for got, want in zip(results, oracle(q, k, v, meet, case.scale)):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        for got, want in zip(grads, oracle_gradients(q, k, v, meet, case.scale, d_out, d_lse)):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)

    def test_eager_is_jitted(self, x64):
        q, k, v, mask, _ = self.case("causal").make(jnp.float64)
        want, _ = evaluate(self.attend, q, k, v, mask, *cotangents(q, v))
        chex.assert_trees_all_close(self.attend(q, k, v, mask, return_lse=True), want, rtol=1e-14, atol=1e-14)
        chex.assert_trees_all_equal(self.attend(q, k, v, mask), self.attend(q, k, v, mask, return_lse=True)[0])

    @pytest.mark.parametrize("name", ["causal", "packed"])
    @pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 3e-2)])
    def test_low_precision_stays_near_the_definition(self, name, dtype, tolerance):
        """Numbers are of order 1 to 4. float32: largest error 4e-7. bfloat16: eps is 8e-3 and the inputs are
        exact in the oracle too, so what remains is the rounding of p, ds and the results: largest error 8e-3.
        """
        case = self.case(name)
        q, k, v, mask, meet = case.make(dtype)
        d_out, d_lse = cotangents(q, v, jnp.float32)
        (out, lse), got = evaluate(self.attend, q, k, v, mask, d_out, d_lse)
        assert {x.dtype for x in (out, *got)} == {jnp.dtype(dtype)}
        assert lse.dtype == jnp.float32
        want_out, want_lse = oracle(q, k, v, meet, None)
        np.testing.assert_allclose(lse, want_lse, rtol=0, atol=2e-6)  # statistics are float32 for bfloat16 too
        np.testing.assert_allclose(out.astype(jnp.float32), want_out, rtol=0, atol=tolerance)
        want = oracle_gradients(q, k, v, meet, None, d_out, d_lse)
        for one, other in zip(got, want):
            np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=tolerance, atol=tolerance)

    def test_reverse_mode_agrees_with_differences(self, x64):
        q, k, v, mask, _ = self.case("left padding").make(jnp.float64)
        attend = jax.jit(lambda *qkv: self.attend(*qkv, mask))
        check_grads(attend, (q, k, v), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("name", ["left padding", "packed", "nothing meets"])
    def test_empty_rows_are_zero_and_take_no_part(self, name):
        """Also when the row is rubbish: its query and the cotangents that arrive at it are NaN."""
        q, k, v, mask, meet = self.case(name).make(jnp.float32)
        empty = ~meet.any(-1).transpose(0, 2, 1)
        assert empty.any()
        d_out, d_lse = cotangents(q, v)
        _, want = evaluate(self.attend, q, k, v, mask, d_out, d_lse)
        bad = lambda x: jnp.where(empty if x.ndim == 3 else empty[..., None], jnp.full_like(x, jnp.nan), x)  # noqa: E731
        (out, lse), got = evaluate(self.attend, bad(q), k, v, mask, bad(d_out), bad(d_lse))
        assert (out[empty] == 0).all() and (lse[empty] == -jnp.inf).all()
        assert np.isfinite(out).all() and np.isfinite(lse[~empty]).all()
        assert (got[0][empty] == 0).all()
        chex.assert_trees_all_equal(got, want)

    @pytest.mark.parametrize(
        "name, b, s", [("causal", 0, 3), ("right padding", 0, 5), ("packed", 1, 6), ("pairs", 0, 3), ("decode", 2, 4)]
    )
    def test_rubbish_reaches_the_rows_that_meet_it_and_no_other(self, name, b, s):
        q, k, v, mask, meet = self.case(name).make(jnp.float32)
        (B, T, N, _), K = q.shape, k.shape[2]
        head = K - 1
        sees = np.zeros((B, T, N), bool)
        sees[b, :, head * (N // K) :] = meet[b, head * (N // K) :, :, s].T
        assert not sees.all() and (sees.any() or name == "right padding")
        # A loss of the rows that do not see it.
        d_out, d_lse = (jnp.where(sees[..., None] if x.ndim == 4 else sees, 0, x) for x in cotangents(q, v))
        (clean_out, clean_lse), clean_grads = evaluate(self.attend, q, k, v, mask, d_out, d_lse)
        for rubbish in (np.nan, np.inf, -np.inf):
            for broken in ((k.at[b, s, head, 0].set(rubbish), v), (k, v.at[b, s, head, -1].set(rubbish))):
                (out, lse), grads = evaluate(self.attend, q, *broken, mask, d_out, d_lse)
                assert np.isnan(out[sees]).all() and np.isnan(lse[sees]).all()
                np.testing.assert_array_equal(out[~sees], clean_out[~sees])
                np.testing.assert_array_equal(lse[~sees], clean_lse[~sees])
                chex.assert_trees_all_equal(grads, clean_grads)

    def test_a_broken_query_breaks_its_row_only(self):
        q, k, v, mask, _ = self.case("causal").make(jnp.float32)
        cotangent = cotangents(q, v)
        (out, lse), _ = evaluate(self.attend, q.at[0, 3, 1, 2].set(jnp.nan), k, v, mask, *cotangent)
        (clean, _), _ = evaluate(self.attend, q, k, v, mask, *cotangent)
        broken = np.zeros(lse.shape, bool)
        broken[0, 3, 1] = True
        np.testing.assert_array_equal(np.isnan(lse), broken)
        np.testing.assert_array_equal(np.isnan(out).all(-1), broken)
        np.testing.assert_array_equal(out[~broken], clean[~broken])

    @pytest.mark.parametrize("window", [None, 3])
    def test_causality_by_gradient(self, window):
        """Row t moves with keys and values max(0, t-w+1) .. t, each of them, and with no other."""
        q, k, v, _, _ = self.case("causal").make(jnp.float32)
        mask = Mask(window=window)
        row = lambda t, k, v: self.attend(q, k, v, mask)[0, t].sum()  # noqa: E731
        grads = jax.jit(jax.vmap(jax.grad(row, argnums=(1, 2)), in_axes=(0, None, None)))(jnp.arange(7), k, v)
        want = np.array(mask.as_array(7, 7)[0, 0])
        dk, dv = (np.abs(g).sum((1, 3, 4)) > 0 for g in grads)
        np.testing.assert_array_equal(dv, want)
        want[0, 0] = dk[0, 0]  # softmax over one key does not depend on it, up to rounding
        np.testing.assert_array_equal(dk, want)

    def test_vmap_is_a_loop(self):
        case = self.case("packed")
        made = [case.make(jnp.float32, seed) for seed in range(3)]
        made = [(*m[:4], *cotangents(m[0], m[2], seed=seed)) for seed, m in enumerate(made)]
        stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
        got = jax.jit(jax.vmap(functools.partial(evaluate, self.attend)))(*stack(*made))
        want = stack(*(evaluate(self.attend, *m) for m in made))
        chex.assert_trees_all_close(got, want, rtol=1e-6, atol=2e-6)  # a batched product may sum in another order

    def test_decoding_row_by_row_is_the_full_pass(self, x64):
        """Each query alone against a cache whose later slots hold rubbish."""
        q, k, v, _, _ = self.case("grouped heads").make(jnp.float64)
        (whole, _), _ = evaluate(self.attend, q, k, v, Mask(), *cotangents(q, v))
        step = jax.jit(self.attend)
        for t in range(q.shape[1]):
            cache = (x.at[:, t + 1 :].set(jnp.nan) for x in (k, v))
            mask = Mask(q_positions=jnp.full((2, 1), t, jnp.int32))
            row = step(q[:, t : t + 1], *cache, mask)
            np.testing.assert_allclose(row, whole[:, t : t + 1], rtol=1e-13, atol=1e-13)

    def test_identity_operator_is_sdpa_to_the_last_bit(self):
        q, k, v, mask, _ = self.case("causal").make(jnp.float32)
        operator = jnp.broadcast_to(jnp.eye(q.shape[-1]), (q.shape[0], q.shape[2], q.shape[-1], q.shape[-1]))
        plga = jax.jit(lambda q, k, v: self.attend(jnp.einsum("btnh,bnhj->btnj", q, operator), k, v, mask))
        sdpa = jax.jit(lambda q, k, v: self.attend(q, k, v, mask))
        np.testing.assert_array_equal(plga(q, k, v), sdpa(q, k, v))

    def test_huge_scores(self, x64):
        """Scores of ±1e4, whose exponentials overflow; the largest decides."""
        q, k, v, mask, meet = self.case("causal").make(jnp.float64)
        q, k = 1e2 * jnp.sign(q), 5e1 * jnp.sign(k)
        (out, lse), _ = evaluate(self.attend, q, k, v, mask, *cotangents(q, v))
        want_out, want_lse = oracle(q, k, v, meet, None)
        assert np.abs(want_lse).max() == 1e4
        np.testing.assert_allclose(out, want_out, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-12)

    def test_traces_once_per_shape(self):
        attend = jax.jit(chex.assert_max_traces(self._attend, n=1))
        for seed in range(3):
            q, k, v, _, _ = self.case("decode").make(jnp.float32, seed)
            attend(q, k, v, Mask(q_positions=jnp.full((3, 1), seed, jnp.int32)))

    def _attend(self, q, k, v, mask):
        return self.attend(q, k, v, mask)
