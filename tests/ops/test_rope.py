"""Rotary positions: angles, both layouts, relativity, and operators that commute with them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from plga_jax.ops.rope import commutant_projection, frequencies, half_split_permutation, rope

LAYOUTS = ("interleaved", "half")
H = 8


def draw(seed, *shape, dtype=None):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def rotation(position, layout, width=H):
    """The H×H rotation at one position, from its definition."""
    matrix = np.zeros((width, width))
    for plane, theta in enumerate(10_000.0 ** (-np.arange(0, width, 2) / width)):
        first, second = (2 * plane, 2 * plane + 1) if layout == "interleaved" else (plane, plane + width // 2)
        cos, sin = np.cos(position * theta), np.sin(position * theta)
        matrix[[first, first, second, second], [first, second, first, second]] = cos, -sin, sin, cos
    return matrix


class TestRope(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(*LAYOUTS)
    def test_is_a_rotation_by_the_position(self, layout):
        with jax.enable_x64(True):
            x, positions = draw(0, 2, 4, 3, H), jnp.array([[0, 1, 2, 3], [700, 3, 3, 90_000]])
            turned = self.variant(lambda x, p: rope(x, p, layout=layout))(x, positions)
            for b, t in np.ndindex(2, 4):
                expected = x[b, t] @ rotation(int(positions[b, t]), layout).T
                np.testing.assert_allclose(turned[b, t], expected, rtol=1e-11, atol=1e-12)

    @parameterized.parameters(*LAYOUTS)
    def test_scores_depend_on_the_distance_only(self, layout):
        with jax.enable_x64(True):
            q, k = draw(0, 1, 1, 1, H), draw(1, 1, 1, 1, H)

            def score(m, n):
                at = lambda p: jnp.full((1, 1), p)  # noqa: E731
                return jnp.sum(rope(q, at(m), layout=layout) * rope(k, at(n), layout=layout))

            np.testing.assert_allclose(score(7, 3), score(1007, 1003), rtol=1e-11)
            assert abs(score(7, 3) - score(7, 4)) > 1e-3

    def test_the_layouts_differ_by_the_permutation_alone(self):
        x, positions, pi = draw(0, 2, 5, 3, H, dtype=jnp.float32), jnp.arange(5)[None], half_split_permutation(H)
        permuted = rope(x[..., pi], positions, layout="half")
        np.testing.assert_array_equal(permuted, rope(x, positions, layout="interleaved")[..., pi])
        assert jnp.abs(rope(x, positions, layout="half") - rope(x, positions, layout="interleaved")).max() > 0.1

    @parameterized.parameters(1, 255, 4095, 131_071)
    def test_float32_angles(self, position):
        # One float32 product: the angle is off by at most position·2^-24, plus the rounding of the table.
        tolerance = max(2e-7, position * 2.0**-23)
        x = jnp.ones((1, 1, 1, 64), jnp.float32)
        got = rope(x, jnp.full((1, 1), position), layout="half")
        with jax.enable_x64(True):
            exact = rope(x.astype(jnp.float64), jnp.full((1, 1), position), layout="half")
        np.testing.assert_allclose(got, exact, atol=2 * tolerance)

    @parameterized.parameters(255, 4095)
    def test_bfloat16_inputs_keep_float32_angles(self, position):
        x = draw(0, 1, 1, 1, 64, dtype=jnp.bfloat16)
        turned = rope(x, jnp.full((1, 1), position))
        assert turned.dtype == jnp.bfloat16
        exact = rope(x.astype(jnp.float32), jnp.full((1, 1), position))
        np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))

    def test_the_published_table(self):
        golden = np.load("tests/goldens/forward_f32.npz")["rope_cache_f32"]
        unit = jnp.zeros((1, 64, 1, 16)).at[..., 0::2].set(1)
        turned = rope(unit, jnp.arange(64)[None])[0, :, 0]
        # Their frequencies are float32 powers, ours float64 ones rounded once: 7e-8 relative, times 63 positions.
        np.testing.assert_allclose(turned.reshape(64, 8, 2), golden, atol=63 * 1.5e-7)

    def test_refuses_odd_widths_and_unknown_layouts(self):
        with pytest.raises(ValueError, match="must be even"):
            frequencies(7)
        with pytest.raises(ValueError, match="choose one of interleaved, half"):
            rope(jnp.ones((1, 1, 1, 4)), jnp.zeros((1, 1), jnp.int32), layout="gptj")


@pytest.mark.usefixtures("x64")
class TestCommutant:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_projected_operator_commutes_with_every_rotation(self, layout):
        G = draw(0, H, H)
        projected = commutant_projection(G, layout=layout)
        for position in (1, 5, 977):
            R = rotation(position, layout)
            np.testing.assert_allclose(R @ projected, projected @ R, atol=1e-12)
            assert np.abs(R @ G - G @ R).max() > 0.1

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_is_the_average_over_all_rotations(self, layout):
        # The twirl R(n)ᵀ G R(n) averaged over positions converges to the commutant part as 1/T.
        G, width = draw(0, 4, 4), 4
        turns = [rotation(n, layout, width) for n in range(200_000, 0, -37)]
        twirl = np.mean([R.T @ G @ R for R in turns], axis=0)
        np.testing.assert_allclose(commutant_projection(G, layout=layout), twirl, atol=0.02)

    def test_is_a_projection_and_keeps_the_identity(self):
        G = draw(0, 3, H, H)
        once = commutant_projection(G)
        np.testing.assert_array_equal(commutant_projection(once), once)
        np.testing.assert_array_equal(commutant_projection(jnp.eye(H)), jnp.eye(H))

    def test_commuting_is_the_same_as_scores_of_the_distance(self):
        q, k, G = draw(0, 1, 1, 1, H), draw(1, 1, 1, 1, H), draw(2, H, H)

        def score(G, m, n):
            q_m, k_n = rope(q, jnp.full((1, 1), m))[0, 0, 0], rope(k, jnp.full((1, 1), n))[0, 0, 0]
            return float(q_m @ G @ k_n)

        commuting = commutant_projection(G)
        assert abs(score(commuting, 7, 3) - score(commuting, 57, 53)) < 1e-12
        assert abs(score(G, 7, 3) - score(G, 57, 53)) > 1e-2
