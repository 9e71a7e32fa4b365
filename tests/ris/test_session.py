"""Sessions: read once, ask often; whatever ends a turn, the cache is where the last whole turn left it.

The oracle is the model itself: greedy continuation of the whole conversation, recomputed from its token ids.
"""

import dataclasses
import errno
import json
import os
import signal
import types

import jax
import numpy as np
import pytest
from flax import nnx

from plga_jax.models.decoder import Decoder
from plga_jax.models.decoder_config import DecoderConfig
from plga_jax.ops.rope_scaling import RopeConfig
from plga_jax.ops.sampling import SamplingConfig
from ris_jax import reader as reader_module
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.geometry import PublishedGeometry
from ris_jax.patterns import DenseGeometry, WindowGeometry
from ris_jax.probe import ProbeGeometry
from ris_jax.prompts import layout
from ris_jax.session import Session
from ris_jax.session_config import AnswerConfig, SessionConfig
from ris_jax.store import Layers, PrefillStore
from tests.ris.chat_tokenizer import END, ToyChatTokenizer

TOKENIZER = ToyChatTokenizer()
GREEDY = AnswerConfig(sampling=SamplingConfig(greedy=True))
MODEL = DecoderConfig(
    vocab_size=262,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_width=8,
    model_width=16,
    hidden_width=16,
    context=1024,
    rope=RopeConfig(context=1024),
    eos_ids=(END,),
)
CONFIG = SessionConfig(
    geometry=lambda window: DenseGeometry(length=window),
    window=512,
    chunk=64,
    question_room=64,
    max_new_tokens=8,
    system="Answer.",
)


@pytest.fixture(scope="module")
def model():
    # Larger weights than a fresh model's: its answers differ from each other and do not repeat one token.
    return jax.tree.map(lambda x: 8 * x, Decoder(MODEL, rngs=nnx.Rngs(2)))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    texts = {"a.txt": "Anna keeps bees. " * 4, "b.txt": "Bert, a boat; Carl, a car."}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


@pytest.fixture
def make(model, files):
    def make_session(open_files=True, **changes):
        told = []
        other = {name: changes.pop(name) for name in ("store", "progress") if name in changes}
        session = Session(
            model, TOKENIZER, dataclasses.replace(CONFIG, **changes), name="toy", notify=told.append, **other
        )
        session.told = told
        if open_files:
            session.open(files)
        return session

    return make_session


@jax.jit
def _likeliest(model, tokens, real):
    logits, _ = model(tokens, segment_ids=real, last_only=True)
    return logits[0, -1].argmax()


def continuation(model, ids, count):
    """Greedy tokens after ids, each from the whole sequence."""
    ids, new = list(ids), []
    for _ in range(count):
        padded = np.zeros((2, 1, 1024), np.int32)
        padded[0, 0, : len(ids)], padded[1, 0, : len(ids)] = ids, 1
        token = int(_likeliest(model, *padded))
        if token == END:
            break
        new.append(token)
        ids.append(token)
    return new


def answer(session, question, *, chat=False, config=GREEDY):
    return "".join((session.chat if chat else session.ask)(question, config))


def document_ids(session):
    return session._ids.tolist()


def expected_answer(model, session, *turns, count=8):
    """Text of the last of some turns, and the ids of all."""
    ids = document_ids(session)
    for index, question in enumerate(turns):
        ids += layout(TOKENIZER).turn(question, first=index == 0)
        new = continuation(model, ids, count)
        ids += new
    return TOKENIZER.decode(new), ids


def test_the_answer_is_the_models(model, make):
    session = make()
    expected, _ = expected_answer(model, session, "Who?")
    assert answer(session, "Who?") == expected
    (turn,) = session.turns
    assert (turn.question, turn.answer, turn.ended, turn.fresh) == ("Who?", expected, "length", True)
    assert turn.answer_tokens == 8 and turn.question_tokens == len(layout(TOKENIZER).turn("Who?", first=True))


