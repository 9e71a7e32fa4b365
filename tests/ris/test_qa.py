"""The multiple-choice protocol with models that know, guess or always say the same."""

import dataclasses
import json

import numpy as np
import pytest

from plga_jax.tokenizers import ByteTokenizer
from ris_jax import published_results, qa, qa_summary, stats
from ris_jax.qa_records import COLUMNS, Key, ResultFile
from ris_jax.questions import Question, read_questions

BYTES = ByteTokenizer()
FACTS = {1: ("sky", "blue"), 2: ("grass", "green"), 3: ("coal", "black"), 4: ("snow", "white")}
COLOURS = ("blue", "green", "black", "white", "not told")
TEXT = "".join(f"The {thing} is {colour}. {'filler ' * 60}" for thing, colour in FACTS.values())
QUESTIONS = [
    Question(
        number=number,
        stem=f"What colour is the {thing}?",
        options=COLOURS,
        answer=COLOURS.index(colour),
        evidence=f"the {thing} is {colour}",
    )
    for number, (thing, colour) in FACTS.items()
]


class Knowing:
    """Answers from the text it was given, with the first letter of the options (or a text) as asked; E without it."""

    def __init__(self, setting=None):
        self.setting, self.prefills, self.calls = setting, 0, 0

    def prefill(self, ids):
        self.prefills += 1
        return tuple(ids.tolist())

    def real_density(self, state):
        return 0.25

    def logits(self, state, ids, rows=1):
        self.calls += 1
        text, asked = BYTES.decode(state), BYTES.decode(ids)
        thing = asked.split("colour is the ")[1].split("?")[0]
        options = [line[3:] for line in asked.split("\n") if line[1:3] == ") "]
        known = text.partition(f"The {thing} is ")[2].partition(".")[0]
        known = known if known in options else options[-1]
        letter = asked.rpartition("answer:")[0].endswith("letter of the right ")
        answer = "ABCDE"[options.index(known)] if letter else known
        begun = asked.rpartition("answer:")[2]
        out = np.zeros((rows, BYTES.vocab_size), np.float32)
        for row in range(rows):
            said = begun[: len(begun) - (rows - 1 - row)]
            following = (f" {answer}\n")[len(said) :] if f" {answer}\n".startswith(said) else "?"
            out[row, BYTES.encode(following)[0]] = 5.0
        return out


class AlwaysB(Knowing):
    def logits(self, state, ids, rows=1):
        out = np.zeros((rows, BYTES.vocab_size), np.float32)
        out[:, BYTES.encode("B")[0]] = 1.0
        return out


@pytest.fixture
def benchmark():
    return qa.Benchmark(questions=QUESTIONS, documents=np.array(BYTES.encode(TEXT), np.int32), tokenizer=BYTES)


def grid(**changes):
    wanted = {"windows": [4096], "densities": [0.01], "seeds": [2], "modes": ["stochastic"], "ropes": ["none"]}
    return qa.settings("toy", **(wanted | changes))


def run(benchmark, path, settings, reader=Knowing):
    readers = []

    def make(setting):
        readers.append(reader(setting))
        return readers[-1]

    results = ResultFile(path)
    qa.evaluate(benchmark, settings, make, results, progress=False)
    return results, readers


def test_floors_are_always_run():
    found = grid(windows=[2048, 4096], densities=[0.01, 0.05], seeds=[1, 10], base_seeds=[42, 43])
    assert [setting.mode for setting in found].count("none") == 1
    assert [setting.window for setting in found if setting.mode == "dense"] == [2048, 4096]
    assert len(found) == 1 + 2 * (1 + 2 * 2 * 2)
    assert len(set(found)) == len(found)


def test_each_mode_has_the_grid_that_means_something_to_it():
    found = grid(modes=["probe", "block_shared"], seeds=[1, 10], base_seeds=[42, 43], shares=[0.1, 0.2])
    assert [(each.mode, each.density, each.seeds, each.base_seed) for each in found[2:]] == [
        ("probe", 1.0, 0, 0),
        *(("block_shared", share, 1, base) for share in (0.1, 0.2) for base in (42, 43)),
    ]
    with pytest.raises(ValueError, match=r"modes \['dense', 'probes'\] are unknown; choose from stochastic"):
        grid(modes=["probes", "probe", "dense"])


