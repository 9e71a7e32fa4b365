"""Costs counted by hand, and advice that says which side is cheaper and why."""

import types

import pytest

from ris_jax.cost import Cost, Speed, advice, dense_is_cheaper, prefill_cost, published_bytes
from ris_jax.geometry import PublishedGeometry

# The sizes of SmolLM2-135M: 134.5 million weights, the tied head included.
SIZES = types.SimpleNamespace(
    vocab_size=49152, num_layers=30, num_heads=9, num_kv_heads=3, head_width=64, model_width=576, hidden_width=1536
)


def test_counts_by_hand():
    tiny = types.SimpleNamespace(
        vocab_size=10, num_layers=2, num_heads=3, num_kv_heads=1, head_width=4, model_width=5, hidden_width=7
    )
    cost = prefill_cost(tiny, 6, 0.5, ranking_share=0.25, logits=6, cache_itemsize=2)
    pairs = 21
    assert cost.attention_flops == 2 * 3 * pairs * 0.5 * (2 * 4 + 2 * 4)
    assert cost.ranking_flops == 2 * 3 * pairs * 0.25 * (2 * 4)
    weights = 5 * 12 + 5 * 4 + 5 * 4 + 12 * 5 + 3 * 5 * 7
    assert cost.linear_flops == 2 * 6 * (2 * weights + 5 * 10)
    assert cost.cache_bytes == 2 * 2 * 6 * 4 * 2
    assert cost.flops == cost.attention_flops + cost.ranking_flops + cost.linear_flops


def test_a_known_model():
    cost = prefill_cost(SIZES, 65536, cache_itemsize=2)
    assert cost.cache_bytes == 30 * 2 * 3 * 64 * 2 * 65536  # 1.5 GB in bfloat16
    assert prefill_cost(SIZES, 1, logits=1).linear_flops == pytest.approx(2 * 134.5e6, rel=1e-3)
    # What sparse attention can save at 64k.
    assert cost.attention_flops / cost.flops == pytest.approx(0.914, abs=1e-3)


def test_memory_of_the_published_program():
    chat = PublishedGeometry(length=40960, density=0.03, seeds=30, local=16)
    large = PublishedGeometry(length=65536, density=0.05, seeds=100)
    assert published_bytes(chat, 9)["index map"] == pytest.approx(9.1e9, rel=0.01)
    assert published_bytes(large, 9)["index map"] == pytest.approx(115e9, rel=0.01)
    assert published_bytes(large, 9)["mask"] == 65536**2
    assert published_bytes(large, 9)["scores"] == pytest.approx(154.6e9, rel=0.001)


def test_time_at_given_speeds():
    cost = Cost(share=0.1, attention_flops=8.0, ranking_flops=4.0, linear_flops=6.0, cache_bytes=0)
    speed = Speed(linear=3.0, dense=100.0, sparse=2.0)
    assert cost.seconds(speed) == 8 / 2 + 4 / 2 + 6 / 3
    whole = Cost(share=1.0, attention_flops=80.0, ranking_flops=0.0, linear_flops=6.0, cache_bytes=0)
    assert whole.seconds(speed) == 80 / 100 + 6 / 3


def test_advice():
    dense = prefill_cost(SIZES, 65536)
    sparse = prefill_cost(SIZES, 65536, 0.08, ranking_share=0.02)
    text = advice(sparse, dense)
    assert text.startswith("sparse is cheaper here: attention takes 9.0% of dense attention's FLOPs (1.0% to choose")
    assert not dense_is_cheaper(sparse, dense)

    published = prefill_cost(SIZES, 65536, PublishedGeometry(length=65536, density=0.01, seeds=100).share())
    text = advice(published, dense)
    assert text.startswith("dense is cheaper here: 64.6% of the causal pairs are kept") and "1.55×" in text

    # Few pairs, but a kernel a hundred times slower per pair.
    slow = Speed(linear=100.0, dense=100.0, sparse=1.0)
    assert dense_is_cheaper(sparse, dense, slow)
    assert advice(sparse, dense, slow).startswith("dense is cheaper here: attention takes 9.0%")
    assert dense_is_cheaper(dense, dense)


def test_refuses_what_is_out_of_range():
    with pytest.raises(ValueError, match=r"share = 1.1"):
        prefill_cost(SIZES, 10, 1.1)
    with pytest.raises(ValueError, match=r"ranking_share = -0.1"):
        prefill_cost(SIZES, 10, 1.0, ranking_share=-0.1)
    with pytest.raises(ValueError, match="length = 0"):
        prefill_cost(SIZES, 0)
    with pytest.raises(ValueError, match=r"sparse = 0 must be a positive"):
        Speed(sparse=0)