GEOMETRIES = {
    "dense": CONFIG.geometry,
    "stochastic": lambda window: PublishedGeometry(length=window, local=16, anchors=4, seeds=2),
    "block_shared": lambda window: BlockSharedGeometry(length=window, budget=32, local=16, anchors=8, tile=16, block=8),
    "probe": lambda window: ProbeGeometry(length=window, local=16, anchors=8, block=8, blocks=3, stride=4),
}


@pytest.mark.parametrize("kind", GEOMETRIES)
class TestEveryGeometry:
    def test_no_chunk_size_changes_the_answer(self, make, kind):
        geometry = GEOMETRIES[kind]
        assert answer(make(geometry=geometry, chunk=7), "Who?") == answer(make(geometry=geometry), "Who?")

    def test_what_was_undone_leaves_no_trace(self, make, kind):
        fresh, session = (make(geometry=GEOMETRIES[kind]) for _ in range(2))
        expected = [answer(fresh, question, chat=True) for question in ("Who?", "And then?")]
        for question in ("Else?", "Where, and when, and with whom?"):
            answer(session, question, chat=True)
        session.undo(), session.undo()
        assert [answer(session, question, chat=True) for question in ("Who?", "And then?")] == expected
        assert answer(session, "Who?") == expected[0]

    def test_the_store_gives_back_the_same_cache(self, make, kind, tmp_path):
        store = PrefillStore(tmp_path)
        first, second = (make(geometry=GEOMETRIES[kind], store=store) for _ in range(2))
        assert (first.read().source, second.read().source) == ("computed", "store")
        saved, loaded = (session._reader.save() for session in (first, second))
        assert saved.keys() == loaded.keys() and any(name.startswith("cache/") for name in saved)
        for name, array in saved.items():
            if isinstance(array, Layers):
                for layer in range(MODEL.num_layers):
                    # Slots beyond the filled part of the last block hold what padding left; nobody sees them.
                    np.testing.assert_array_equal(array.read(layer), loaded[name].read(layer))
            else:
                np.testing.assert_array_equal(array, loaded[name])
        for question in ("Who?", "And then?"):
            assert answer(second, question, chat=True) == answer(first, question, chat=True)

    @pytest.mark.parametrize("policy", [{"anchors": "frozen"}, {"anchors": "refresh", "refresh": 3}])
    def test_an_answer_leaves_the_geometry_as_it_was(self, make, kind, policy):
        session = make(geometry=GEOMETRIES[kind], **policy)
        first = answer(session, "Who?", chat=True)
        second = answer(session, "And then?", chat=True)
        session.undo()
        assert answer(session, "And then?", chat=True) == second and answer(session, "Who?") == first
        assert getattr(session._reader._held, "geometry", session._reader.geometry) == session._reader.geometry


@pytest.mark.parametrize("chunk", [1, 1000])
def test_chunks_of_one_token_and_of_all(make, chunk):
    assert answer(make(chunk=chunk), "Who?") == answer(make(), "Who?")


def test_a_second_question_reads_no_document(model, make, monkeypatch):
    session = make()
    answer(session, "Who?")
    sizes, read = [], reader_module._read

    def counted(model, tokens, *rest, **choices):
        sizes.append(tokens.size)
        return read(model, tokens, *rest, **choices)

    monkeypatch.setattr(reader_module, "_read", counted)
    assert session.read().source == "memory"
    assert answer(session, "What?") == expected_answer(model, session, "What?")[0]
    assert sizes == [64]
    assert answer(session, "Who?") == session.turns[0].answer


def test_a_conversation_continues_and_undo_rolls_back(model, make):
    session = make()
    first = answer(session, "Who?", chat=True)
    second, ids = expected_answer(model, session, "Who?", "And then?")
    assert answer(session, "And then?", chat=True) == second
    assert second != expected_answer(model, session, "And then?")[0], "the history makes no difference: a poor test"
    assert session._reader.length == len(ids)
    assert [turn.question for turn in session.history] == ["Who?", "And then?"]
    assert session.undo().question == "And then?"
    assert answer(session, "Else?", chat=True) == expected_answer(model, session, "Who?", "Else?")[0]
    session.undo(), session.undo()
    assert session.undo() is None and session.history == []
    assert answer(session, "Who?", chat=True) == first
    session.reset()
    assert session.history == [] and session._reader.length == len(document_ids(session))
    assert answer(session, "Who?", chat=True) == first
    assert answer(session, "Who?") == first and session.history == []