@pytest.mark.parametrize("scoring", qa.SCORINGS)
def test_who_knows_is_right_and_without_documents_says_so(benchmark, tmp_path, scoring):
    benchmark = dataclasses.replace(benchmark, scorings=(scoring,), shuffles=4)
    results, readers = run(benchmark, tmp_path / "a.csv", grid())
    rows = results.rows()
    assert [reader.prefills for reader in readers] == [1, 1, 1]
    for mode, letters in (("none", {"E"}), ("dense", set("ABCD")), ("stochastic", set("ABCD"))):
        mine = [row for row in rows if row["RIS_Mode"] == mode]
        assert len(mine) == 16
        assert {row["Predicted"] for row in mine} == letters
        assert all((row["Correct"] == "1") == (mode != "none") for row in mine)
    by_question = {q: {row["Expected"] for row in rows if row["Question_ID"] == q} for q in "1234"}
    assert all(letters == set("ABCD") for letters in by_question.values())


def test_a_letter_is_read_from_one_call_and_texts_from_one_each(benchmark, tmp_path):
    for scoring, calls in (("letter", 4), ("spaced", 4), ("option", 20)):
        asked = dataclasses.replace(benchmark, scorings=(scoring,))
        _, readers = run(asked, tmp_path / f"{scoring}.csv", grid())
        assert [reader.calls for reader in readers] == [calls] * 3


def test_rows_have_the_published_columns_and_the_rest(benchmark, tmp_path):
    results, _ = run(dataclasses.replace(benchmark, scorings=("letter",)), tmp_path / "a.csv", grid())
    answers = published_results.read_answers(results.path)
    assert len(answers) == 12
    assert [(a.mode, a.window, a.density, a.seeds) for a in answers[::4]] == [
        ("none", 0, 1.0, 0),
        ("dense", 4096, 1.0, 0),
        ("stochastic", 4096, 0.01, 2),
    ]
    last = results.rows()[-1]
    assert list(last) == list(COLUMNS)
    assert last["Real_Density"] == "0.25" and last["Base_Seed"] == "42"
    assert last["Option_Logits"] == "0 0 0 5 0"
    assert float(last["Prob_Winner"]) == pytest.approx(np.exp(5) / (np.exp(5) + 4), abs=5e-5)


def test_evidence_is_where_the_context_has_it(benchmark, tmp_path):
    results, _ = run(benchmark, tmp_path / "a.csv", grid())
    setting = next(setting for setting in grid() if setting.mode == "dense")
    context = benchmark.context(setting)
    for row in results.rows():
        if row["RIS_Mode"] == "none":
            assert (row["Visible"], row["Evidence_Start"], row["Pos_Limit_Met"]) == ("", "", "False")
            continue
        thing, colour = FACTS[int(row["Question_ID"])]
        span = slice(int(row["Evidence_Start"]), int(row["Evidence_End"]))
        assert BYTES.decode(context[span]) == f"The {thing} is {colour}"
        assert row["Visible"] == row["Pos_Limit_Met"] == "True"


def test_what_the_window_cuts_is_not_visible(benchmark, tmp_path):
    spans = benchmark.evidence()
    # The window ends one token before the third piece of evidence does.
    cut = spans[3][1] - 1
    results, _ = run(
        dataclasses.replace(benchmark, scorings=("letter",)), tmp_path / "a.csv", grid(windows=[qa.RESERVE + cut])
    )
    rows = [row for row in results.rows() if row["RIS_Mode"] == "dense"]
    assert [row["Visible"] for row in rows] == ["True", "True", "False", "False"]
    assert [row["Pos_Limit_Met"] == "True" for row in rows] == [spans[q][0] < 0.85 * cut for q in FACTS]
    assert [row["Correct"] for row in rows] == ["1", "1", "0", "0"]
    found = qa_summary.summarise(results)["runs"][1]
    assert (found["evidence_visible"], found["evidence_cut"]) == ([2, 2], [0, 2])


def test_a_stated_position_rules_the_published_filter(benchmark, tmp_path):
    far = [dataclasses.replace(question, position=10**6) for question in QUESTIONS]
    asked = dataclasses.replace(benchmark, questions=far, scorings=("letter",))
    rows = run(asked, tmp_path / "a.csv", grid())[0].rows()
    assert {row["Pos_Limit_Met"] for row in rows} == {"False"}
    assert {row["Visible"] for row in rows if row["Window"] != "0"} == {"True"}


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_a_run_goes_on_where_it_was_killed(benchmark, tmp_path, torn):
    whole, _ = run(benchmark, tmp_path / "whole.csv", grid())
    lines = whole.path.read_text().splitlines(keepends=True)
    keep = 1 + 12 + 5
    (tmp_path / "cut.csv").write_text("".join(lines[:keep]) + lines[keep][:torn])
    results, readers = run(benchmark, tmp_path / "cut.csv", grid())
    # The first setting was whole: its reader is not even made.
    assert [reader.setting.mode for reader in readers] == ["dense", "stochastic"]
    ignored = ("Timestamp", "Prefill_Seconds", "Seconds")
    assert [{k: v for k, v in row.items() if k not in ignored} for row in results.rows()] == [
        {k: v for k, v in row.items() if k not in ignored} for row in whole.rows()
    ]
    _, readers = run(benchmark, tmp_path / "cut.csv", grid())
    assert not readers


