"""Tokenizers: layout, round trips, streaming that never breaks a character, and refusals."""

import io
import json
import pathlib

import numpy as np
import pytest
import sentencepiece

from plga_jax.tokenizers import (
    SPECIAL_TOKENS,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    tokenizer_from_config,
)

PUBLISHED = pathlib.Path(__file__).parents[2] / "shared" / "data" / "pldr_tokenizer.model"
TEXT = "The naïve café sold 12 crêpes for €3.50. 漢字と仮名, ελληνικά, 👩‍🚀🚀!"


def _train(path, **settings):
    words = ["power", "law", "graph", "attention", "learns", "a", "metric", "tensor", "from", "its", "own", "queries"]
    rng = np.random.default_rng(0)
    sentences = [" ".join(rng.choice(words, size=8)) for _ in range(100)]
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=writer,
        **dict(
            model_type="unigram",
            vocab_size=300,
            hard_vocab_limit=False,
            byte_fallback=True,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            num_threads=1,
            minloglevel=2,
        )
        | settings,
    )
    path.write_bytes(writer.getvalue())
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return SentencePieceTokenizer(_train(tmp_path_factory.mktemp("tokenizer") / "tiny.model"))


@pytest.fixture(scope="module")
def published():
    if not PUBLISHED.exists():
        pytest.skip("the published tokenizer model is not at hand")
    return SentencePieceTokenizer(PUBLISHED)


@pytest.fixture(params=["byte", "tiny", "published"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "byte" else request.getfixturevalue(request.param)


class TestAll:
    def test_protocol(self, tokenizer):
        assert isinstance(tokenizer, Tokenizer)
        assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 3)

    def test_round_trip(self, tokenizer):
        ids = tokenizer.encode(TEXT)
        assert min(ids) > 0 and max(ids) < tokenizer.vocab_size
        # U+200D and other marks may be normalised away; nothing may be lost when the text is normalised already.
        once = tokenizer.decode(ids)
        assert tokenizer.decode(tokenizer.encode(once)) == once
        assert "naïve café sold 12 crêpes for €3.50. 漢字と仮名, ελληνικά" in once

    def test_encode_adds_no_special_ids(self, tokenizer):
        assert tokenizer.encode("") == []
        assert not set(tokenizer.encode("The law")) & set(range(len(SPECIAL_TOKENS)))

    def test_special_ids_give_no_text(self, tokenizer):
        ids = tokenizer.encode("power law")
        assert tokenizer.decode([2, *ids, 3, 0, 0]) == "power law"
        assert tokenizer.decode([tokenizer.eos_id]) == ""

    def test_streaming_a_text(self, tokenizer):
        ids = [*tokenizer.encode(TEXT), tokenizer.eos_id, *tokenizer.encode("And again 🚀")]
        stream = tokenizer.stream()
        pieces = [stream.push(token) for token in ids]
        assert stream.flush() == ""
        assert "".join(pieces) == tokenizer.decode(ids)
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert len([piece for piece in pieces if piece]) > 10  # it streams

    def test_streaming_noise(self, tokenizer):
        """An untrained model emits anything: broken UTF-8, special ids. The joined pieces still agree."""
        rng = np.random.default_rng(0)
        for top in (300, tokenizer.vocab_size) * 10:  # the lower ids are mostly bytes
            ids = rng.integers(0, min(top, tokenizer.vocab_size), size=60).tolist()
            stream = tokenizer.stream()
            assert "".join([stream.push(token) for token in ids] + [stream.flush()]) == tokenizer.decode(ids)

    def test_flush_gives_the_broken_rest_and_starts_anew(self, tokenizer):
        rocket = tokenizer.encode("🚀")[-4:]  # its four bytes, in every vocabulary here
        stream = tokenizer.stream()
        assert [stream.push(token) for token in rocket[:3]] == [""] * 3
        assert set(stream.flush()) == {"\N{REPLACEMENT CHARACTER}"}
        assert [stream.push(token) for token in rocket] == ["", "", "", "🚀"]

    def test_ids_of_another_vocabulary(self, tokenizer):
        for bad in (-1, tokenizer.vocab_size):
            with pytest.raises(ValueError, match=f"{bad} is outside"):
                tokenizer.decode([bad])

    def test_config_round_trip(self, tokenizer):
        config = json.loads(json.dumps(tokenizer.to_config()))
        again = tokenizer_from_config(config)
        assert type(again) is type(tokenizer)
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode(TEXT) == tokenizer.encode(TEXT)

    def test_another_fingerprint(self, tokenizer):
        with pytest.raises(ValueError, match="trained with"):
            tokenizer_from_config(tokenizer.to_config() | {"fingerprint": "other"})


class TestByte:
    def test_layout(self):
        tokenizer = ByteTokenizer()
        assert tokenizer.vocab_size == 262
        assert tokenizer.encode("A\n€") == [6 + 65, 6 + 10, 6 + 0xE2, 6 + 0x82, 6 + 0xAC]

    def test_loses_nothing(self):
        text = "Tabs\t, newlines\r\n  and \x00 stay.\ufffd"
        assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text

    def test_broken_utf8_is_replaced(self):
        assert ByteTokenizer().decode([6 + 0xFF, 6 + 65]) == "\N{REPLACEMENT CHARACTER}A"


class TestSentencePiece:
    def test_moved_file(self, tiny, tmp_path):
        moved = tmp_path / "moved.model"
        moved.write_bytes(tiny.path.read_bytes())
        config = tiny.to_config() | {"path": str(tmp_path / "gone.model")}
        with pytest.raises(ValueError, match="cannot read"):
            tokenizer_from_config(config)
        assert tokenizer_from_config(config, moved).encode("power") == tiny.encode("power")

    @pytest.mark.parametrize("content", [b"", b"not a model" * 20])
    def test_corrupt_file(self, tmp_path, content):
        path = tmp_path / "bad.model"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="no SentencePiece model"):
            SentencePieceTokenizer(path)

    def test_truncated_file(self, tiny, tmp_path):
        path = tmp_path / "short.model"
        path.write_bytes(tiny.path.read_bytes()[:-100])
        with pytest.raises(ValueError, match="damaged"):
            SentencePieceTokenizer(path)

    def test_folder(self, tmp_path):
        with pytest.raises(ValueError, match="cannot read"):
            SentencePieceTokenizer(tmp_path)

    def test_model_without_pad(self, tmp_path):
        path = _train(tmp_path / "nopad.model", pad_id=-1, unk_id=0)
        with pytest.raises(ValueError, match="pad_id=0"):
            SentencePieceTokenizer(path)

    def test_unknown_kind(self):
        with pytest.raises(ValueError, match="known are"):
            tokenizer_from_config({"name": "words"})


class TestPublished:
    def test_is_the_published_one(self, published):
        assert published.vocab_size == 32000
        assert published.fingerprint.startswith("51f43697") and published.fingerprint.endswith("2a666f")

    def test_normalisation(self, published):
        """White space collapses, newlines with it; case stays; digits are split; unknown characters become bytes."""
        assert published.decode(published.encode("  Two\n\nlines  and\tTABS ")) == "Two lines and TABS"
        assert len(published.encode("1234")) >= len(published.encode("1")) + 3
        assert published.encode("👩‍🚀")[-4:] == [6 + byte for byte in "🚀".encode()]