def test_the_end_token_ends_an_answer_and_begins_the_next_turn(model, make, monkeypatch):
    session = make(max_new_tokens=6)
    (third,) = continuation(model, document_ids(session) + layout(TOKENIZER).turn("Who?", first=True), 3)[2:]
    monkeypatch.setattr(session._model, "config", dataclasses.replace(MODEL, eos_ids=(third,)))
    answer(session, "Who?", chat=True)
    (turn,) = session.turns
    assert (turn.ended, turn.answer_tokens) == ("end token", 2)
    assert session._reader.length == len(document_ids(session)) + turn.question_tokens + 2


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_that_nobody_wants_is_undone(make, chat):
    session = make()
    before = answer(session, "Who?", chat=True)
    pieces = (session.chat if chat else session.ask)("And then?", GREEDY)
    next(pieces), next(pieces)
    session.cancel()
    assert len(session.turns) == 1
    assert len(session.history) == chat
    assert answer(session, "Who?") == before


def test_ctrl_c_during_an_answer_restores_the_turn_before(make):
    session = make()
    answer(session, "Who?", chat=True)
    length, plain = session._reader.length, answer_of_copy(make, "Who?", "And then?")
    pieces = session.chat("And then?", GREEDY)
    next(pieces)
    with pytest.raises(KeyboardInterrupt):
        for index, _ in enumerate(pieces):
            if index == 2:
                os.kill(os.getpid(), signal.SIGINT)
    session.cancel()
    assert session._reader.length == length and len(session.history) == 1
    assert answer(session, "And then?", chat=True) == plain


def answer_of_copy(make, *questions):
    session = make()
    return [answer(session, question, chat=True) for question in questions][-1]


def test_ctrl_c_during_a_step_takes_effect_after_it(make, monkeypatch):
    session = make()
    expected = answer(session, "Who?")
    step = reader_module._next

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return step(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reader_module, "_next", interrupted)
        answer(session, "Who?", chat=True)
    assert session.history == [] and not session._reader.lost
    assert answer(session, "Who?", chat=True) == expected