def test_run_ids_tell_apart_what_differs(benchmark):
    setting = grid()[-1]
    others = [
        (benchmark, dataclasses.replace(setting, base_seed=43)),
        (benchmark, dataclasses.replace(setting, density=0.02)),
        (benchmark, dataclasses.replace(setting, rope="yarn")),
        (dataclasses.replace(benchmark, documents=benchmark.documents[:-1]), setting),
        (dataclasses.replace(benchmark, questions=QUESTIONS[:-1]), setting),
        (dataclasses.replace(benchmark, seed=1), setting),
        (benchmark, setting),
    ]
    ids = [qa.run_id(*other) for other in others]
    assert len(set(ids)) == len(ids)
    assert ids[-1] == qa.run_id(dataclasses.replace(benchmark), dataclasses.replace(setting))


@pytest.mark.parametrize(("options", "count"), [(5, 4), (5, 2), (2, 1), (8, 7)])
def test_orders_are_rotations_with_the_last_option_fixed(options, count):
    found = qa.orders(options, count, seed=0, number=3)
    assert found[0] == tuple(range(options))
    assert len(set(found)) == count
    assert all(sorted(order) == list(range(options)) and order[-1] == options - 1 for order in found)
    if count == options - 1:
        assert all(set(column) == set(range(options - 1)) for column in list(zip(*found))[:-1])


def test_likelihood_is_per_token():
    long, short = (np.array(BYTES.encode(text), np.int32) for text in ("aaaaaaaa\n", "b\n"))

    class Even:
        def logits(self, state, ids, rows=1):
            out = np.zeros((rows, BYTES.vocab_size))
            out[:, [BYTES.encode(c)[0] for c in "a\n"]] = 2.0
            out[:, BYTES.encode("b")[0]] = 1.0
            return out

    found = qa.score(Even(), None, np.array([7], np.int32), [long, short])
    norm = np.log(2 * np.exp(2) + np.exp(1) + BYTES.vocab_size - 3)
    np.testing.assert_allclose(found.values, [2 - norm, 1.5 - norm], rtol=1e-14)
    assert found.chosen == 0


def test_equal_scores_go_to_the_earlier_option():
    class Flat:
        def logits(self, state, ids, rows=1):
            return np.zeros((rows, 300))

    found = qa.score(Flat(), None, np.array([7]), [np.array([place]) for place in (9, 8, 7)])
    assert (found.chosen, found.probability) == (0, pytest.approx(1 / 3))
    with pytest.raises(ValueError, match="one begins with the other"):
        qa.score(Flat(), None, np.array([7]), [np.array([1]), np.array([1, 2])])


def test_the_summary_compares_with_the_floors(benchmark, tmp_path):
    asked = dataclasses.replace(benchmark, scorings=("letter",), shuffles=4)
    results, _ = run(asked, tmp_path / "a.csv", grid(base_seeds=[42, 43]))
    summary = qa_summary.summarise(results)
    runs = {(run["RIS_Mode"], run["base_seed"]): run for run in summary["runs"]}
    none, dense, ris = (runs[key] for key in (("none", 0), ("dense", 0), ("stochastic", 42)))
    assert (none["right"], dense["right"], ris["right"], ris["asked"]) == (0, 4, 4, 4)
    assert none["against_without_documents"] is none["against_dense"] is dense["against_dense"] is None
    # Four questions that only one of the two got right: p = 2 / 2⁴; three runs are tested against no documents.
    expected = {"this_only": 4, "floor_only": 0, "p": 0.125, "holm": 0.375}
    assert ris["against_without_documents"] == dense["against_without_documents"] == expected
    assert ris["against_dense"] == {"this_only": 0, "floor_only": 0, "p": 1.0, "holm": 1.0}
    assert ris["gap_recovery"] == 1.0 and dense["gap_recovery"] is None
    assert ris["wilson"] == list(stats.wilson(4, 4)) and ris["bootstrap"] == [1.0, 1.0]
    assert ris["within_limit"] == ris["evidence_visible"] == [4, 4] and ris["evidence_cut"] == [0, 0]
    assert ris["shuffles"] == {"accuracy": [1.0] * 4, "agreement": 1.0}
    assert summary["baselines"][0]["always"] == {letter: int(letter in "ABCD") for letter in "ABCDEFGH"}
    repeated = next(g for g in summary["geometries"] if g["RIS_Mode"] == "stochastic")
    assert (repeated["base_seeds"], repeated["accuracy"], repeated["deviation"]) == (2, 1.0, 0.0)
    json.dumps(summary, allow_nan=False)
    text = qa_summary.markdown(summary)
    assert "Always A: 1/4" in text and "0.125 (0.375), 4/0" in text and "Repeated with other samples" in text


