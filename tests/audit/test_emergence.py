"""Probes along a training: against the audit's own functions, one trace, and the steps at which quantities fall."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.audit import emergence
from plga_jax.audit.collapse import measure_collapse
from plga_jax.audit.emergence import BY_LAYER, WHOLE, Emergence, EmergenceConfig, falls, series
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from tests.audit.test_ways import collapsed

CONFIG = PLDRConfig(vocab_size=23, num_layers=2, num_heads=2, head_width=4, residual_units=2, context=32)
TOKENS = np.random.default_rng(0).integers(1, 23, 300)
SETTINGS = EmergenceConfig(every=5, pairs=2, length=12, rows=2, scored=6, prefix_pairs=2)


@pytest.fixture(scope="module")
def model():
    return PLDR(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def values(model):
    return Emergence(SETTINGS, TOKENS).measure(model)


def test_every_quantity_has_a_value_per_layer(values, model):
    assert set(values) == {*WHOLE, *(f"{name}.{layer}" for name in BY_LAYER for layer in (0, 1))}
    assert all(type(value) is float and np.isfinite(value) for value in values.values())
    inputs = Emergence(SETTINGS, TOKENS).inputs
    _, out = jax.jit(lambda m, x: m(x, collect=("A", "G_LM")))(model, jnp.asarray(inputs))
    expected = measure_collapse(out.A, out.G_LM)
    for layer in (0, 1):
        assert values[f"m_A.{layer}"] == pytest.approx(expected.m_A[layer], rel=1e-5)
        assert values[f"rank_one_ratio.{layer}"] == pytest.approx(expected.rank_one_ratio[layer], rel=1e-5)
    assert 0.5 < values["historical_fraction"] <= 0.75  # row 0 of four never moves
    assert values["block_less_sequential"] != 0


def test_a_collapsed_model_has_none_of_the_symptoms_of_a_fresh_one(model):
    found = Emergence(SETTINGS, TOKENS).measure(collapsed(model))
    for name in ("m_A.0", "m_G.1", "cross_head_rms.0", "row_map_sigma_max.1", "historical_fraction"):
        assert found[name] == 0, name
    assert abs(found["block_less_sequential"]) < 1e-6


def test_probes_are_due_at_intervals_and_at_the_end_and_their_time_is_kept(model, monkeypatch):
    probe = Emergence(SETTINGS, TOKENS, steps=12)
    monkeypatch.setattr(probe, "measure", lambda model: {"x": 1.0})
    clock = iter(np.arange(0.0, 100.0, 1.0))
    monkeypatch.setattr(emergence.time, "perf_counter", lambda: next(clock))
    state = types.SimpleNamespace(model=model)
    due = [step for step in range(13) if probe(step, state)]
    assert due == [0, 5, 10, 12]
    assert (probe.probes, probe.first_seconds, probe.seconds) == (4, 1.0, 3.0)
    assert probe.share(60.0) == 0.05


def test_a_model_that_is_not_finite_ends_no_training(model):
    assert Emergence(SETTINGS, TOKENS).measure(jax.tree.map(lambda x: x * jnp.nan, model)) == {}


def test_programs_are_traced_once(model, monkeypatch):
    probe, calls = Emergence(SETTINGS, TOKENS), []
    probe.measure(model)
    whole = PLDR.__call__
    monkeypatch.setattr(PLDR, "__call__", lambda *args, **kwargs: calls.append(1) or whole(*args, **kwargs))
    probe.measure(jax.tree.map(lambda x: x * 1.01, model))
    assert not calls


def test_fallen_is_for_good():
    steps = np.array([0, 10, 20, 30])
    values = {
        "m_A": np.array([[1.0, 1.0, 0.0], [0.01, 0.5, 0.0], [0.5, 0.05, 0.0], [0.01, 0.02, 0.0]]),
        "block_less_sequential": np.array([[-1.0], [-0.05], [0.04], [-0.2]]),
    }
    # The first layer rose again; nothing that was 0 can fall; the gap came back above a tenth.
    assert falls(steps, values, below=0.1) == {"m_A": [30, 20, None], "block_less_sequential": [None]}


def test_series_reads_the_lines_of_a_run(values):
    lines = [{"step": 0} | values, {"step": 1, "loss": 2.0}, {"step": 5} | values]
    steps, found = series(lines)
    assert steps.tolist() == [0, 5]
    assert found["m_A"].shape == (2, 2) and found["historical_fraction"].shape == (2, 1)
    with pytest.raises(ValueError, match="emergence callback"):
        series(lines[1:2])


@pytest.mark.parametrize("changes", [{"every": 0}, {"scored": 13}, {"fallen": 1.0}, {"rows": 0}])
def test_bad_settings_are_refused(changes):
    fields = {"length": 12, "scored": 6} | changes
    with pytest.raises(ValueError, match=f"{next(iter(changes))}="):
        EmergenceConfig(**fields)


def test_needs_text():
    with pytest.raises(ValueError, match="12 tokens of held-out text, there are 3"):
        Emergence(SETTINGS, [1, 2, 3])