def test_an_interrupted_reading_goes_on_where_it_stopped(make, monkeypatch, tmp_path):
    store = PrefillStore(tmp_path)
    session, expected = make(store=store), answer(make(), "Who?")
    read, sizes = reader_module._read, []

    def interrupted(model, tokens, *rest, **choices):
        sizes.append(tokens.size)
        if len(sizes) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return read(model, tokens, *rest, **choices)

    monkeypatch.setattr(reader_module, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.read()
    assert sizes == [64, 64] and store.entries() == []
    assert session.read().source == "computed"
    assert sum(sizes) < len(document_ids(session)) + 64
    assert answer(session, "Who?") == expected and len(store.entries()) == 1


def test_a_lost_cache_is_read_again(make, monkeypatch):
    session = make()
    expected = answer(session, "Who?", chat=True)

    def failing(*arguments):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(reader_module, "_next", failing)
        answer(session, "And?", chat=True)
    assert answer(session, "Who?", chat=True) == expected
    assert any("read again" in notice for notice in session.told)


class TestStore:
    def test_the_second_session_reads_from_it(self, make, tmp_path):
        store = PrefillStore(tmp_path)
        first, second = make(store=store), make(store=store)
        assert (first.read().source, second.read().source) == ("computed", "store")
        for chat in (False, True):
            assert answer(second, "Who?", chat=chat) == answer(first, "Who?", chat=chat)
        assert answer(second, "And?", chat=True) == answer(first, "And?", chat=True)
        (entry,) = store.entries()
        assert entry.num_tokens == len(document_ids(first))
        # Only what is filled is stored: of 512 slots.
        filled = 2 * 2 * len(document_ids(first)) * 8 * 4
        assert filled < entry.size < filled + 8000

    @pytest.mark.parametrize(
        "changes",
        [
            {"kv_dtype": "bfloat16"},
            {"geometry": lambda window: WindowGeometry(length=window, local=32, anchors=4)},
            {"geometry": lambda window: WindowGeometry(length=window, local=32, anchors=5)},
            {"window": 513},
            {"chunk": 65},
            {"system": "Answer!"},
        ],
    )
    def test_other_settings_are_read_anew(self, make, tmp_path, changes):
        store = PrefillStore(tmp_path)
        make(store=store).read()
        if "geometry" in changes:
            make(store=store, geometry=lambda window: WindowGeometry(length=window, local=32, anchors=3)).read()
        assert make(store=store, **changes).read().source == "computed"

    def test_other_weights_documents_and_positions_are_read_anew(self, model, make, files, tmp_path):
        store = PrefillStore(tmp_path / "store")
        make(store=store).read()
        changed = tmp_path / "a.txt"
        changed.write_text(files[0].read_text().replace("bees", "cats"))
        session = make(store=store)
        session.open([changed, files[1]])
        assert session.read().source == "computed"
        turned = dataclasses.replace(MODEL, rope=RopeConfig(base=2e4))
        for other in (Decoder(MODEL, rngs=nnx.Rngs(5)), model.with_config(turned)):
            session = Session(other, TOKENIZER, CONFIG, store=store)
            session.open(files)
            assert session.read().source == "computed"

    def test_a_damaged_file_is_computed_again_and_said_so(self, make, tmp_path):
        store = PrefillStore(tmp_path)
        first = make(store=store)
        expected = answer(first, "Who?")
        (entry,) = store.entries()
        whole = entry.path.read_bytes()
        entry.path.write_bytes(whole[:-9] + b"?" + whole[-8:])
        second = make(store=store)
        assert second.read().source == "computed" and answer(second, "Who?") == expected
        assert second.told == second.notices and "has changed since it was written" in second.told[0]
        assert make(store=store).read().source == "store"

    def test_a_full_disk_costs_the_entry_not_the_answer(self, make, tmp_path, monkeypatch):
        store = PrefillStore(tmp_path)
        session = make(store=store)

        def full(key, arrays):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(store, "save", full)
        assert answer(session, "Who?") == answer(make(), "Who?")
        assert session.told == [f"What was read cannot be kept in {tmp_path}: No space left on device."]


class TestSampling:
    DRAWN = AnswerConfig(sampling=SamplingConfig(temperature=1.5))

    def test_the_seed_decides(self, make):
        session = make()
        answers = [answer(session, "Who?", config=dataclasses.replace(self.DRAWN, seed=seed)) for seed in (0, 1, 0)]
        assert answers[0] == answers[2] != answers[1]

    def test_each_turn_has_its_own_draws_and_undo_gives_them_back(self, make):
        session = make()
        answer(session, "Who?", chat=True, config=self.DRAWN)
        again = answer(session, "Who?", chat=True, config=self.DRAWN)
        session.undo()
        assert answer(session, "Who?", chat=True, config=self.DRAWN) == again

    def test_the_penalty_applies_to_its_scope(self, make, model):
        penalty = SamplingConfig(greedy=True, repetition_penalty=1e6)
        session = make(max_new_tokens=8)
        earlier = answer(session, "Who?", chat=True, config=AnswerConfig(sampling=penalty))
        for scope in ("turn", "everything"):
            answer(session, "Hey", chat=True, config=AnswerConfig(sampling=penalty, penalty_scope=scope))
            *_, (_, _, ids) = session._conversation
            new, turn = ids[-8:], ids[:-8]
            session.undo()
            assert len(set(new)) == 8 and not set(new) & set(turn)
            before = {*document_ids(session), *TOKENIZER.encode(earlier)}
            assert bool(set(new) & before) == (scope == "turn")

    def test_stop_strings(self, make):
        session = make()
        whole = answer(session, "Who?")
        stop = whole[3:5]
        assert whole.find(stop) == 3
        assert answer(session, "Who?", config=dataclasses.replace(GREEDY, stop_strings=(stop,))) == whole[:3]
        assert session.turns[-1].ended == f"stop string {stop!r}"
        assert answer(session, "Who?") == whole

    def test_the_topic_filter(self, make, monkeypatch):
        session = make()
        pieces = iter(["Bees. ", "# Hea", "ding", " more"] + [""] * 9)
        stream = types.SimpleNamespace(push=lambda token: next(pieces), flush=str)
        monkeypatch.setattr(TOKENIZER, "stream", lambda: stream)
        assert answer(session, "Who?", config=dataclasses.replace(GREEDY, topic_threshold=-0.1)) == "Bees."
        assert session.turns[-1].ended == "a heading"


class TestRoom:
    def test_what_does_not_fit_is_cut_from_the_end(self, make, files):
        session = make(window=320, max_new_tokens=8)
        plan = session.plan
        assert plan.num_tokens == 320 - 64 - 8 == len(document_ids(session))
        kept = [file.end - file.start for file in plan.files]
        whole = make().plan
        assert [k + file.lost for k, file in zip(kept, plan.files)] == [file.end - file.start for file in whole.files]
        assert plan.lost > 0 and session.told == [f"{plan.lost} tokens of the documents do not fit and are not read."]
        assert f"{kept[1]} of {kept[1] + plan.files[1].lost} tokens" in plan.text()
        assert answer(session, "Who?")

    def test_the_window_fits_itself(self, make, files, tmp_path):
        session = make(window=None)
        assert session.plan.window == 1024
        long = tmp_path / "long.txt"
        long.write_text("word " * 300)
        session.open([long])
        assert session.plan.window == 2048 and session.plan.lost == 0
        assert session._model.config.context == 2048 and session._model.config.rope.kind == "yarn"
        assert "trained on 1024 tokens; positions are stretched (yarn)" in session.plan.text()
        assert len(answer(session, "Who?")) > 0
        session.open(files)
        assert session._model.config == MODEL

    def test_without_stretching_documents_are_cut(self, make, tmp_path):
        long = tmp_path / "long.txt"
        long.write_text("word " * 300)
        session = make(window=None, rope="none", open_files=False)
        assert session.open([long]).window == 1024 and session.plan.lost > 0
        with pytest.raises(ValueError, match="window of 2048 tokens exceeds the 1024"):
            make(window=2048, rope="none")

    def test_a_full_window_forgets_the_conversation_and_says_so(self, model, make):
        session = make(window=400, question_room=70, max_new_tokens=8)
        questions = [f"Question {index}?" for index in range(4)]
        for question in questions:
            told = len(session.told)
            text = answer(session, question, chat=True)
            if len(session.told) > told:
                break
        assert "conversation is forgotten, the documents are not" in session.told[-1]
        assert len(session.history) == 1 and session.history[0].fresh
        assert text == expected_answer(model, session, question)[0]

    def test_a_question_longer_than_its_room(self, make):
        session = make(window=None)
        room = 1024 - len(document_ids(session))
        with pytest.raises(ValueError, match=rf"question has \d+ tokens .* up to 8, .* of 1024 has room for {room} "):
            session.ask("x" * 900)
        assert session.reading is None, "nothing should have been read for it"
        assert answer(session, "Who?")

    def test_a_question_known_ahead_gets_its_room(self, make, files):
        session = make(open_files=False)
        plan = session.open(files, questions=["x" * 200, "Who?"])
        assert plan.window - plan.num_tokens == len(layout(TOKENIZER).turn("x" * 200, first=True)) + 8
        assert plan.lost > 0 and session.reading is None
        assert answer(session, "x" * 200) and answer(session, "Who?")
        with pytest.raises(ValueError, match="question is empty"):
            session.open(files, questions=[" "])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"window": 100}, r"window of 100 tokens has no room for documents: .* leave -"),
            ({"rope": "bend"}, "rope = 'bend' is unknown"),
            ({"anchors": "thawed"}, "anchors = 'thawed' is unknown"),
            ({"chunk": 0}, "chunk = 0 must be at least 1"),
            ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ],
    )
    def test_bad_choices(self, make, changes, message):
        with pytest.raises(ValueError, match=message):
            make(**changes)

    def test_bad_answers(self):
        with pytest.raises(ValueError, match="penalty_scope = 'all'"):
            AnswerConfig(penalty_scope="all")
        with pytest.raises(ValueError, match="stop string is empty"):
            AnswerConfig(stop_strings=("",))
        with pytest.raises(ValueError, match="threshold = 2"):
            AnswerConfig(topic_threshold=2)

    def test_bad_documents(self, make, tmp_path):
        session = make(open_files=False)
        with pytest.raises(ValueError, match="open first"):
            session.ask("Who?")
        with pytest.raises(ValueError, match="absent"):
            session.open([tmp_path / "absent"])
        (tmp_path / "empty.txt").write_text(" \n")
        with pytest.raises(ValueError, match="holds no text"):
            session.open([tmp_path / "empty.txt"])


