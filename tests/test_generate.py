"""Generation: the three cache modes, batches against single prompts, streams, seeds, and what is refused.

Programs are compiled per (model, mode, batch, shapes, sampling), so the tests share a few of those.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax import generate as module
from plga_jax.generate import generate, stream
from plga_jax.interop.pldr_tensors import config_from_tensors, model_from_tensors
from plga_jax.models.pldr_transforms import constant_operator_model
from plga_jax.ops.sampling import SamplingConfig

SAMPLING = SamplingConfig(temperature=0.9, min_p=0.001, repetition_penalty=1.1)
PROMPTS = [[5, 9, 60], [7, 3, 80, 22, 41, 11, 5, 5, 90, 31, 2, 64, 8], [44, 13, 71, 25, 6, 6, 50, 1]]
SEEDS = [11, 12, 13]
# A stop id that no model draws keeps the programs of tests with and without a stop id the same.
NEVER = [1000]
# Products of other shapes sum in other orders; measured 5e-14 for logits up to 3.7.
TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def _double(x64):
    """All modes are compared in float64."""


@pytest.fixture(scope="module")
def learned(request):
    golden = request.getfixturevalue("golden")
    with jax.enable_x64(True):
        wide = {"param_dtype": "float64", "compute_dtype": "float64"}
        weights = golden("weights_small")
        return model_from_tensors(weights, config_from_tensors(weights, context=128, **wide))


@pytest.fixture(scope="module")
def constant(request, learned):
    with jax.enable_x64(True):
        return constant_operator_model(
            learned, jnp.asarray(request.getfixturevalue("golden")("v510G_f64")["G.random"])[:, 0]
        )


def _run(model, prompts, *, new=None, sampling=SAMPLING, seed=SEEDS, stop_ids=NEVER, **options):
    """Continues one prompt with room for 64 tokens, or three with room for 128."""
    new = new or (50 if len(prompts) == 1 else 60)
    seed = seed if np.ndim(seed) == 0 else seed[: len(prompts)]
    options = {"cache": "kv_g", "keep_logits": True} | options
    return generate(model, prompts, max_new_tokens=new, sampling=sampling, seed=seed, stop_ids=stop_ids, **options)


def _direct(model, tokens):
    """Logits after `tokens`, all of them real, by one plain call."""
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    call = jax.jit(
        lambda model, tokens: model(tokens, segment_ids=jnp.ones_like(tokens), num_segments=1, last_only=True)
    )
    return np.asarray(call(model, tokens)[0][0, 0])


def _with_head_bias(model, bias):
    """The same program with another bias of the output layer: logits of the ids named there, 0 elsewhere."""
    graphdef, state = nnx.split(model)
    head = state["head"]["bias"]
    state["head"]["bias"] = head.replace(
        jnp.zeros_like(head[...]).at[jnp.array([*bias])].set(jnp.array([*bias.values()]))
    )
    return nnx.merge(graphdef, state)


class TestModes:
    def test_greedy_golden(self, learned, golden):
        wanted = golden("decode_f64")
        run = _run(learned, wanted["prompt"].tolist(), sampling=None, new=8)
        assert run.tokens == wanted["greedy_kvg"][None].tolist()
        assert np.argmax(run.logits, axis=-1).tolist() == run.tokens
        np.testing.assert_allclose(run.logits[:, 0], wanted["logits_kvg"][:, 0], rtol=0, atol=1e-9)

    def test_kv_and_kv_g_are_bit_identical(self, learned):
        kv, kv_g = (_run(learned, PROMPTS, cache=cache) for cache in ("kv", "kv_g"))
        assert kv.tokens == kv_g.tokens
        np.testing.assert_array_equal(kv.logits, kv_g.logits)

    def test_none_makes_the_operators_of_each_prefix(self, learned):
        none, frozen = (_run(learned, PROMPTS[2:], cache=cache) for cache in ("none", "kv_g"))
        direct = _direct(learned, PROMPTS[2] + none.tokens[0][:4])
        np.testing.assert_allclose(none.logits[0, 4], direct, rtol=0, atol=TOLERANCE)
        # The first operators are those of the prompt; on this model they are far from those of the next prefix.
        np.testing.assert_allclose(frozen.logits[0, 0], none.logits[0, 0], rtol=0, atol=TOLERANCE)
        assert np.abs(frozen.logits[0, 1] - none.logits[0, 1]).max() > 0.1

    def test_constant_operators_need_no_recomputation(self, constant):
        none, kv = (_run(constant, PROMPTS[2:], cache=cache) for cache in ("none", "kv"))
        assert none.tokens == kv.tokens
        np.testing.assert_allclose(none.logits, kv.logits, rtol=0, atol=TOLERANCE)

    @pytest.mark.parametrize("cache", ["none", "kv"])
    def test_pad_ids_count_as_text(self, constant, cache):
        """In the prompt as well as drawn: here nothing but pad ids is drawn."""
        config = constant.config
        likely = {config.pad_id: 1000.0}
        prompt = [5, config.pad_id, 9, config.pad_id, config.pad_id, 60, 3, config.pad_id]
        run = _run(_with_head_bias(constant, likely), [prompt], cache=cache)
        assert run.tokens == [[config.pad_id] * 50]
        direct = _direct(_with_head_bias(constant, likely), prompt + run.tokens[0][:4])
        np.testing.assert_allclose(run.logits[0, 4], direct, rtol=0, atol=TOLERANCE)

    def test_gram_rows_all_lets_no_padding_of_ours_in(self, learned):
        everything = nnx.clone(learned)
        config = dataclasses.replace(learned.config, gram_rows="all")
        everything.config = everything.layers.attention.config = config
        logits = next(stream(everything, PROMPTS[:1], max_new_tokens=50, stop_ids=NEVER)).logits
        np.testing.assert_allclose(logits[0], _run(learned, PROMPTS[:1]).logits[0, 0], rtol=0, atol=TOLERANCE)


class TestBatches:
    @pytest.mark.parametrize("cache", ["none", "kv", "kv_g"])
    def test_rows_are_what_they_are_alone(self, learned, cache):
        """Neither neighbours, nor the width of a padded prompt (16, not 8), nor the capacity (128, not 64) matter."""
        batch = _run(learned, PROMPTS, cache=cache)
        assert [len(row) for row in batch.tokens] == [60, 60, 60]
        for row in (0, 2):
            alone = _run(learned, [PROMPTS[row]], seed=[SEEDS[row]], cache=cache)
            assert alone.tokens[0] == batch.tokens[row][:50]
            np.testing.assert_allclose(alone.logits[0], batch.logits[row, :50], rtol=0, atol=TOLERANCE)

    def test_equal_prompts_draw_apart(self, learned):
        rows = _run(learned, [PROMPTS[1]] * 3, seed=5).tokens
        assert len({tuple(row) for row in rows}) == 3


class TestStops:
    def test_a_row_ends_with_its_stop_id(self, learned):
        free = _run(learned, PROMPTS).tokens
        stop = free[1][2]
        stopped = _run(learned, PROMPTS, stop_ids=[stop]).tokens
        for row, wanted in zip(stopped, free):
            assert row == (wanted[: wanted.index(stop) + 1] if stop in wanted else wanted)
        assert len(stopped[1]) == free[1].index(stop) + 1 <= 3

    def test_ends_when_all_rows_have(self, learned):
        free = _run(learned, [PROMPTS[1]] * 3, seed=[11, 11, 11]).tokens
        steps = list(self._stream(learned, [PROMPTS[1]] * 3, [11, 11, 11], [free[0][1]]))
        assert len(steps) == free[0].index(free[0][1]) + 1

    def test_stream_is_the_whole_piece_by_piece(self, learned):
        stop = [_run(learned, PROMPTS).tokens[1][2]]
        whole = _run(learned, PROMPTS, stop_ids=stop)
        steps = list(self._stream(learned, PROMPTS, SEEDS, stop))
        drawn = np.stack([step.tokens for step in steps], axis=1)
        assert [[token for token in row if token >= 0] for row in drawn.tolist()] == whole.tokens
        assert all((np.diff((row < 0).astype(int)) >= 0).all() for row in drawn), "a stopped row drew again"
        np.testing.assert_array_equal(np.stack([step.logits for step in steps], axis=1), whole.logits)

    def _stream(self, model, prompts, seed, stop):
        return stream(model, prompts, max_new_tokens=60, sampling=SAMPLING, seed=seed, stop_ids=stop)


class TestDraws:
    def test_seeds_decide(self, learned):
        first, again, other = (_run(learned, PROMPTS, seed=seed).tokens for seed in (1, 1, 2))
        assert first == again
        assert all(a != b for a, b in zip(first, other))

    @pytest.mark.parametrize(("prompt", "wanted"), [([7, 8], [40, 41, 40, 40]), ([7, 40, 8], [41, 40, 40, 40])])
    def test_penalty_counts_prompt_and_continuation(self, learned, prompt, wanted):
        """With logits 1000 and 950 for ids 40 and 41, a penalty of 1.1 makes 909 and 864 of them once they are seen."""
        model = _with_head_bias(learned, {40: 1000.0, 41: 950.0})
        assert _run(model, [prompt]).tokens[0][:4] == wanted

    def test_one_program_per_shape(self, learned):
        _run(learned, PROMPTS)
        made = module._start._cache_size(), module._next._cache_size()
        others = [[1, 2], list(range(9, 25)), [4]]
        _run(learned, others, new=70, seed=3, stop_ids=[7])
        _run(learned, [np.asarray(prompt, np.int64) for prompt in others], new=55)
        assert (module._start._cache_size(), module._next._cache_size()) == made
        next(stream(learned, others, max_new_tokens=2, sampling=SAMPLING, seed=SEEDS, stop_ids=NEVER))
        assert module._start._cache_size() == made[0] + 1, "the count does not count"


class TestErrors:
    @pytest.mark.parametrize(
        ("prompts", "options", "message"),
        [
            ([], {}, "there is no prompt"),
            ([[5], []], {}, "prompt 1 of 2 is empty; pass the end-of-text token"),
            (["Fellow citizens"], {}, "encode text with the model's tokenizer"),
            ([5, 6], {}, "one per row"),
            ([[0.5, 1.0]], {}, "sequences of token ids"),
            ([[5, 97]], {}, r"ids 5…97 leave the vocabulary 0…96; use the tokenizer"),
            ([[-1, 5]], {}, r"ids -1…5 leave"),
            (
                [[5] * 129],
                {"new": 6},
                r"prompt of 129 tokens and 6 new ones exceed the context of 128; shorten the prompt",
            ),
            ([[5] * 120], {"new": 9}, "ask for at most 8 new tokens"),
            ([[5]], {"new": -1}, "max_new_tokens = -1 must be at least 1"),
            ([[5]], {"cache": "g"}, "'g' is unknown; choose one of none, kv, kv_int8, kv_g"),
            ([[5], [6]], {"seed": [1]}, "1 seeds for 2 prompts; pass one per prompt"),
        ],
    )
    def test_bad_input_is_refused_at_the_call(self, learned, prompts, options, message):
        with pytest.raises(ValueError, match=message):
            _run(learned, prompts, **options)
        options = {"max_new_tokens": options.pop("new", 6)} | options
        with pytest.raises(ValueError, match=message):
            stream(learned, prompts, **options)

    def test_exactly_full_context(self, learned):
        full = [*PROMPTS[:2], PROMPTS[1] * 9 + PROMPTS[0] * 3]
        run = _run(learned, full, new=2)
        assert len(full[2]) + len(run.tokens[2]) == learned.config.context
        roomy = _run(learned, PROMPTS)
        np.testing.assert_allclose(run.logits[:2], roomy.logits[:2, :2], rtol=0, atol=TOLERANCE)


def test_large_models_decode_unstacked_and_the_same(learned, monkeypatch):
    asked = {"max_new_tokens": 6, "keep_logits": True}
    stacked = generate(learned, PROMPTS, **asked)
    monkeypatch.setattr(module, "_UNSTACK_FROM", 0)
    unstacked = generate(learned, PROMPTS, **asked)
    assert unstacked.tokens == stacked.tokens
    np.testing.assert_allclose(unstacked.logits, stacked.logits, atol=TOLERANCE)
