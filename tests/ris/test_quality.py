"""The quality protocol: what it asks, geometries at matched density, and what is measured on a tiny model."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.ops.rope_scaling import RopeConfig
from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import Corpus
from ris_jax import density
from ris_jax.geometry import PublishedGeometry
from ris_jax.patterns import DenseGeometry
from ris_jax.probe import ProbeGeometry
from ris_jax.quality import ABLATIONS, FAMILIES, MIXES, Protocol, contestants, episode, fixed_part, probe_at
from ris_jax.quality_meter import Meter, divergence, measure
from ris_jax.tasks import log_probs

SMALL = Protocol(
    length=512, context=384, chunk=128, passages=2, passage=32, prompt=8, keys=2, draws=1, choices=3, positions=40,
    bins=(64, 128),
)  # fmt: skip
RECALL = ((0, 0), (1, 1))


@pytest.fixture(scope="module")
def model():
    config = DecoderConfig(
        vocab_size=ByteTokenizer().vocab_size, num_layers=2, num_heads=4, num_kv_heads=2, head_width=8,
        model_width=16, hidden_width=16, context=512, rope=RopeConfig(context=512),
    )  # fmt: skip
    return Decoder(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def corpus():
    rng = np.random.default_rng(0)
    words = ["".join(chr(c) for c in rng.integers(97, 123, 5)) for _ in range(900)]
    return Corpus(name="words", documents=tuple(" ".join(words[i : i + 30]) for i in range(0, 900, 30)))


@pytest.fixture(scope="module")
def texts(corpus):
    return episode(ByteTokenizer(), SMALL, 3, corpus)


def test_episodes_are_the_protocols_and_repeat(texts, corpus):
    again, other = (episode(ByteTokenizer(), SMALL, seed, corpus) for seed in (3, 4))
    assert len(texts.copy.probes) == 2 and len(texts.table.probes) == 2 and len(texts.passkeys) == 1
    for task in (texts.copy, texts.table, *texts.passkeys):
        assert len(task.context) == SMALL.context
    for probe in texts.copy.probes:
        whole = np.concatenate([probe.prompt, probe.answer])
        start = SMALL.context - probe.distance
        np.testing.assert_array_equal(texts.copy.context[start : start + 32], whole)
    # The table's text is what the passages were put into; the passages themselves are nowhere else in it.
    passage = bytes(texts.copy.probes[0].answer.astype(np.uint8))
    assert passage not in bytes(texts.table.context.astype(np.uint8))
    np.testing.assert_array_equal(texts.copy.context, again.copy.context)
    assert not np.array_equal(texts.copy.context, other.copy.context)
    assert texts.passkeys[0].probes[0].distance == SMALL.context // 2


def test_compared_queries_are_fixed_and_late():
    found = Protocol().compared()
    assert len(found) == len(set(found.tolist())) == 640
    assert found.min() >= 2048 and found.max() < 7167 and (np.diff(found) > 0).all()


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"context": 7000}, "whole chunks"),
        ({"context": 8192}, "no room"),
        ({"bins": (4096, 2048)}, "increasing"),
        ({"bins": (2048, 7168)}, "must leave queries"),
        ({"positions": 6000}, "must leave queries"),
    ],
)
def test_protocols_that_cannot_be_are_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        Protocol(**fields)


def test_families_meet_at_equal_density():
    protocol = Protocol()
    plans = contestants(protocol, (0.05, 0.1, 0.3), RECALL, ablations=ABLATIONS)
    assert [plan.family for plan in plans[:2]] == ["dense", "window"] and plans[0].target == 1
    assert len(plans) == 1 + 3 * (len(FAMILIES) + len(ABLATIONS))
    for plan in plans[1:]:
        assert plan.geometry.length == protocol.length
        share = plan.geometry.replace(length=protocol.context).share()
        if isinstance(plan.geometry, ProbeGeometry):
            more = plan.geometry.replace(length=protocol.context, blocks=plan.geometry.blocks + 1)
            assert share <= plan.target < more.share(), plan
        else:
            # The window, which takes what is left over, goes by whole keys, and lists of whole blocks meet it in steps.
            assert share == pytest.approx(plan.target, rel=0.02), plan
    at = {plan.family: plan.geometry for plan in plans if plan.target == 0.1}
    fixed = fixed_part(0.1, protocol.context)
    assert fixed == {"local": 128, "anchors": 32}
    assert (at["probe"].local, at["probe"].anchors) == (128, 32)
    assert 128 <= at["stochastic"].local < at["window"].local
    assert at["probe, no anchors"].blocks > at["probe"].blocks


def test_a_family_without_room_is_told():
    (told,) = contestants(SMALL, (0.01,), (), families=("stochastic",))
    assert told.startswith("stochastic at 1.0%: ") and "too little" in told
    with pytest.raises(ValueError, match=r"\['best'\] are unknown"):
        contestants(SMALL, (0.1,), (), families=("best",))


def test_probe_at_takes_changes_and_fills_the_share():
    plain, pooled = probe_at(0.2, 4096, RECALL), probe_at(0.2, 4096, RECALL, ranking="pooled", block=64)
    assert plain.recall == RECALL and pooled.ranking == "pooled" and pooled.block == 64
    for geometry in (plain, pooled):
        assert geometry.share() <= 0.2 < geometry.replace(blocks=geometry.blocks + 1).share()
    with pytest.raises(ValueError, match="too little"):
        probe_at(0.001, 4096, RECALL)


def test_divergence_is_that_of_the_definition():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.1, 0.6, 0.3])
    kl, same = divergence(np.log(np.stack([p, p])) + 5, np.log(np.stack([q, p])) - 3)
    np.testing.assert_allclose(kl, [np.sum(p * np.log(p / q)), 0], atol=1e-15)
    assert same.tolist() == [False, True]


def test_dense_scores_are_those_of_one_call(model, texts):
    context = texts.copy.context
    scores, state = Meter(model, DenseGeometry(length=SMALL.length), SMALL).score(context)
    logits = np.asarray(model(jnp.asarray(context[None]))[0][0], np.float64)
    expected = [-log_probs(logits[i : i + 1], context[i + 1 : i + 2])[0] for i in range(SMALL.context - 1)]
    # Chunks and one call add in another order.
    np.testing.assert_allclose(scores.nll, expected, atol=2e-5)
    np.testing.assert_allclose(scores.logits, logits[SMALL.compared()], atol=2e-5)
    assert scores.share == 1.0 and state[1] == SMALL.context


@pytest.mark.parametrize("family", ["stochastic", "probe"])
def test_what_is_read_is_counted(model, texts, family):
    if family == "stochastic":
        geometry = PublishedGeometry(length=SMALL.length, local=15, anchors=8, seeds=3)
        expected = density.real_share(geometry.chunks(100, 0, SMALL.context), SMALL.context)
    else:
        geometry = ProbeGeometry(length=SMALL.length, local=16, anchors=8, block=8, blocks=0, stride=8)
        expected = density.fixed_pairs(SMALL.context, local=16, anchors=8) / density.causal_pairs(SMALL.context)
    scores, _ = Meter(model, geometry, SMALL).score(texts.copy.context)
    assert scores.share == pytest.approx(expected, rel=1e-6)


def test_measure_against_dense(model, texts):
    meter = Meter(model, DenseGeometry(length=SMALL.length), SMALL)
    scores, _ = meter.score(texts.copy.context)
    with pytest.raises(ValueError, match="no time to tell"):
        meter.seconds()
    found = measure(meter, texts, scores.logits)
    assert found["kl"] == 0 and found["top1"] == 1 and found["real_share"] == 1 and found["ranking_share"] == 0
    assert found["nll"] == pytest.approx(scores.nll.mean()) and found["nll_128"] == pytest.approx(
        scores.nll[128:].mean()
    )
    assert len(found["kl_parts"]) == 16 and 0 < found["seconds"] < 60 and found["cpu_seconds"] > 0
    for task, each in ((texts.copy, found["copy_each"]), (texts.table, found["key_each"])):
        for probe, nll in zip(task.probes, each, strict=True):
            whole = np.concatenate([task.context, probe.inputs()])
            logits = np.asarray(model(jnp.asarray(whole[None]))[0][0])
            assert nll == pytest.approx(-log_probs(logits, probe.answer).mean(), abs=2e-5)
    (probe,) = texts.passkeys[0].probes
    likelihoods = []
    for candidate in probe.candidates:
        whole = np.concatenate([texts.passkeys[0].context, probe.inputs(candidate)])
        likelihoods.append(log_probs(np.asarray(model(jnp.asarray(whole[None]))[0][0]), candidate).sum())
    order = np.argsort(-np.array(likelihoods)).tolist()
    assert found["passkey_rank"] == [1 + order.index(probe.correct)] and found["passkey_exact"] == [False]


def test_leaving_pairs_out_is_seen(model, texts):
    dense, _ = Meter(model, DenseGeometry(length=SMALL.length), SMALL).score(texts.copy.context)
    geometry = ProbeGeometry(length=SMALL.length, local=8, anchors=4, block=8, blocks=1, stride=16, recall=RECALL)
    found = measure(Meter(model, geometry, SMALL), texts, dense.logits)
    assert 0 < found["kl"] < 1 and 0 < found["real_share"] < 0.2
    # Two of four heads ask at every query, the others at every 16th; a product is half of what dense does for a pair.
    assert found["ranking_share"] == pytest.approx((1 / 2 + 1 / 32) / 2)


def test_answers_without_a_common_softmax(model, texts):
    plans = contestants(SMALL, (0.3,), RECALL, families=("stochastic",), ablations=MIXES)
    assert [(plan.family, plan.mix) for plan in plans] == [("stochastic", None), *MIXES.items()]
    assert len({plan.geometry for plan in plans}) == 1
    probe = texts.copy.probes[0]
    text, exact, half = (Meter(model, plan.geometry, SMALL, mix=plan.mix) for plan in plans)
    scores, state = text.score(texts.copy.context)
    as_text, union, halves = (meter.ask(state, probe) for meter in (text, exact, half))
    assert as_text.shape == union.shape == halves.shape
    # The prompt is read alike. The first token of an answer has its own row's far keys: PFUS is the row of the mask.
    np.testing.assert_allclose(union[:2], as_text[:2], atol=1e-6)
    np.testing.assert_array_equal(halves[0], union[0])
    assert np.abs(halves[1:] - union[1:]).max(1).min() > 1e-5
    # The row is kept for the whole answer, so later tokens see other far keys than as text; and the state is as it was.
    assert np.abs(union[2:] - as_text[2:]).max() > 1e-5
    np.testing.assert_array_equal(text.ask(state, probe), as_text)
    found = [measure(meter, texts, scores.logits) for meter in (exact, half)]
    same = ("nll", "kl", "top1", "real_share")
    assert [found[0][name] for name in same] == [found[1][name] for name in same] and found[0]["kl"] == 0
    for name in ("copy_nll", "key_nll", "passkey_nll"):
        assert found[0][name] != found[1][name], name


def test_mixes_are_equal_where_no_key_is_far(model, texts):
    geometry, (probe, _) = PublishedGeometry(length=SMALL.length, local=SMALL.length, seeds=1), texts.copy.probes
    meters = [Meter(model, geometry, SMALL, mix=mix) for mix in ("exact", "half")]
    _, state = meters[0].score(texts.copy.context)
    union, halves = (meter.ask(state, probe) for meter in meters)
    np.testing.assert_allclose(halves, union, atol=1e-6)
    for other in (DenseGeometry(length=SMALL.length), ProbeGeometry(length=SMALL.length)):
        with pytest.raises(ValueError, match=f"mix = 'half' says nothing to a {other.kind} geometry"):
            Meter(model, other, SMALL, mix="half")