def test_the_plan_tells_numbers(make):
    plan = make(geometry=lambda window: WindowGeometry(length=window, local=32, anchors=4)).plan
    share = WindowGeometry(length=plan.num_tokens, local=32, anchors=4).share()
    assert plan.cost.share == share and f"{share:.1%} of the causal pairs" in plan.text()
    assert plan.cost.attention_flops == pytest.approx(share * plan.dense.attention_flops)
    assert plan.cache_bytes == 2 * 2 * 512 * 8 * 4
    layer = 16 * (16 + 8 + 8) + 16 * 16 + 3 * 16 * 16 + 2 * 16
    assert plan.weights_bytes == 4 * (262 * 16 + 2 * layer + 16)
    assert "window, local 32, anchors 4" in plan.text()


@pytest.mark.parametrize("kind", GEOMETRIES)
def test_the_plan_expects_what_is_read(make, kind):
    geometry = GEOMETRIES[kind](512)
    session = make(geometry=lambda window: geometry)
    length = session.plan.num_tokens
    if kind == "probe":
        counted = session.read().real_share
    else:
        mask = geometry.mask()[:length, :length]
        counted = mask.sum() / (length * (length + 1) / 2)
    # One draw of the samples, and blocks that the window holds already, against their expectation: within a tenth.
    assert session.plan.cost.share == pytest.approx(counted, rel=0.1)


