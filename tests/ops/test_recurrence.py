"""The linear recurrence: a NumPy loop is the definition, three schedules and the fused form must agree with it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from plga_jax.ops.recurrence import METHODS, scan, scan_fused

CHUNK = 4


def oracle(a, b, h0=None, reset=None, valid=None, reverse=False):
    """Float64 (or complex) states, last state, and cumulative decay."""
    a, b = np.asarray(a), np.asarray(b)
    wide = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
    a, b = np.broadcast_to(a, b.shape).astype(wide), b.astype(wide)
    B, T = b.shape[:2]
    h = np.zeros(b[:, 0].shape, wide) if h0 is None else np.array(h0, wide)
    product, states, decay = np.ones_like(h), np.zeros_like(b), np.zeros_like(b)
    for t in reversed(range(T)) if reverse else range(T):
        for row in range(B):
            if reset is not None and reset[row, t]:
                h[row], product[row] = 0, 0
            if valid is None or valid[row, t]:
                h[row] = a[row, t] * h[row] + b[row, t]
                product[row] *= a[row, t]
        states[:, t], decay[:, t] = h, product
    return states, h, decay


def example(B=2, T=11, state=(3, 2), narrow=(), dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shape = [1 if axis in narrow else n for axis, n in enumerate(state)]
    a = rng.uniform(0.2, 1.1, (B, T, *shape))
    b, h0 = rng.standard_normal((B, T, *state)), rng.standard_normal((B, *state))
    return tuple(jnp.asarray(x, dtype) for x in (a, b, h0))


CASES = {
    "plain": {},
    "one step": {"T": 1},
    "a chunk and one": {"T": CHUNK + 1},
    "many chunks": {"T": 33},
    "one decay a head": {"narrow": (1,)},
    "scalar state": {"state": ()},
}


def fused(a, b, h0=None, *, reset=None, valid=None, reverse=False, method=None, chunk=CHUNK):
    """`scan_fused` that makes nothing and reads nothing, as an implementation of `scan`."""
    if reverse:
        pytest.skip("the fused form reads forwards")
    h0 = jnp.zeros((b.shape[0], *b.shape[2:]), jnp.result_type(b)) if h0 is None else h0
    options = {"reset": reset, "valid": valid, "method": method, "chunk": chunk}
    states, last = scan_fused(lambda x: x, lambda states, _: states, (a, b), h0, **options)
    return states, last, None


IMPLEMENTATIONS = {method: functools.partial(scan, method=method, chunk=CHUNK) for method in METHODS}
IMPLEMENTATIONS |= {
    f"fused {method}": functools.partial(fused, method=method) for method in ("sequential", "associative")
}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """Compiled: step by step, an associative scan takes seconds to dispatch."""
    return jax.jit(IMPLEMENTATIONS[request.param], static_argnames="reverse")


def rows(seed, shape, share):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < share)


class TestEveryImplementation:
    @pytest.mark.parametrize("case", CASES)
    def test_states_are_the_loops(self, implementation, case):
        a, b, h0 = example(**CASES[case])
        for start in (None, h0):
            states, last, decay = implementation(a, b, start)
            expected = oracle(a, b, start)
            np.testing.assert_allclose(states, expected[0], atol=1e-5)
            np.testing.assert_allclose(last, expected[1], atol=1e-5)
            if decay is not None:
                np.testing.assert_allclose(jnp.broadcast_to(decay, b.shape), expected[2], rtol=1e-5)

    def test_without_jit(self, request, implementation):
        plain = IMPLEMENTATIONS[request.node.callspec.params["implementation"]]
        chex.assert_trees_all_close(plain(*example(T=3)), implementation(*example(T=3)), atol=1e-6)

    def test_float64_to_the_last_digits(self, implementation, x64):
        a, b, h0 = example(T=37, dtype=np.float64)
        states, last, _ = implementation(a, b, h0)
        expected = oracle(a, b, h0)
        np.testing.assert_allclose(states, expected[0], atol=1e-12)
        np.testing.assert_allclose(last, expected[1], atol=1e-12)

    def test_complex_decays(self, implementation):
        a, b, h0 = example(dtype=np.complex64)
        a = a * jnp.asarray(np.exp(1j * np.arange(11)), a.dtype)[None, :, None, None]
        np.testing.assert_allclose(implementation(a, b, h0)[0], oracle(a, b, h0)[0], atol=1e-5)

    @pytest.mark.parametrize("reverse", [False, True])
    def test_resets_and_padding(self, implementation, reverse):
        a, b, h0 = example(T=13)
        for seed in range(3):
            reset, valid = rows(seed, (2, 13), 0.3), rows(seed + 9, (2, 13), 0.6)
            dirty_a, dirty_b = (jnp.where(valid[..., None, None], x, jnp.nan) for x in (a, b))
            states, last, _ = implementation(dirty_a, dirty_b, h0, reset=reset, valid=valid, reverse=reverse)
            expected = oracle(a, b, h0, np.asarray(reset), np.asarray(valid), reverse)
            np.testing.assert_allclose(states, expected[0], atol=1e-5)
            np.testing.assert_allclose(last, expected[1], atol=1e-5)

    def test_documents_in_a_row_are_what_they_are_alone(self, implementation):
        a, b, _ = example(B=1, T=12)
        reset = jnp.arange(12)[None] == 5
        packed = implementation(a, b, reset=reset)[0]
        apart = [implementation(a[:, piece], b[:, piece])[0] for piece in (slice(0, 5), slice(5, 12))]
        np.testing.assert_allclose(packed, jnp.concatenate(apart, axis=1), atol=1e-6)

    def test_any_cut_changes_nothing(self, implementation):
        a, b, h0 = example(T=9)
        whole = implementation(a, b, h0)
        for cut in range(1, 9):
            first = implementation(a[:, :cut], b[:, :cut], h0)
            second = implementation(a[:, cut:], b[:, cut:], first[1])
            np.testing.assert_allclose(jnp.concatenate([first[0], second[0]], axis=1), whole[0], atol=1e-5)
            np.testing.assert_allclose(second[1], whole[1], atol=1e-5)

    @pytest.mark.parametrize("narrow", [(), (1,)])
    def test_gradients(self, implementation, narrow, x64):
        a, b, h0 = example(B=1, T=7, state=(2, 2), narrow=narrow, dtype=np.float64)
        reset, valid = rows(0, (1, 7), 0.2), rows(1, (1, 7), 0.8)

        def run(a, b, h0):
            return implementation(a, b, h0, reset=reset, valid=valid)[:2]

        check_grads(run, (a, b, h0), order=1, modes=["rev"])

    def test_padding_carries_no_gradient(self, implementation):
        a, b, h0 = example(T=6)
        valid = jnp.arange(6)[None] < jnp.array([[4], [6]])
        b = jnp.where(valid[..., None, None], b, jnp.nan)
        grads = jax.grad(lambda a, b: jnp.sum(implementation(a, b, h0, valid=valid)[1]), argnums=(0, 1))(a, b)
        for grad in grads:
            assert jnp.isfinite(grad).all()
            np.testing.assert_array_equal(grad[0, 4:], 0)
            assert jnp.abs(grad[1, 4:]).min() > 0

    def test_later_steps_change_nothing(self, implementation):
        a, b, h0 = example(T=8)
        for t in (0, 3, 7):
            grad = jax.grad(lambda b, t: jnp.sum(implementation(a, b, h0)[0][:, t]))(b, t)
            np.testing.assert_array_equal(grad[:, t + 1 :], 0)
            assert jnp.abs(grad[:, : t + 1]).min() > 0

    def test_vmap_is_a_loop(self, implementation):
        a, b, h0 = (jnp.stack([x, -x, 2 * x]) for x in example(T=6))
        found = jax.vmap(lambda *x: implementation(*x)[0])(a, b, h0)
        looped = jnp.stack([implementation(*x)[0] for x in zip(a, b, h0)])
        np.testing.assert_allclose(found, looped, atol=1e-5)

    def test_bfloat16_inputs_keep_float32_states(self, implementation):
        a, b = jnp.full((1, 4096, 1), 0.999), jnp.ones((1, 4096, 1))
        # The sum of 0.999ᵗ over 4096 steps, which a bfloat16 state would give as 256 or 4096.
        _, last, _ = implementation(a, b.astype(jnp.bfloat16), jnp.zeros((1, 1), jnp.float32))
        np.testing.assert_allclose(last, 983.4, atol=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_backwards(method):
    a, b, h0 = example()
    states, last, decay = scan(a, b, h0, reverse=True, method=method, chunk=CHUNK)
    expected = oracle(a, b, h0, reverse=True)
    for found, wanted in zip((states, last, decay), expected):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_decay_joins_pieces_that_were_read_apart():
    a, b, h0 = example(T=10)
    whole = scan(a, b, h0)
    later = scan(a[:, 6:], b[:, 6:])
    joined = later.states + later.decay * whole.states[:, 5][:, None]
    np.testing.assert_allclose(joined, whole.states[:, 6:], atol=1e-5)


def test_fused_memory_is_a_chunks():
    """Forwards and back: [T, E, M] is never there, only inputs, outputs and a state for each chunk."""
    T, E, M, chunk = 4096, 64, 16, 32
    x, weights = jax.ShapeDtypeStruct((1, T, E), jnp.float32), jax.ShapeDtypeStruct((E, M), jnp.float32)

    def loss(x, weights):
        def make(x):
            decay = jnp.exp(-jnp.abs(x))[..., None] * jnp.ones_like(weights)[None, None]
            return decay, x[..., None] * weights[None, None]

        out, _ = scan_fused(make, lambda h, x: h.sum(-1), x, jnp.zeros((1, E, M)), chunk=chunk)
        return jnp.sum(jnp.square(out))

    temp = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, weights).compile().memory_analysis().temp_size_in_bytes
    inputs, states, one_chunk = 4 * T * E, 4 * T // chunk * E * M, 4 * chunk * E * M
    # Measured 3.9 MB; the tensor [T, E, M] alone would be 16.8 MB, and autodiff keeps several.
    assert temp < 4 * inputs + 2 * states + 12 * one_chunk < 4 * T * E * M


def test_one_trace_for_all_lengths_of_documents():
    a, b, h0 = example()
    run = jax.jit(chex.assert_max_traces(lambda reset: scan(a, b, h0, reset=reset).states, 1))
    for seed in range(3):
        run(rows(seed, (2, 11), 0.3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "quick"}, "'quick' is unknown"),
        ({"chunk": 0}, "chunk = 0"),
        ({"h0": jnp.zeros((2, 5))}, r"h0 of shape \(2, 5\) must be \(2, 3, 2\)"),
        ({"a": jnp.zeros((2, 11, 3, 4))}, r"a of shape \(2, 11, 3, 4\)"),
        ({"a": jnp.zeros((2, 1, 3, 2))}, r"a of shape \(2, 1, 3, 2\)"),
        ({"b": jnp.zeros((2, 0, 3, 2))}, "at least one step"),
        ({"reset": jnp.zeros((2, 11))}, "reset must be bool"),
        ({"valid": jnp.zeros((11,), bool)}, "valid must be bool"),
    ],
)
def test_bad_input_is_refused(change, message):
    a, b, _ = example()
    with pytest.raises(ValueError, match=message):
        scan(**{"a": a, "b": b} | change)
