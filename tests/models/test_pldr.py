"""What must hold of the model whatever its weights."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PRESETS, PLDRConfig
from plga_jax.models.pldr_layers import OPERATORS
from plga_jax.models.pldr_transforms import (
    absorb_operators,
    constant_operator_model,
    convert_rope_layout,
    operators_of,
)
from plga_jax.ops.rope import commutant_projection
from tests.models.conftest import extend, prefill, run

SMALL = dict(
    vocab_size=23, num_layers=2, num_heads=2, head_width=4, residual_units=2, context=32,
    param_dtype="float64", compute_dtype="float64",
)  # fmt: skip


@functools.cache
def make(seed=0, **fields):
    """A float64 model away from its init, so that no bias is 0 and no γ is 1."""
    model = PLDR(PLDRConfig(**(SMALL | fields)), rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(lambda x: x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), params)
    return nnx.merge(graphdef, params, rest)


def constant(seed=0, G=None, **fields):
    model = make(seed, **fields)
    L, N, H = model.config.num_layers, model.config.num_heads, model.config.head_width
    if G is None:
        G = jnp.asarray(np.random.default_rng(seed + 1).normal(size=(L, N, H, H)))
    return constant_operator_model(model, G)


def draw_tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(1, SMALL["vocab_size"], size=shape), jnp.int32)


class TestConfig:
    def test_published_sizes(self):
        count = lambda config: nnx.eval_shape(lambda: PLDR(config, rngs=nnx.Rngs(0))).num_parameters  # noqa: E731
        config = PLDRConfig.preset("110m")
        assert count(config) == 109_689_362
        assert count(dataclasses.replace(config, operator="constant")) == 105_606_482
        assert (config.hidden_width, config.metric_width, config.model_width) == (2389, 170, 896)

    @pytest.mark.parametrize("name", PRESETS)
    def test_json_round_trip(self, name):
        config = PLDRConfig.preset(name, rope_layout="half", compute_dtype=jnp.bfloat16)
        assert PLDRConfig.from_json(config.to_json()) == config
        assert config.compute_dtype == "bfloat16" and hash(config) is not None

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_heads": 0}, "num_heads = 0 must be at least 1"),
            ({"head_width": 5}, "head_width = 5 must be even"),
            ({"rope_layout": "gptj"}, "rope_layout = 'gptj' is unknown; choose interleaved, half"),
            ({"operator": "frozen"}, "choose learned, constant"),
            ({"init": "he"}, "choose soc, kvg, hf"),
            ({"compute_dtype": "float16"}, "compute_dtype = float16 must be bfloat16, float32 or float64"),
            ({"compute_dtype": "fp8ish"}, "not a dtype"),
            ({"pad_id": 23}, "pad_id = 23 is outside a vocabulary of 23"),
        ],
    )
    def test_refuses(self, fields, message):
        with pytest.raises(ValueError, match=message):
            PLDRConfig(**(SMALL | fields))

    def test_refuses_unknown_presets_and_foreign_json(self):
        with pytest.raises(ValueError, match="choose one of tiny, small, medium, 110m"):
            PLDRConfig.preset("110M")
        with pytest.raises(ValueError, match="num_head"):
            PLDRConfig.from_json('{"num_head": 3}')
        with pytest.raises(ValueError, match="missing"):
            PLDRConfig.from_json("{}")


class TestInit:
    @pytest.mark.parametrize("law", ["soc", "kvg", "hf"])
    def test_laws(self, law):
        config = PLDRConfig(vocab_size=50, num_layers=3, num_heads=4, head_width=32, residual_units=2, init=law)
        attention = PLDR(config, rngs=nnx.Rngs(0)).layers.attention
        D, N, H = 128, 4, 32
        xavier, torch_default = (6 / (2 * D)) ** 0.5, D**-0.5
        bound = torch_default if law == "kvg" else xavier
        assert 0.99 * bound < jnp.abs(attention.value.kernel[...]).max() <= bound
        assert (jnp.abs(attention.value.bias[...]).max() > 0.9 * bound) == (law == "kvg")
        assert 0.99 * xavier < jnp.abs(attention.query.kernel[...]).max() <= xavier
        assert jnp.abs(attention.query.bias[...]).max() == 0
        # torch counts the fans of a [N, H, H] tensor as H·H and N·H.
        std = (2 / (H * (H + N))) ** 0.5
        for name in ("W", "P", "a"):
            tensor = getattr(attention.metric, name)[...]
            np.testing.assert_allclose(tensor.std(), std, rtol=0.03)
            largest = jnp.abs(tensor).max() / std
            assert largest <= 3**0.5 if law == "hf" else largest > 3
        assert jnp.abs(attention.metric.b_W[...]).max() == 0

    @pytest.mark.usefixtures("x64")
    def test_layers_and_heads_are_independent(self):
        attention = make().layers.attention
        for array in (attention.query.kernel[...], attention.metric.W[...], attention.metric.gate_kernel[...]):
            assert jnp.abs(array[0] - array[1]).min() > 0
        assert jnp.abs(attention.metric.W[...][:, 0] - attention.metric.W[...][:, 1]).min() > 0

    def test_the_110m_law_gives_the_measured_spreads(self):
        # Measured on the published program: P, W, a have standard deviation 0.0200 at N=14, H=64.
        from plga_jax.modules.initializers import operator_tensor

        tensor = operator_tensor(jax.random.key(0), 14, 64, jnp.float32, law="soc")
        np.testing.assert_allclose(tensor.std(), 0.0200, rtol=0.02)


@pytest.mark.usefixtures("x64")
class TestOperators:
    def test_identity_is_ordinary_attention_to_the_last_bit(self):
        model, tokens = make(), draw_tokens(2, 9)
        eye = jnp.broadcast_to(jnp.eye(4), (2, 2, 4, 4))
        given, _ = run(model, tokens, operators=eye)
        np.testing.assert_array_equal(given, run(constant(G=eye), tokens)[0])

    def test_given_operators_equal_the_constant_model(self):
        model, tokens = make(), draw_tokens(2, 9)
        G = jnp.asarray(np.random.default_rng(5).normal(size=(2, 2, 4, 4)))
        given, _ = run(model, tokens, operators=G)
        np.testing.assert_array_equal(given, run(constant_operator_model(model, G), tokens)[0])
        per_row = jnp.broadcast_to(G[:, None], (2, 2, *G.shape[1:]))
        np.testing.assert_allclose(run(model, tokens, operators=per_row)[0], given, rtol=1e-12)

    def test_a_constant_row_map_makes_the_model_constant(self):
        """(1.1): if φ forgets its rows, the model is the v510G of its operators, for every input."""
        model = jax.tree.map(lambda x: x, make())
        scale = model.layers.attention.metric.norm_scale
        scale.set_value(scale[...].at[:, -1].set(0))
        operators = operators_of(model, [3])
        frozen = constant_operator_model(model, operators)
        for seed, length in ((0, 9), (1, 5)):
            tokens = draw_tokens(2, length, seed=seed)
            logits, out = run(model, tokens, collect=("G_LM",))
            np.testing.assert_array_equal(out.G_LM[:, 0], out.G_LM[:, 1])
            # The map is constant; its programs, one per shape, round in their own order: 1.4e-14 apart (measured).
            np.testing.assert_allclose(out.G_LM[:, 0], operators, rtol=1e-13)
            np.testing.assert_allclose(logits, run(frozen, tokens)[0], rtol=0, atol=1e-12)

    def test_a_commuting_operator_is_absorbed_exactly(self):
        for layout in ("interleaved", "half"):
            G = commutant_projection(jax.random.normal(jax.random.key(0), (2, 2, 4, 4), jnp.float64), layout=layout)
            model, tokens = constant(G=G, rope_layout=layout), draw_tokens(2, 9)
            absorbed = absorb_operators(model)
            np.testing.assert_allclose(run(absorbed, tokens)[0], run(model, tokens)[0], atol=1e-12)
            np.testing.assert_array_equal(absorbed.layers.attention.G[...], jnp.broadcast_to(jnp.eye(4), G.shape))

    def test_any_other_operator_is_refused(self):
        with pytest.raises(ValueError, match=r"layer \d, head \d does not commute .* residual 0\.\d+ exceeds 1e-06"):
            absorb_operators(constant())
        with pytest.raises(ValueError, match="constant_operator_model"):
            absorb_operators(make())

    @pytest.mark.parametrize("build", [make, constant])
    def test_rope_layouts_convert_exactly(self, build, distance):
        model, tokens = build(), draw_tokens(2, 9)
        half = convert_rope_layout(model)
        assert half.config.rope_layout == "half"
        logits = run(model, tokens)[0]
        np.testing.assert_allclose(run(half, tokens)[0], logits, atol=1e-11)
        np.testing.assert_array_equal(run(convert_rope_layout(half), tokens)[0], logits)
        # Only the layout's name changed: the wrong planes must differ.
        graphdef = nnx.graphdef(half)
        assert distance(run(nnx.merge(graphdef, nnx.state(model)), tokens)[0], logits) > 1e-2

    def test_positive_and_semidefinite_tensors(self):
        _, out = run(make(), draw_tokens(2, 3), collect=OPERATORS)
        assert (out.A_LM >= 1e-9).all() and (out.A_P > 0).all()


@pytest.mark.usefixtures("x64")
class TestCausality:
    def gradient(self, model):
        graphdef, state = nnx.split(model)
        path = ("embedding",)

        def logits(embedded):
            flat = dict(nnx.to_flat_state(state))
            flat[path] = flat[path].replace(embedded)
            return nnx.merge(graphdef, nnx.from_flat_state(list(flat.items())))(jnp.arange(1, 8)[None])[0][0].sum(-1)

        jacobian = jax.jit(jax.jacobian(logits))(model.embedding[...])  # [T, V, D]
        return np.abs(jacobian[:, 1:8]).max(-1)  # row t against the embedding of the token at position s

    @pytest.mark.parametrize("attention", ["dense", "blockwise"])
    def test_constant_operators_never_look_ahead(self, attention):
        influence = self.gradient(constant(attention=attention))
        assert np.triu(influence, 1).max() == 0
        assert np.tril(influence)[np.tril_indices(7)].min() > 0

    def test_learned_operators_do(self):
        """The Gram is made from every row: the paper's own exception, kept and shown."""
        influence = self.gradient(make())
        assert influence[1:].min() > 0
        # Row 0 attends to itself alone, whatever the operator; what is left is rounding.
        assert influence[0, 1:].max() < 1e-13


