"""The transfer between sandpile domains at a tiny size: exact where the law holds, honest where it does not."""

import json

import numpy as np
import pytest
from flax import nnx

from experiments import transfer_report, transfer_run
from experiments.transfer_run import DOMAINS, LAWS, Study, run_transfer
from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig

STUDY = Study(
    grains=10_000,
    documents=4,
    length=400,
    steps=2,
    rates=(1e-3,),
    context=33,
    windows=4,
    overrides=("model.num_heads=2", "model.head_width=4", "model.metric_width=8", "model.residual_units=1",
               "train.batch_size=4", "data.validation=0.25"),
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_transfer(STUDY, tmp_path_factory.mktemp("transfer"), progress=False)


@pytest.mark.slow
def test_domains_are_checked_first(found):
    assert all(found["power_laws"][name]["holds"] for name in DOMAINS)
    assert not any(found["power_laws"][f"{name}, dissipative"]["holds"] for name in DOMAINS)


@pytest.mark.slow
def test_losses_of_every_law_are_measured(found):
    (record,) = found["rates"]
    losses = {law: np.array(record["transfer"]["losses"][law]) for law in LAWS}
    assert all(values.shape == (2,) and np.isfinite(values).all() for values in losses.values())
    assert np.abs(losses["own"] - losses["identity"]).max() > 0
    assert len(record["transfer"]["errors"]) == len(record["transfer"]["residuals"]) == 4


def test_piles_too_small_for_a_power_law_are_refused():
    # Three sites along an edge hold no avalanche of a hundred.
    with pytest.raises(ValueError, match="take larger piles"):
        run_transfer(Study(size=3, grains=5_000), None)


def test_a_model_carried_into_its_own_basis_keeps_its_loss():
    """The second model is the first with rotated query and key planes: S is exact, and so is the congruence."""
    config = PLDRConfig(vocab_size=262, num_layers=1, num_heads=2, head_width=4, residual_units=1, context=32)
    first = PLDR(config, rngs=nnx.Rngs(0))
    second = PLDR(config, rngs=nnx.Rngs(0))
    # Scales of 1 and 2 in turn, the same within a rotary plane, so that they commute with rotations.
    scale = np.tile([1.0, 1.0, 2.0, 2.0], 2).astype(np.float32)
    for part in ("query", "key"):
        linear = getattr(second.layers.attention, part)
        linear.kernel[...] = np.asarray(linear.kernel[...]) * scale
        linear.bias[...] = np.asarray(linear.bias[...]) * scale
    windows = np.random.default_rng(0).integers(1, 262, size=(4, 25)).astype(np.int32)
    carried = transfer_run._carry(first, second, windows, 2)
    assert max(carried["residuals"]) < 1e-5
    assert max(error["congruence"] for error in carried["errors"]) < 1e-4
    assert min(error["similarity"] for error in carried["errors"]) > 1e-2
    own = transfer_run._carry(first, first, windows, 2)
    np.testing.assert_allclose(carried["losses"]["congruence"], own["losses"]["own"], rtol=1e-4)


@pytest.mark.slow
def test_report_judges(found, tmp_path):
    text = transfer_report.write(tmp_path, STUDY, found)
    judged = transfer_report.claims(found)
    assert len(judged) == 6 and judged[0].holds and judged[1].holds
    # Two models of two steps have nothing in common.
    assert not judged[2].holds
    assert "does not hold" in text
    assert json.loads((tmp_path / "transfer.json").read_text())["rates"][0]["rate"] == 1e-3
    assert (tmp_path / "transfer.png").stat().st_size > 10_000
