"""Softmax attention over the pairs a mask lets meet: dense, or block by block in memory linear in length.

    out[t] = sum_s p[t, s] v[s]
    p[t, s] = exp(scale q[t]·k[s] - lse[t])
    lse[t] = log sum_s exp(scale q[t]·k[s])

with the sums over the keys s that t meets. Another bilinear form q·(G k) needs nothing here: fold
G into the query, `q @ G`.

The contract, the same for every implementation, forward and gradient:

* Masks are values (`plga_jax.ops.masks.Mask`), never additive biases.
* A row that meets nothing gives output 0 and lse -inf, and neither gives nor receives a gradient.
  With S = 0 every row is such a row.
* Non-finite numbers reach exactly the rows that meet them. A row is NaN (out and lse) if it meets
  anything at all and its query is not finite, or a key or value it meets is not. To everyone else
  such numbers are zeros, in the gradient too, so padding, empty cache slots and the causal future
  may hold anything.
* Scores, softmax and sums are held in float32 or better; the output has the dtype of the inputs.
* lse is differentiable. Partial results over disjoint sets of keys merge exactly through it, by
  `merge_partials`. That one merge is blockwise attention here, and ring attention and
  sequence-parallel decoding elsewhere.

"dense" forms the table of scores and is plain differentiable code, in forward mode too.
"blockwise" is online softmax (Milakov & Gimelshein 2018; Rabe & Staats 2021; FlashAttention-2, Dao
2023) with its own reverse rule: it keeps O((T + S)·width + block_size²) numbers, recomputes the
probabilities from lse, and skips blocks none of whose pairs meet. Forward mode is not defined.
"""

import functools
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from plga_jax.array_types import Array, statistics_dtype
from plga_jax.ops.masks import Mask

IMPLEMENTATIONS = ("dense", "blockwise")
"""What `attention` may be told to use."""

_DENSE_PAIRS = 512 * 512
"""Up to this T·S, None means dense.

Measured on two CPU cores with 8 heads of width 64: at 512 x 512 equal forward and dense ahead in
gradient and compile time; from 1024 x 1024 on, where the table of scores leaves the caches,
blockwise 2.5 to 4 times faster forward and 1.5 to 2.5 times in gradient.
"""


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    block_size: int = 256,
) -> Array | tuple[Array, Array]:
    """Attention of queries to the keys they meet; see the module for the contract.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, S, K, H], N a multiple of K: query head n reads key head n // (N // K). Keys are never
            repeated in memory.
        v: values [B, S, K, V]; their width may differ from H.
        mask: which pairs meet; None means all of them. `Mask()` is causal.
        scale: a Python number that multiplies the scores; None means H**-0.5. Fold a learned one into q.
        return_lse: whether to return lse too.
        implementation: "dense" or "blockwise"; None chooses by shape.
        block_size: rows and columns of a block, for "blockwise" only. Any size is right; it need not divide T or S.

    Returns:
        out [B, T, N, V] in the dtype of q, or (out, lse) with lse [B, T, N] in float32 or better.

    Raises:
        ValueError: shapes, dtypes, mask arrays, scale, implementation or block_size that do not fit.
    """
    mask = Mask(causal=False) if mask is None else mask
    _validate(q, k, v, mask, scale, block_size)
    (_, T, _, H), S = q.shape, k.shape[1]
    scale = float(H**-0.5 if scale is None else scale)
    if implementation is None:
        # One row cannot be blocked usefully; a small table costs less than the bookkeeping of blocks.
        implementation = "dense" if T == 1 or T * S <= _DENSE_PAIRS else "blockwise"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}")

    with jax.named_scope(f"attention_{implementation}"):
        q_finite, k_finite, v_finite = (jnp.isfinite(x) for x in (q, k, v))
        zero = _common_zero(q.dtype, q, k, v, mask)
        key_bad = ~(k_finite.all(-1) & v_finite.all(-1)) | (zero != 0)
        q, k, v = jnp.where(q_finite, q, zero), jnp.where(k_finite, k, zero), jnp.where(v_finite, v, zero)
        if implementation == "dense":
            out, lse, sees_bad = _dense(q, k, v, key_bad, mask, scale)
        else:
            out, lse, sees_bad = _blockwise(q, k, v, key_bad, mask, scale, block_size)
        # These selections also cut the cotangents of empty rows, which may be NaN where the row is padding.
        empty = lse == -jnp.inf
        taint = jnp.where(sees_bad | ~q_finite.all(-1), jnp.nan, 0.0).astype(lse.dtype)
        out = jnp.where(empty[..., None], jnp.zeros_like(out), out + taint.astype(out.dtype)[..., None])
        lse = jnp.where(empty, jnp.full_like(lse, -jnp.inf), lse + taint)
    return (out, lse) if return_lse else out


