"""The whole audit on small models: what is written, that it repeats, goes on, and says what it could not take."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import audit_report, audit_run
from experiments.audit_prompts import PROMPTS
from experiments.audit_run import cut_prompts, run_audit, weights_digest
from plga_jax.audit.sections import CONTROL_SECTIONS, SECTIONS
from plga_jax.audit.subject import AuditSettings, Subject
from plga_jax.audit.tensor_sections import describe_operators
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.tokenizers import ByteTokenizer
from tests.audit.test_ways import collapsed

CONFIG = PLDRConfig(vocab_size=262, num_layers=2, num_heads=2, head_width=4, residual_units=2, context=64)
SETTINGS = AuditSettings(sampled=6, decoded=6, decode_prompts=2, jacobian_rows=3, prefix_pairs=3, batch=8)


@pytest.fixture(scope="module")
def model():
    return PLDR(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def prompts():
    return cut_prompts(PROMPTS[:3], ByteTokenizer(), 12)


@pytest.fixture(scope="module")
def whole(model, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("audit")
    audit = run_audit(model, prompts, SETTINGS, out, laws=("soc",), progress=False)
    return audit, out, audit_report.write(out, audit, subject="a small model", prompts=PROMPTS[:3])


def quantities(audit):
    return {q.name: q for found in audit.model.values() for q in found}


def test_everything_is_taken_labelled_and_finite(whole):
    audit, _, _ = whole
    assert list(audit.model) == list(SECTIONS)
    assert list(audit.controls["soc"]) == [name for name in SECTIONS if name in CONTROL_SECTIONS]
    found = quantities(audit)
    assert all(q.values is not None and not np.isnan(q.values).any() for q in found.values())
    assert {q.label for q in found.values()} == {"measured", "bound", "proxy"}
    assert found["A.rank_one_ratio"].values.shape == (2, 3, 2)
    assert found["decode.epsilon_G"].values.shape == (2, 2, 6)
    assert found["row_map.sigma_max"].values.shape == (2, 3 * 3)
    # The control of the same law and seed is the audited model itself: nothing was trained.
    fresh = {q.name: q for part in audit.controls["soc"].values() for q in part}
    for name, quantity in fresh.items():
        np.testing.assert_array_equal(quantity.values, found[name].values, err_msg=name)


def test_files_hold_what_was_found(whole):
    audit, out, text = whole
    record = json.loads((out / "audit.json").read_text())
    assert record["prompts"] == list(PROMPTS[:3])
    assert record["provenance"]["settings"] == dataclasses.asdict(SETTINGS)
    assert (out / "audit.md").read_text() == text
    for name in ("spectra.png", "layers.png", "decoding.png", "losses.png"):
        assert (out / name).stat().st_size > 10_000
        assert f"]({name})" in text
    with np.load(out / "raw" / "spectra.npz") as raw:
        np.testing.assert_array_equal(raw["A.rank_one_ratio"], quantities(audit)["A.rank_one_ratio"].values)


def test_a_second_run_agrees_bit_for_bit_and_a_done_section_is_not_taken_again(
    whole, model, prompts, tmp_path, monkeypatch
):
    _, out, _ = whole
    names = ("order", "decoding", "row_map")
    again = run_audit(model, prompts, SETTINGS, tmp_path, sections=names, laws=(), progress=False)
    for name in names:
        assert (tmp_path / "raw" / f"{name}.npz").read_bytes() == (out / "raw" / f"{name}.npz").read_bytes()

    def refuse(subject):
        raise AssertionError("taken again")

    for name in names:
        monkeypatch.setitem(audit_run.SECTIONS, name, refuse)
    kept = run_audit(model, prompts, SETTINGS, tmp_path, sections=names, laws=(), progress=False)
    assert [q.name for q in kept.model["order"]] == [q.name for q in again.model["order"]]
    changed = dataclasses.replace(SETTINGS, seed=1)
    with pytest.raises(AssertionError, match="taken again"):
        run_audit(model, prompts, changed, tmp_path, sections=names, laws=(), progress=False)


def test_a_collapsed_model_reads_as_collapsed(model, prompts, tmp_path):
    sections = ("spectra", "order", "row_map", "decoding", "prefix", "losses")
    found = quantities(
        run_audit(collapsed(model), prompts, SETTINGS, tmp_path, sections=sections, laws=(), progress=False)
    )
    for name in ("A.m_runs", "A.m_prompts", "G_LM.m_runs", "A.cross_head_rms", "row_map.sigma_max", "decode.epsilon_G"):
        assert found[name].values.max() == 0, name
    assert found["A.rank_one_ratio"].values.max() < 1e-6
    assert found["decode.argmax_agrees"].values.all()
    assert found["prefix.changed_fraction"].values == 0
    # Blocks and prefixes are padded to one shape: nothing is left but equal programs.
    assert np.abs(found["loss.gap"].values).max() < 1e-6


def test_the_shipped_operators_give_the_published_profile(golden, tmp_path):
    G = golden("audit/glm_110m_1")["G_LM"]
    found = {q.name: q for q in describe_operators(G, layout="interleaved", axes=("layer", "head"), alone=True)}
    published = {"rtol": 0, "atol": 6e-4}
    residual = found["G_LM.commutant_residual"]
    np.testing.assert_allclose(residual.per_layer, [0.991, 0.991, 0.940, 0.840, 0.733], **published)
    control = found["G_LM.commutant_residual_control"]
    np.testing.assert_allclose(control.per_layer, [0.992, 0.992, 0.976, 0.949, 0.942], **published)
    np.testing.assert_allclose(found["G_LM.frobenius"].per_layer, [128.8, 125.0, 168.2, 97.2, 69.8], atol=0.06)
    np.testing.assert_allclose(found["G_LM.numerical_rank"].per_layer, [16, 6.5, 29.5, 56, 64])
    np.testing.assert_allclose(found["G_LM.dag_log_loss"].per_layer, [262, 284, 1865, 621, 272], rtol=2e-3)
    np.testing.assert_allclose(found["G_LM.cross_head_rms"].per_layer, [1.92, 1.23, 1.58, 1.39, 1.78], atol=6e-3)
    audit = audit_run.Audit(model={"operators": list(found.values())}, controls={}, provenance={})
    text = audit_report.write(tmp_path, audit, subject="shipped operators", prompts=())
    assert "0.9908, 0.9911, 0.9403, 0.8395, 0.733" in text


class TestWhatCannotBeTaken:
    def take(self, model, prompts, out, sections):
        return quantities(run_audit(model, prompts, SETTINGS, out, sections=sections, laws=("soc",), progress=False))

    def test_one_head_and_one_prompt(self, prompts, tmp_path):
        model = PLDR(dataclasses.replace(CONFIG, num_heads=1, hidden_width=None), rngs=nnx.Rngs(0))
        found = self.take(model, prompts[:1], tmp_path, ("spectra", "order", "row_map", "scoring"))
        for name in ("A.cross_head_rms", "A.m_prompts", "row_map.ratio_across", "choice.gap"):
            assert found[name].values is None and found[name].note, name
        assert found["A.m_runs"].values is not None

    def test_constant_operators(self, prompts, tmp_path):
        model = PLDR(dataclasses.replace(CONFIG, operator="constant"), rngs=nnx.Rngs(0))
        found = self.take(model, prompts, tmp_path, tuple(SECTIONS))
        omitted = {name for name, q in found.items() if q.values is None}
        assert {"A.singular_values", "A.m_runs", "row_map.sigma_max", "decode.epsilon_G"} <= omitted
        assert all("constant operators" in found[name].note for name in omitted)
        assert found["G_LM.commutant_residual"].values.max() == 0  # the identity
        assert found["prefix.changed_fraction"].values == 0

    def test_weights_that_are_not_finite(self, model, prompts, tmp_path):
        broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), model)
        with pytest.raises(ValueError, match="not finite"):
            run_audit(broken, prompts, SETTINGS, tmp_path)

    def test_wrong_prompts_and_sections(self, model, prompts, tmp_path):
        with pytest.raises(ValueError, match="leave 4 of a context of 64"):
            Subject(model=model, prompts=np.ones((1, 60), np.int32), settings=SETTINGS)
        with pytest.raises(ValueError, match="pad id 0"):
            Subject(model=model, prompts=np.zeros((1, 3), np.int32))
        with pytest.raises(ValueError, match="0 prompts"):
            cut_prompts([], ByteTokenizer(), 8)
        with pytest.raises(ValueError, match="colours"):
            run_audit(model, prompts, SETTINGS, tmp_path, sections=("colours",))


def test_digest_follows_every_weight(model):
    other = jax.tree.map(lambda x: x, model)
    assert weights_digest(other) == weights_digest(model)
    other.head.bias[...] = other.head.bias[...].at[3].add(1e-7)
    assert weights_digest(other) != weights_digest(model)