def test_shuffling_finds_out_who_always_says_the_same(benchmark, tmp_path):
    asked = dataclasses.replace(benchmark, scorings=("letter",), shuffles=4)
    results, _ = run(asked, tmp_path / "a.csv", grid(), AlwaysB)
    (found, *_) = qa_summary.summarise(results)["runs"]
    assert found["shuffles"] == {"accuracy": [0.25] * 4, "agreement": 0.0}
    assert found["recall"] == {"A": (0, 1), "B": (1, 1), "C": (0, 1), "D": (0, 1)}


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        ResultFile(path)
    assert path.read_text() == "a,b\n1,2\n"


def test_rows_are_whole_or_refused(tmp_path):
    results = ResultFile(tmp_path / "new" / "a.csv")
    row = dict.fromkeys(COLUMNS, "x") | {"Question_ID": 1, "Shuffle": 0, "Model": 'a, "b"'}
    with pytest.raises(ValueError, match="Run_ID"):
        results.append({name: row[name] for name in row if name != "Run_ID"})
    with pytest.raises(ValueError, match="line break"):
        results.append(row | {"Model": "a\nb"})
    assert not results.path.exists()
    results.append(row)
    assert results.rows() == [{name: str(value) for name, value in row.items()}]
    assert ResultFile(results.path).keys() == {("x", Key(1, "x", 0))}


GOOD = {"id": 1, "question": "Which?", "options": ["one", "two", "not told"], "answer": "b"}


def test_questions_are_read_in_both_layouts(tmp_path):
    path = tmp_path / "q.json"
    other = GOOD | {"id": 2, "options": {"B": "two", "A": "one"}, "evidence": "is two", "position": 9}
    path.write_text(json.dumps([GOOD, other]))
    assert read_questions(path) == [
        Question(number=1, stem="Which?", options=("one", "two", "not told"), answer=1),
        Question(number=2, stem="Which?", options=("one", "two"), answer=1, evidence="is two", position=9),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not JSON"),
        ("{}", "no list of questions"),
        ("[]", "no list of questions"),
        (json.dumps([GOOD, GOOD]), "two questions of one id"),
        (json.dumps([{"id": 1}]), "lacks 'options'"),
        (json.dumps([GOOD | {"answer": "D"}]), "answer 3 is none of 3"),
        (json.dumps([GOOD | {"answer": "none"}]), "no letter"),
        (json.dumps([GOOD | {"options": ["one"]}]), "has 1 options"),
        (json.dumps([GOOD | {"question": " "}]), "blank stem"),
    ],
)
def test_bad_question_files_are_refused(tmp_path, content, message):
    path = tmp_path / "q.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_questions(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_questions(tmp_path / "missing.json")


def test_other_bad_input_is_refused(benchmark, tmp_path):
    with pytest.raises(ValueError, match="the window is 1024"):
        grid(windows=[1024])
    with pytest.raises(ValueError, match="go together"):
        qa.Setting(model="toy", rope="none", mode="none", window=4096)
    with pytest.raises(ValueError, match="density 2"):
        grid(densities=[2.0])
    with pytest.raises(ValueError, match="5 orders of 5"):
        qa.orders(5, 5, 0, 0)
    with pytest.raises(ValueError, match="scoring is 'vibes'"):
        qa.candidates(BYTES, "a:", ["x", "y"], "vibes")
    missing = dataclasses.replace(QUESTIONS[0], evidence="the moon is cheese")
    with pytest.raises(ValueError, match="question 1, 'the moon is cheese', is not in the documents"):
        run(dataclasses.replace(benchmark, questions=[missing]), tmp_path / "a.csv", grid())
    long = dataclasses.replace(QUESTIONS[0], stem="What colour is the sky? " * 50)
    with pytest.raises(ValueError, match="1024 are kept for it"):
        run(dataclasses.replace(benchmark, questions=[long]), tmp_path / "a.csv", grid())