def test_the_manifest_is_json_and_complete(make):
    session = make()
    assert json.loads(json.dumps(session.manifest()))["turns"] == []
    answer(session, "Who?")
    manifest = json.loads(json.dumps(session.manifest()))
    assert manifest["geometry"] == {"kind": "dense", "length": 512}
    assert manifest["geometry_sha256"] == DenseGeometry(length=512).fingerprint()
    assert manifest["expected_density"] == 1.0 and manifest["reading"]["source"] == "computed"
    assert manifest["turns"][0]["question"] == "Who?" and manifest["turns"][0]["answer"] == session.turns[0].answer
    assert {"jax", "python"} <= manifest["environment"].keys() and manifest["model"]["name"] == "toy"
    assert manifest["turns"][0]["config"]["sampling"]["greedy"] is True


def test_the_recall_star_names_the_tokens_that_are_read(make, tmp_path):
    session = make(geometry=lambda window: PublishedGeometry(length=window, seeds=2, density=0.05, local=8, anchors=2))
    star = session.recall_star()
    ids = document_ids(session)
    assert star.row == len(ids) - 1 and star.edges
    for node, text in zip(star.nodes, star.texts):
        assert text == TOKENIZER.decode([ids[node]])
    star.write(tmp_path / "star.dot")
    assert (tmp_path / "star.dot").read_text().startswith("graph recall")
    with pytest.raises(ValueError, match="dense geometry draws no samples"):
        make().recall_star()