@pytest.mark.usefixtures("x64")
class TestInvariance:
    """Padding, batching, packing and chunking change nothing."""

    @pytest.mark.parametrize("build", [make, constant])
    @pytest.mark.parametrize("where", ["right", "left", "both"])
    def test_padding(self, build, where):
        model, tokens = build(), draw_tokens(1, 6)
        before, after = {"right": (0, 3), "left": (4, 0), "both": (2, 2)}[where]
        padded = jnp.pad(tokens, ((0, 0), (before, after)))
        logits, _ = run(model, padded)
        np.testing.assert_allclose(logits[:, before : before + 6], run(model, tokens)[0], atol=1e-11)

    def test_padding_carries_no_gradient(self):
        model = make()
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda params, tokens, n: (nnx.merge(graphdef, params, rest)(tokens)[0][:, :n] ** 2).sum()  # noqa: E731
        gradient = jax.jit(jax.grad(loss), static_argnums=2)
        tokens = draw_tokens(1, 6)
        chex.assert_trees_all_close(
            gradient(params, jnp.pad(tokens, ((0, 0), (0, 4))), 6), gradient(params, tokens, 6), rtol=1e-9, atol=1e-9
        )

    @pytest.mark.parametrize("build", [make, constant])
    def test_batch_equals_loop(self, build):
        model, tokens = build(), draw_tokens(3, 8)
        tokens = jnp.where(jnp.arange(8)[None] < jnp.array([[8], [3], [5]]), tokens, 0)
        batch, _ = run(model, tokens)
        for row in range(3):
            np.testing.assert_allclose(batch[row], run(model, tokens[row : row + 1])[0][0], atol=1e-11)

    @pytest.mark.parametrize("build", [make, constant])
    def test_packing(self, build):
        """Documents packed in one row get their own operators, positions and attention."""
        model, documents = build(), [draw_tokens(1, n, seed=n) for n in (4, 5, 3)]
        row = jnp.concatenate([*documents, jnp.zeros((1, 2), jnp.int32)], axis=1)
        segments = jnp.repeat(jnp.array([1, 2, 3, 0]), jnp.array([4, 5, 3, 2]), total_repeat_length=14)[None]
        packed, _ = run(model, row, segment_ids=segments, num_segments=3)
        alone = jnp.concatenate([run(model, document)[0] for document in documents], axis=1)
        np.testing.assert_allclose(packed[:, :12], alone, atol=1e-11)

    def test_packing_counts_segments_outside_of_jit_only(self):
        model, segments = constant(), jnp.array([[1, 1, 2, 2]])
        np.testing.assert_allclose(
            model(draw_tokens(1, 4), segment_ids=segments)[0],
            run(model, draw_tokens(1, 4), segment_ids=segments, num_segments=2)[0],
            atol=1e-12,
        )
        with pytest.raises(ValueError, match="pass num_segments"):
            run(model, draw_tokens(1, 4), segment_ids=segments)

    def test_a_segment_beyond_the_count_is_loud(self):
        logits, _ = run(make(), draw_tokens(1, 4), segment_ids=jnp.array([[1, 1, 3, 3]]), num_segments=2)
        assert jnp.isfinite(logits[:, :2]).all() and jnp.isnan(logits[:, 2:]).all()

    def test_attention_implementations_agree(self):
        tokens = draw_tokens(2, 11)
        dense, blockwise = (run(make(attention=name), tokens)[0] for name in ("dense", "blockwise"))
        np.testing.assert_allclose(dense, blockwise, atol=1e-12)

    def test_remat_changes_nothing(self):
        tokens = draw_tokens(2, 6)

        def gradient(model):
            graphdef, params, rest = nnx.split(model, nnx.Param, ...)
            return jax.jit(jax.grad(lambda p: (nnx.merge(graphdef, p, rest)(tokens)[0] ** 2).sum()))(params)

        # prevent_cse=False lets XLA reorder sums: equal up to the last bits.
        chex.assert_trees_all_close(gradient(make(remat=True)), gradient(make()), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("x64")
class TestCache:
    @pytest.mark.parametrize("kind", ["kv", "kv_g"])
    def test_prefill_k_then_decode_equals_the_whole_for_every_k(self, kind):
        """With frozen operators. T = 7, every k, decoding one by one and in one chunk."""
        model, tokens = constant(), draw_tokens(2, 7)
        whole, _ = run(model, tokens)
        for k in range(1, 8):
            first, cache = prefill(model, tokens[:, :k], model.init_cache(2, 8, kind=kind))
            rows = [first]
            for t in range(k, 7):
                logits, cache = extend(model, tokens[:, t : t + 1], cache)
                rows.append(logits)
            np.testing.assert_allclose(jnp.concatenate(rows, 1), whole, atol=1e-12)
            np.testing.assert_array_equal(cache.length, 7)

    def test_chunks_of_every_size(self):
        model, tokens = constant(), draw_tokens(2, 7)
        whole, _ = run(model, tokens)
        for chunk in (2, 3, 5):
            first, cache = prefill(model, tokens[:, :chunk], model.init_cache(2, 8))
            rows = [first]
            for t in range(chunk, 7, chunk):
                logits, cache = extend(model, tokens[:, t : t + chunk], cache)
                rows.append(logits)
            np.testing.assert_allclose(jnp.concatenate(rows, 1), whole, atol=1e-12)

    def test_learned_operators_are_those_of_the_prompt(self):
        model, tokens = make(), draw_tokens(1, 9)
        frozen = operators_of(model, tokens[0, :4])
        expected, _ = run(model, tokens, operators=frozen)
        _, cache = prefill(model, tokens[:, :4], model.init_cache(1, 16))
        logits, cache = extend(model, tokens[:, 4:], cache)
        np.testing.assert_allclose(logits, expected[:, 4:], atol=1e-11)
        np.testing.assert_allclose(cache.operators[:, 0], frozen, atol=1e-11)

    def test_kv_and_kv_g_agree_bit_for_bit(self):
        model, tokens = make(), draw_tokens(2, 9)
        rows = {}
        for kind in ("kv", "kv_g"):
            first, cache = prefill(model, tokens[:, :4], model.init_cache(2, 16, kind=kind))
            rows[kind] = jnp.concatenate([first, extend(model, tokens[:, 4:], cache)[0]], axis=1)
        np.testing.assert_array_equal(rows["kv"], rows["kv_g"])

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_unequal_lengths(self, side):
        """A batch of unequal prompts, padded on either side, then unequal chunks, equals each row alone."""
        model, lengths, more = make(), (5, 2, 4), (1, 3, 2)
        rows = [draw_tokens(1, n + m, seed=n) for n, m in zip(lengths, more)]

        def pad(x, width):
            gap = width - x.shape[1]
            return jnp.pad(x, ((0, 0), (gap, 0) if side == "left" else (0, gap)))

        prompts = jnp.concatenate([pad(row[:, :n], 5) for row, n in zip(rows, lengths)])
        chunks = jnp.concatenate([pad(row[:, n:], 3) for row, n in zip(rows, lengths)])
        last, cache = prefill(model, prompts, model.init_cache(3, 8), last_only=True)
        logits, cache = extend(model, chunks, cache)
        np.testing.assert_array_equal(cache.length, [6, 5, 6])
        for i, (row, n, m) in enumerate(zip(rows, lengths, more)):
            first, alone = prefill(model, row[:, :n], model.init_cache(1, 8))
            np.testing.assert_allclose(last[i, 0], first[0, -1], atol=1e-11)
            expected, _ = extend(model, row[:, n:], alone)
            got = logits[i, 3 - m :] if side == "left" else logits[i, :m]
            np.testing.assert_allclose(got, expected[0], atol=1e-11)

    def test_prefill_forgets_what_was_there(self):
        model, tokens = make(), draw_tokens(1, 6)
        _, used = prefill(model, draw_tokens(1, 8, seed=9), model.init_cache(1, 8))
        again, cache = prefill(model, tokens, used)
        np.testing.assert_array_equal(again, prefill(model, tokens, model.init_cache(1, 8))[0])
        np.testing.assert_array_equal(cache.length, 6)

    def test_a_full_cache_is_flagged_and_never_corrupted(self):
        model, tokens = constant(), draw_tokens(2, 8)
        _, cache = prefill(model, tokens[:, :6], model.init_cache(2, 8))
        segments = jnp.array([[1, 1, 1], [1, 0, 0]])
        _, after = extend(model, tokens[:, :3], cache, segment_ids=segments)
        np.testing.assert_array_equal(after.overflowed, [True, False])
        np.testing.assert_array_equal(after.length, [9, 7])
        np.testing.assert_array_equal(after.kv.k[:, :, :6], cache.kv.k[:, :, :6])

    def test_one_trace_per_shape(self):
        model = constant()
        counted = jax.jit(chex.assert_max_traces(PLDR.extend, n=1))
        _, cache = prefill(model, draw_tokens(1, 3), model.init_cache(1, 16))
        for token in range(1, 8):
            _, cache = counted(model, jnp.full((1, 1), token), cache)

    def test_the_decode_step_writes_in_place(self):
        """Donated, the step needs no second copy of keys and values: they stay in the scan's carry."""
        model = constant(num_layers=4, context=4096)
        cache = model.init_cache(1, 4096)
        step = jax.jit(PLDR.extend, donate_argnums=2)
        memory = step.lower(model, jnp.ones((1, 1), jnp.int32), cache).compile().memory_analysis()
        held = cache.kv.k.nbytes + cache.kv.v.nbytes
        assert memory.temp_size_in_bytes < held

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda m: m.init_cache(1, 33), "Capacity 33 exceeds the model's context of 32"),
            (lambda m: m.init_cache(1, 0), "capacity 0 must be at least 1"),
            (lambda m: m.init_cache(1, 8, kind="g"), "choose 'kv' or 'kv_g'"),
            (
                lambda m: m.prefill(draw_tokens(1, 9), m.init_cache(1, 8)),
                "prompt of 9 tokens does not fit a cache of 8",
            ),
            (lambda m: m(draw_tokens(1, 33)), "33 tokens exceed the context of 32"),
            (lambda m: m(jnp.zeros((1, 0), jnp.int32)), "at least one token"),
            (lambda m: m(draw_tokens(1, 3), collect=("H",)), "choose from A, A_LM"),
            (lambda m: m(draw_tokens(1, 3), operators=jnp.ones((2, 2, 4, 5))), "expected"),
            (lambda m: m.with_operators(jnp.ones((2, 2, 4, 4))), "constant_operator_model"),
        ],
    )
    def test_refuses(self, call, message):
        with pytest.raises(ValueError, match=message):
            call(make())


class TestPrecision:
    def test_bfloat16_compute_keeps_the_chain_in_float32(self):
        fields = {"param_dtype": "float32", "compute_dtype": "bfloat16"}
        model, tokens = make(**fields), draw_tokens(2, 9)
        logits, out = run(model, tokens, collect=("A", "A_LM", "A_P", "G_LM"))
        chex.assert_type([logits, out.A, out.A_LM, out.A_P, out.G_LM], jnp.float32)
        exact, _ = run(make(**(fields | {"compute_dtype": "float32"})), tokens)
        # bfloat16 has 8 bits: 2^-9 per product, a dozen products deep; logits are of order 1.
        assert 1e-5 < jnp.abs(logits - exact).max() < 0.25

    def test_compile_size_does_not_grow_with_depth(self):
        def size(**fields):
            model = make(param_dtype="float32", compute_dtype="float32", **fields)
            return len(jax.jit(lambda m, t: m(t)[0]).lower(model, draw_tokens(1, 8)).as_text())

        assert size(num_layers=8, residual_units=8) < 1.1 * size(num_layers=2, residual_units=2)
