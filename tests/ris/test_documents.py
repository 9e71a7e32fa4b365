"""Reading documents: nothing is lost unsaid, and passages are found where they are."""

import numpy as np
import pytest

from plga_jax.tokenizers import ByteTokenizer
from plga_jax.train.data import Corpus
from ris_jax.documents import Passages, long_text, read_documents

BYTES = ByteTokenizer()


@pytest.fixture
def files(tmp_path):
    texts = {"one.txt": "First words.", "two & more.md": "Sécond\n\n words,  here.", "three.txt": "Third."}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [tmp_path / name for name in texts]


def test_files_stand_between_tags_in_order(files):
    documents = read_documents(files, BYTES)
    assert BYTES.decode(documents.ids) == (
        '<document name="one.txt">\nFirst words.\n</document>\n'
        '<document name="two &amp; more.md">\nSécond\n\n words,  here.\n</document>\n'
        '<document name="three.txt">\nThird.\n</document>\n'
    )
    for file in documents.files:
        piece = BYTES.decode(documents.ids[file.start : file.end])
        assert piece.startswith("<document name=") and piece.endswith("</document>\n")
        assert piece.count("</document>") == 1 and file.lost == 0


def test_every_budget_counts_what_it_cuts(files):
    whole = read_documents(files, BYTES)
    sizes = [file.end - file.start for file in whole.files]
    for budget in range(1, len(whole.ids) + 5):
        cut = read_documents(files, BYTES, budget)
        np.testing.assert_array_equal(cut.ids, whole.ids[:budget])
        assert [file.end - file.start + file.lost for file in cut.files] == sizes
        assert sum(file.end - file.start for file in cut.files) == len(cut.ids)
        assert cut.lost == len(whole.ids) - len(cut.ids)
        again = whole.cut(budget + 3).cut(budget)
        assert again.files == cut.files


def test_the_report_names_what_was_cut(files):
    whole = read_documents(files, BYTES)
    cut = whole.cut(whole.files[1].start + 5)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in cut.report().splitlines()]
    second = whole.files[1].end - whole.files[1].start
    assert ["two & more.md", "5", str(second - 5)] in lines
    assert ["three.txt", "0", str(whole.files[2].end - whole.files[2].start)] in lines


def test_a_folder_gives_its_texts(files, tmp_path):
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    assert [f.name for f in read_documents([tmp_path], BYTES).files] == ["one.txt", "three.txt", "two & more.md"]


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no file or folder"), (b" \n", "holds no text"), (b"a\xff\xfe", "not UTF-8")]
)
def test_files_that_cannot_be_read_are_named(tmp_path, content, message):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s)bad.txt.*{message}|{message}.*bad.txt"):
        read_documents([path], BYTES)


def test_other_bad_input_is_refused(files, tmp_path):
    with pytest.raises(ValueError, match="no document is given"):
        read_documents([], BYTES)
    with pytest.raises(ValueError, match="0 tokens"):
        read_documents(files, BYTES, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no"):
        read_documents([tmp_path / "empty"], BYTES)


def test_passages_are_found_whatever_their_spaces(files):
    documents = read_documents(files, BYTES)
    start, end = Passages(documents.ids, BYTES).find("SÉCOND words, here.")
    assert BYTES.decode(documents.ids[start:end]) == "Sécond\n\n words,  here."
    # "é" is two tokens: a passage that begins with it begins with the first of them.
    start, end = Passages(documents.ids, BYTES).find("écon")
    assert documents.ids[start:end].tolist() == BYTES.encode("écon")
    assert Passages(documents.ids, BYTES).find("Fourth") is None
    assert Passages(documents.ids, BYTES).find("<document")[0] == 0
    with pytest.raises(ValueError, match="blank"):
        Passages(documents.ids, BYTES).find(" \n")


class Words:
    """A tokenizer whose tokens are whole words with their spaces."""

    def __init__(self, words):
        self.words = words

    def stream(self):
        return self

    def push(self, token):
        return self.words[token]


@pytest.mark.parametrize(
    ("passage", "span"),
    [("the cat", (0, 2)), ("cat", (1, 2)), ("at sat", (1, 3)), ("sat", (2, 3)), ("s", (2, 3)), ("down", (3, 4))],
)
def test_spans_cover_every_token_that_a_passage_touches(passage, span):
    assert Passages(np.arange(4), Words(["The", " cat", " sat", " down"])).find(passage) == span


def test_long_text_goes_on_where_it_stopped():
    corpus = Corpus(name="three texts", documents=["alpha " * 9, "beta " * 9, "gamma " * 9])
    whole = long_text(BYTES, 150, seed=4, corpus=corpus)
    assert whole.dtype == np.int32
    parts = [long_text(BYTES, 60, seed=4, corpus=corpus), long_text(BYTES, 90, seed=4, skip=60, corpus=corpus)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    orders = {BYTES.decode(long_text(BYTES, 150, seed=seed, corpus=corpus)) for seed in range(8)}
    assert 1 < len(orders) <= 6
    with pytest.raises(ValueError, match=r"three texts has .* tokens, 999"):
        long_text(BYTES, 999, seed=0, corpus=corpus)
    with pytest.raises(ValueError, match="length is 0"):
        long_text(BYTES, 0, seed=0, corpus=corpus)