def merge_partials(partials: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Merges attention over disjoint sets of keys into attention over their union, exactly.

        lse = log sum_i exp(lse_i)      out = sum_i exp(lse_i - lse) out_i

    Args:
        partials: (out [..., V], lse [...]) pairs of equal shapes, as `attention(..., return_lse=True)`
            gives them. An lse of -inf says that the set was empty for that row; its out is ignored.

    Returns:
        (out [..., V], lse [...]) in the dtypes of the first pair; 0 and -inf, with gradient 0, where
        every set was empty.

    Raises:
        ValueError: no partials, or shapes that differ.
    """
    partials = list(partials)
    if not partials:
        raise ValueError("merge_partials needs at least one (out, lse) pair, got none")
    shapes = [(out.shape, lse.shape) for out, lse in partials]
    if any(shape != shapes[0] for shape in shapes) or shapes[0][0][:-1] != shapes[0][1]:
        raise ValueError(f"partials must agree in shape, out [..., V] with lse [...], got (out, lse) {shapes}")
    out_dtype, dtype = partials[0][0].dtype, partials[0][1].dtype

    highest = functools.reduce(jnp.maximum, [lse for _, lse in partials])
    # The shift cancels out of the result, so its gradient is exactly zero; -inf - (-inf) must not be formed.
    shift = lax.stop_gradient(jnp.where(highest == -jnp.inf, jnp.zeros_like(highest), highest))
    total = jnp.zeros_like(highest)
    merged = jnp.zeros_like(partials[0][0], dtype)
    for out, lse in partials:
        weight = jnp.exp(lse - shift)
        absent = (lse == -jnp.inf)[..., None]
        total += weight
        merged += weight[..., None] * jnp.where(absent, jnp.zeros_like(out), out).astype(dtype)
    empty = highest == -jnp.inf
    total = jnp.where(empty, jnp.ones_like(total), total)
    merged = jnp.where(empty[..., None], jnp.zeros_like(merged), merged / total[..., None])
    lse = jnp.where(empty, jnp.full_like(total, -jnp.inf), shift + jnp.log(total))
    return merged.astype(out_dtype), lse


def _validate(q, k, v, mask, scale, block_size):
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v must be [B, T, N, H], [B, S, K, H], [B, S, K, V], got {shapes}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q [B, T, N, H], k [B, S, K, H] and v [B, S, K, V] must agree in B, S, K and H, got {shapes}")
    if 0 in (q.shape[2], q.shape[3], k.shape[2]) or q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads N must be a multiple of key heads K, and N, K, H at least 1, got {shapes}")
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q, k, v must share one floating dtype; cast them, got {q.dtype}, {k.dtype}, {v.dtype}")
    if scale is not None and not isinstance(scale, numbers.Real):
        raise ValueError(f"scale must be a Python number or None; fold a traced scale into q, got {scale!r}")
    if not isinstance(block_size, numbers.Integral) or block_size < 1:
        raise ValueError(f"block_size must be an integer >= 1, got {block_size!r}")
    mask.validate(q.shape[1], k.shape[1], q.shape[0], q.shape[2])


def _common_zero(dtype, *trees):
    """A scalar 0 that varies, inside shard_map, over every mesh axis that any of the arrays varies over.

    What is made from it does too; so loop carries and cotangents have one type even when only the
    queries, say, are split.
    """
    sums = [jnp.sum(lax.stop_gradient(x)[:0], dtype=dtype) for x in jax.tree.leaves(trees)]
    return functools.reduce(jnp.add, sums)


# Inside, arrays lie as [B, K, G·T, W], G = N // K: the query heads that share a key head are rows of
# one matmul with it. They are transposed once, at entry, because XLA:CPU would otherwise transpose
# both operands in front of every matmul.


def _heads_first(x, K):
    """[B, T, N, W] -> [B, K, G·T, W]."""
    B, T, N, W = x.shape
    return x.reshape(B, T, K, N // K, W).transpose(0, 2, 3, 1, 4).reshape(B, K, N // K * T, W)


def _heads_last(x, N):
    """[B, K, G·T, W] -> [B, T, N, W]: undoes `_heads_first`."""
    B, K, rows, W = x.shape
    T = rows // (N // K)
    return x.reshape(B, K, N // K, T, W).transpose(0, 3, 1, 2, 4).reshape(B, T, N, W)


def _to_blocks(x, K, block):
    """[B, T, N, W] -> [blocks, B, K, G·block, W], padded with zeros to whole blocks."""
    B, T, N, W = x.shape
    blocks = -(-T // block)
    x = jnp.pad(x, ((0, 0), (0, blocks * block - T), (0, 0), (0, 0)))
    return jax.vmap(lambda b: _heads_first(b, K), in_axes=1)(x.reshape(B, blocks, block, N, W))


def _from_blocks(x, T, N):
    """[blocks, B, K, G·block, W] -> [B, T, N, W]: undoes `_to_blocks`."""
    x = jax.vmap(lambda b: _heads_last(b, N), out_axes=1)(x)
    B, blocks, block, _, W = x.shape
    return x.reshape(B, blocks * block, N, W)[:, :T]


def _group(meet, K):
    """bool [B|1, N|1, t, s] -> [B|1, K|1, G|1, t, s]."""
    B, N, t, s = meet.shape
    return meet.reshape(B, *((1, 1) if N == 1 else (K, N // K)), t, s)


def _grouped_shape(q, meet):
    """(B, K, G, t) of q [B, K, G·t, H] and its block of the mask."""
    B, K, rows, _ = q.shape
    t = meet.shape[-2]
    return B, K, rows // t if t else meet.shape[2], t


def _scores(q, k, meet, scale):
    """Scaled scores of one block, -inf where the pair does not meet: [B, K, G·t, s]."""
    dtype = statistics_dtype(q.dtype)
    s = scale * jnp.einsum("bkrh,bksh->bkrs", q, k, preferred_element_type=dtype)
    grouped = s.reshape(_grouped_shape(q, meet) + meet.shape[-1:])
    return jnp.where(meet, grouped, jnp.full_like(grouped, -jnp.inf)).reshape(s.shape)


def _partial(q, k, v, key_bad, meet, scale):
    """Attention of one block of queries to one block of keys, all finite.

    Args:
        q: [B, K, G·t, H].
        k: [B, K, s, H].
        v: [B, K, s, V].
        key_bad: bool [B, K, s], keys whose rows must become NaN.
        meet: bool [B|1, K|1, G|1, t, s].
        scale: a Python number.

    Returns:
        out [B, K, G·t, V] and lse [B, K, G·t] in statistics dtype, and bool [B, K, G·t]: whether the
        row meets a bad key.
    """
    s = _scores(q, k, meet, scale)
    highest = jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf)
    empty = highest == -jnp.inf
    shift = lax.stop_gradient(jnp.where(empty, jnp.zeros_like(highest), highest))
    p = jnp.exp(s - shift)
    total = jnp.where(empty, jnp.ones_like(highest), jnp.sum(p, axis=-1, keepdims=True))
    out = jnp.einsum("bkrs,bksv->bkrv", p.astype(v.dtype), v, preferred_element_type=s.dtype) / total
    lse = jnp.where(empty, jnp.full_like(shift, -jnp.inf), shift + jnp.log(total))[..., 0]

    rows_bad = lambda: (meet & key_bad[:, :, None, None, :]).any(-1)  # noqa: E731
    sees_bad = lax.cond(
        key_bad.any(),
        lambda: jnp.broadcast_to(rows_bad(), _grouped_shape(q, meet)).reshape(lse.shape),
        lambda: jnp.zeros_like(lse, bool),
    )
    return out, lse, sees_bad


def _dense(q, k, v, key_bad, mask, scale):
    """All pairs at once: out [B, T, N, V], lse [B, T, N], bool [B, T, N] (row sees a bad key)."""
    (_, T, N, _), (_, S, K, _) = q.shape, k.shape
    meet = _group(mask.as_array(T, S), K)
    out, lse, sees_bad = _partial(
        _heads_first(q, K), _heads_first(k, K), _heads_first(v, K), key_bad.transpose(0, 2, 1), meet, scale
    )
    lse, sees_bad = (_heads_last(x[..., None], N)[..., 0] for x in (lse, sees_bad))
    return _heads_last(out, N).astype(q.dtype), lse, sees_bad


@functools.partial(jax.custom_vjp, nondiff_argnames=("scale", "block_size"))
def _blockwise(q, k, v, key_bad, mask, scale, block_size):
    """The same three results as `_dense`, one block of queries and one block of keys at a time."""
    (_, T, N, _), (_, S, K, V) = q.shape, v.shape
    q_size, k_size = _block_sizes(T, S, block_size)
    k_blocks = (
        _to_blocks(k, K, k_size),
        _to_blocks(v, K, k_size),
        _to_blocks(key_bad[..., None], K, k_size)[..., 0],
    )

    def query_block(_, xs):
        q_block, q_index = xs
        strip = _mask_strip(mask, q_index, k_size, T, S, K)

        def key_block(carry, xs):
            k_block, v_block, bad_block, meet, any_meet = xs

            def attend(carry):
                out, lse, sees_bad = carry
                *partial, sees_bad_here = _partial(q_block, k_block, v_block, bad_block, meet, scale)
                return *merge_partials([(out, lse), partial]), sees_bad | sees_bad_here

            return lax.cond(any_meet, attend, lambda carry: carry, carry), None

        lse = jnp.full_like(q_block[..., 0], -jnp.inf, statistics_dtype(q.dtype))
        out = jnp.zeros_like(lse, shape=(*lse.shape, V))
        carry, _ = lax.scan(key_block, (out, lse, jnp.zeros_like(lse, bool)), (*k_blocks, *strip))
        return None, carry

    _, (out, lse, sees_bad) = lax.scan(query_block, None, (_to_blocks(q, K, q_size), _block_indices(T, q_size)))
    lse, sees_bad = (_from_blocks(x[..., None], T, N)[..., 0] for x in (lse, sees_bad))
    return _from_blocks(out, T, N).astype(q.dtype), lse, sees_bad


def _blockwise_forward(q, k, v, key_bad, mask, scale, block_size):
    out, lse, sees_bad = _blockwise(q, k, v, key_bad, mask, scale, block_size)
    return (out, lse, sees_bad), (q, k, v, mask, out, lse)


def _blockwise_backward(scale, block_size, residuals, cotangents):
    """FlashAttention-2's backward, with the cotangent of lse.

    With P = exp(S - lse): dV = Pᵀ dO, dP = dO Vᵀ and, because dlse/dS = P as well,
    dS = P ⊙ (dP - (rowsum(dO ⊙ O) - dlse)).
    """
    q, k, v, mask, out, lse = residuals
    d_out, d_lse, _ = cotangents
    (_, T, N, _), (_, S, K, _) = q.shape, k.shape
    q_size, k_size = _block_sizes(T, S, block_size)
    dtype = lse.dtype
    delta = jnp.sum(d_out.astype(dtype) * out.astype(dtype), axis=-1) - d_lse
    # exp(-inf - lse) must be 0 in a row that meets nothing, where lse is -inf.
    lse = jnp.where(lse == -jnp.inf, jnp.zeros_like(lse), lse)
    q_blocks = (
        _to_blocks(q, K, q_size),
        _to_blocks(d_out, K, q_size),
        _to_blocks(lse[..., None], K, q_size),
        _to_blocks(delta[..., None], K, q_size),
        _block_indices(T, q_size),
    )
    k_blocks, v_blocks = _to_blocks(k, K, k_size), _to_blocks(v, K, k_size)

    def query_block(carry, xs):
        q_block, do_block, lse_block, delta_block, q_index = xs
        strip = _mask_strip(mask, q_index, k_size, T, S, K)

        def key_block(dq, xs):
            k_block, v_block, dk, dv, meet, any_meet = xs

            def attend(dq, dk, dv):
                product = functools.partial(jnp.einsum, preferred_element_type=dtype)
                p = jnp.exp(_scores(q_block, k_block, meet, scale) - lse_block)
                dp = product("bkrv,bksv->bkrs", do_block, v_block)
                ds = (scale * p * (dp - delta_block)).astype(q.dtype)
                dv += product("bkrs,bkrv->bksv", p.astype(q.dtype), do_block)
                dk += product("bkrs,bkrh->bksh", ds, q_block)
                dq += product("bkrs,bksh->bkrh", ds, k_block)
                return dq, dk, dv

            dq, dk, dv = lax.cond(any_meet, attend, lambda *unchanged: unchanged, dq, dk, dv)
            return dq, (dk, dv)

        dq, carry = lax.scan(key_block, jnp.zeros_like(q_block, dtype), (k_blocks, v_blocks, *carry, *strip))
        return carry, dq

    zeros = jnp.zeros_like(k_blocks, dtype), jnp.zeros_like(v_blocks, dtype)
    (dk, dv), dq = lax.scan(query_block, zeros, q_blocks)
    dq, dk, dv = _from_blocks(dq, T, N), _from_blocks(dk, S, K), _from_blocks(dv, S, K)
    return *(x.astype(q.dtype) for x in (dq, dk, dv)), None, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _block_sizes(T, S, block_size):
    return min(block_size, max(T, 1)), min(block_size, max(S, 1))


def _block_indices(length, block):
    """int32 [blocks, block]: which row each row of each block is; those >= length are padding."""
    blocks = -(-length // block)
    return jnp.arange(blocks * block, dtype=jnp.int32).reshape(blocks, block)


def _mask_strip(mask, q_index, k_size, T, S, K):
    """The mask of one block of queries against every block of keys.

    One strip at a time, not one block: a batch split over devices then agrees on what to skip once a strip.

    Returns:
        bool [blocks, B|1, K|1, G|1, t, s], and bool [blocks]: whether any pair of the block meets.
    """
    k_index = _block_indices(S, k_size)
    meet = mask.block(q_index, k_index.reshape(k_index.size), T, S)
    meet = meet.reshape(*meet.shape[:3], *k_index.shape)
    meet = jax.vmap(lambda block: _group(block, K), in_axes=3)(meet)
    return meet, meet.any(range(1, meet.ndim))
