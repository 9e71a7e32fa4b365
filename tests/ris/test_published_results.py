"""Reading and grouping the released results: on made-up files always, on the released ones where they are."""

import datetime
import pathlib

import pytest

from ris_jax import published_results as published
from ris_jax import published_tables as tables

RELEASED = pathlib.Path(__file__).parents[3] / "shared" / "data" / "ris_results"
OLD_ORDER = [*(name for name in published.COLUMNS if name != "RIS_Mode"), "RIS_Mode"]
START = datetime.datetime(2026, 5, 1)


def row(question=1, *, at=0, given="B", wanted="B", window=64, density=0.01, seeds=10, mode="stochastic", **other):
    values = {
        "Timestamp": str(START + datetime.timedelta(seconds=at)),
        "Model": "qwen2",
        "RoPE_Type": "linear",
        "RIS_Mode": mode,
        "Window": window,
        "Density": density,
        "Seeds": seeds,
        "Question_ID": question,
        "Expected": wanted,
        "Predicted": given,
        "Correct": int(given == wanted),
        "Prob_Winner": 0.5,
        "Pos_Limit_Met": True,
    }
    return values | other


def write(path, rows, columns=published.COLUMNS):
    lines = [",".join(columns), *(",".join(str(r[name]) for name in columns) for r in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("columns", [published.COLUMNS, OLD_ORDER])
def test_a_row_reads_the_same_in_either_column_order(tmp_path, columns):
    path = write(tmp_path / "a.csv", [row(3, at=7, given="C", density=0.05, Prob_Winner=0.25)], columns)
    (answer,) = published.read_answers(path)
    assert answer == published.Answer(
        time=START + datetime.timedelta(seconds=7),
        model="qwen2",
        rope="linear",
        mode="stochastic",
        window=64,
        density=0.05,
        seeds=10,
        question=3,
        expected="B",
        predicted="C",
        correct=False,
        probability=0.25,
        within_limit=True,
    )


def test_blank_modes_belong_to_the_configuration(tmp_path):
    rows = [row(2, mode="", given="A"), row(1), row(1, seeds=20), row(3, mode="")]
    groups = published.group(published.read_answers(write(tmp_path / "a.csv", rows)))
    assert [config.seeds for config in groups] == [10, 20]
    found = next(iter(groups.values()))
    assert (found.right, found.asked, found.given) == (2, 3, ["B", "A", "B"])


def test_the_clique_is_added_to_the_label(tmp_path):
    rows = [row(density=0.0), row(density=0.01), row(density=0.04)]
    groups = published.group(published.read_answers(write(tmp_path / "a.csv", rows)), clique=published.CLIQUE)
    assert [config.density for config in groups] == [0.01, 0.02, 0.05]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Correct": 1}, "line 2.*'A' is counted as 1"),
        ({"Correct": 2}, "line 2"),
        ({"Window": "wide"}, "line 2.*wide"),
        ({"Pos_Limit_Met": ""}, "line 2"),
        ({"Timestamp": "yesterday"}, "line 2.*yesterday"),
    ],
)
def test_damaged_rows_are_named(tmp_path, change, message):
    path = write(tmp_path / "a.csv", [row(given="A") | change])
    with pytest.raises(ValueError, match=message):
        published.read_answers(path)


def test_files_that_are_no_results_are_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        published.load(tmp_path)
    with pytest.raises(ValueError, match=r"lacks the columns.*RIS_Mode"):
        published.read_answers(write(tmp_path / "a.csv", [row()], OLD_ORDER[:-1]))
    with pytest.raises(ValueError, match="two answers to one question"):
        published.group(published.read_answers(write(tmp_path / "b.csv", [row(at=1), row(at=2)])))


def test_setup_times_are_gaps_between_whole_runs_of_one_window(tmp_path):
    rows = [
        *(row(q, at=q, seeds=1) for q in (1, 2)),
        *(row(q, at=100 + q, seeds=2) for q in (1, 2)),
        *(row(q, at=300 + q, seeds=3, window=128) for q in (1, 2)),
        *(row(q, at=700 + q, seeds=4, window=128) for q in (1, 2)),
        # A run with another one in the middle, and the one after it, tell no time.
        row(1, at=901, seeds=5, window=128),
        row(1, at=950, seeds=6, window=128),
        row(2, at=999, seeds=5, window=128),
    ]
    times = published.setup_times(published.read_answers(write(tmp_path / "a.csv", rows)), "qwen2", "linear")
    assert [(time.config.seeds, time.seconds) for time in times] == [(2, 99), (4, 399)]


def test_settings_that_change_nothing_are_found_out(tmp_path):
    rows = [row(q, seeds=s, Prob_Winner=0.5 + 0.001 * s * (q == 2)) for q in (1, 2) for s in (1, 2)]
    groups = published.group(published.read_answers(write(tmp_path / "a.csv", rows)))
    assert published.untouched_by_settings(groups, lambda a: (a.predicted, a.probability)) == (1, 2)
    assert published.untouched_by_settings(groups, lambda a: a.predicted) == (2, 2)


def test_only_answers_to_the_same_questions_are_paired(tmp_path):
    rows = [row(1), row(2, given="A"), row(1, seeds=2), row(2, seeds=2), row(1, seeds=3)]
    first, second, third = published.group(published.read_answers(write(tmp_path / "a.csv", rows))).values()
    # Sorted by seeds: 2, 3, 10.
    test = published.against(third, first)
    assert (test.first_only, test.second_only, test.p) == (0, 1, 1.0)
    with pytest.raises(ValueError, match="same questions"):
        published.against(first, second)


def test_the_best_are_those_with_the_largest_share(tmp_path):
    rows = [row(1), *(row(q, seeds=2, given="AB"[q % 2]) for q in (1, 2, 3, 4)), row(1, seeds=3)]
    groups = published.group(published.read_answers(write(tmp_path / "a.csv", rows)))
    assert [found.config.seeds for found in tables.best(groups)] == [3, 10]


@pytest.mark.parametrize(
    ("kind", "density", "seeds", "percent"),
    [
        # Measured shares of causal pairs at 64k, window 1024 and 256 anchors; counted to about 0.1 points.
        ("stochastic", 0.01, 1, 4.8),
        ("stochastic", 0.01, 10, 13.0),
        ("stochastic", 0.02, 40, 56.8),
        ("stochastic", 0.05, 70, 97.1),
        ("sub-percent", 0.001, 100, 13.1),
        ("sub-percent", 0.003, 200, 47.4),
        ("structural", 0.01, 50, 41.8),
        ("structural", 0.01, 100, 64.8),
    ],
)
def test_shares_of_pairs_are_those_counted(kind, density, seeds, percent):
    config = published.Config("qwen2", "yarn", 65536, density, seeds)
    assert 100 * tables.share(config, kind) == pytest.approx(percent, abs=0.1)


@pytest.fixture(scope="module")
def released():
    if not RELEASED.is_dir():
        pytest.skip("the released results are not here")
    return published.load(RELEASED)


def counts(text):
    return [int(number) for number in text.split()]


def test_released_files_have_no_gaps(released):
    assert len(released.answers) == 7472
    assert sum(g.asked for g in released.structural.values()) == 2112
    assert sum(g.asked for g in released.sub_percent.values()) == 2304
    control = [*released.control_stochastic.values(), *released.control_structural.values(), released.control_floor]
    assert sum(g.asked for g in control) == 2144
    assert {g.asked for g in control} == {32}
    sizes = {(config.window, found.asked) for config, found in released.main.items()}
    assert sizes == {(0, 64), (4096, 4), (8192, 8), (16384, 16), (32768, 32), (65536, 64)}


def test_floors_and_peaks(released):
    found = {name: (row["right"], row["asked"]) for name, row in tables.headline(released).items()}
    assert found == {
        "64k without documents": (33, 64),
        "32k without documents": (19, 32),
        "32k dense (stated, no rows)": (23, 32),
        "32k stochastic, best": (24, 32),
        "32k structural, best": (23, 32),
        "64k stochastic, best": (40, 64),
        "64k structural, best": (42, 64),
    }


GRID_32K = {
    ("stochastic", "0.01"): "19 20 20 20 20 22 23 24 24 23 23",
    ("stochastic", "0.02"): "18 21 21 22 23 23 22 23 22 22 22",
    ("stochastic", "0.05"): "18 23 22 21 22 22 22 23 23 23 23",
    ("structural", "0.01"): "18 21 21 22 22 22 21 21 20 21 22",
    ("structural", "0.02"): "17 22 22 22 22 22 21 20 22 22 22",
    ("structural", "0.05"): "20 23 22 22 21 23 23 23 23 23 23",
}
RECOVERY = {
    ("stochastic", "0.01"): "0 25 25 25 25 75 100 125 125 100 100",
    ("structural", "0.02"): "-50 75 75 75 75 75 50 25 75 75 75",
    ("structural", "0.05"): "25 100 75 75 50 100 100 100 100 100 100",
}


def test_grid_at_the_native_length(released):
    found = tables.grid_32k(released)
    for (name, density), row in GRID_32K.items():
        assert list(found[name]["right"][density].values()) == counts(row)
    for (name, density), row in RECOVERY.items():
        assert [100 * share for share in found[name]["recovery"][density].values()] == counts(row)


GRIDS_64K = {
    ("stochastic linear", "0.01"): "10 21 22 24 28 29 31 31 30 31 32",
    ("stochastic linear", "0.02"): "13 21 25 29 31 35 37 36 36 38 36",
    ("stochastic linear", "0.05"): "15 28 33 35 38 38 38 38",
    ("stochastic yarn", "0.01"): "22 28 32 35 37 37 36 35 35 36 34",
    ("stochastic yarn", "0.02"): "24 31 33 36 39 37 37 37 37 37 39",
    ("stochastic yarn", "0.05"): "29 35 36 39 40 40 40 39 39 38 38",
    ("structural yarn", "0.01"): "27 31 34 34 33 40 39 39 39 40 42",
    ("structural yarn", "0.02"): "28 36 37 33 35 40 38 37 37 37 38",
    ("structural yarn", "0.05"): "25 33 33 36 37 37 36 37 39 38 38",
}
SUB_PERCENT = """
29 29 33 33  31 33 35 34  31 34 38 38  34 35 38 37  36 37 38 38  35 37 37 36  35 36 37 39  39 40 37 38  35 34 36 37
"""


def test_grids_at_64k(released):
    found = tables.all_tables(released)
    for (name, density), row in GRIDS_64K.items():
        cells = found["grid_64k"][name][density]
        assert [int(seeds) for seeds in cells] == [1, *range(10, 101, 10)][: len(cells)]
        assert list(cells.values()) == counts(row)
    assert list(found["sub_percent"]) == [f"0.00{i}" for i in range(1, 10)]
    assert all(list(row) == ["50", "100", "150", "200"] for row in found["sub_percent"].values())
    assert [right for row in found["sub_percent"].values() for right in row.values()] == counts(SUB_PERCENT)


def test_windows_within_the_native_length(released):
    found = tables.native_windows(released)
    scores = {window: (row["best"], row["asked"], row["worst"], row["configurations"]) for window, row in found.items()}
    assert scores == {
        "4096": (2, 4, 2, 30),
        "8192": (5, 8, 4, 30),
        "16384": (10, 16, 7, 30),
        "32768": (21, 32, 15, 30),
    }
    assert found["32768"]["best_at"] == ["0.02 × 40"]


def test_table_1(released):
    found = tables.table_1(released)
    peaks = {
        density: [(row[key]["right"], row[key]["seeds"]) for key in ("linear_upto_50_seeds", "linear", "yarn")]
        for density, row in found.items()
    }
    assert peaks == {
        "0.01": [(29, [50]), (32, [100]), (37, [40, 50])],
        "0.02": [(35, [50]), (38, [90]), (39, [40, 100])],
        "0.05": [(38, [40, 50]), (38, [40, 50, 60, 70]), (40, [40, 50, 60])],
    }
    differences = {density: list(row["yarn_minus_linear"].values()) for density, row in found.items()}
    assert differences == {
        "0.01": [12, 7, 10, 11, 9, 8, 5, 4, 5, 5, 2],
        "0.02": [11, 10, 8, 7, 8, 2, 0, 1, 1, -1, 3],
        "0.05": [14, 7, 3, 4, 2, 2, 2, 1],
    }
    assert [round(row["p"]["1"], 3) for row in found.values()] == [0.002, 0.007, 0.001]
    assert found["0.02"]["p"]["90"] == found["0.05"]["p"]["70"] == 1.0


def test_table_2(released):
    found = {
        (name, density): [round(row[key], 3) for key in ("mean", "median", "peak")]
        for name, rows in tables.table_2(released).items()
        for density, row in rows.items()
    }
    assert found == {
        ("stochastic", "0.01"): [52.131, 54.688, 57.812],
        ("stochastic", "0.02"): [54.972, 57.812, 60.938],
        ("stochastic", "0.05"): [58.665, 60.938, 62.5],
        ("structural", "0.01"): [56.534, 60.938, 65.625],
        ("structural", "0.02"): [56.25, 57.812, 62.5],
        ("structural", "0.05"): [55.256, 57.812, 60.938],
    }


def test_table_3(released):
    found = tables.table_3(released)
    kept = found.pop("kept_at_half_a_percent")
    assert [round(100 * share, 1) for share in kept.values()] == [90.5, 55.6]
    assert [row["best"] for row in found.values()] == [33, 35, 38, 38, 38, 37, 39, 40, 37, 42]
    means = [48.44, 51.95, 55.08, 56.25, 58.20, 56.64, 57.42, 60.16, 55.47, 64.06]
    assert [round(row["mean"], 2) for row in found.values()] == means
    assert [row["clique"] for row in found.values()] == [66, 131, 197, 262, 328, 393, 459, 524, 590, 655]
    assert (found["0.007"]["gain_150_to_200"], found["0.009"]["gain_150_to_200"]) == (2, 1)


def test_table_5(released):
    found = {name: {c: r["right"] for c, r in rows.items()} for name, rows in tables.table_5(released).items()}
    assert found == {
        "stochastic": {
            "0.01 × 10": 20,
            "0.01 × 50": 22,
            "0.01 × 70": 24,
            "0.01 × 80": 24,
            "0.05 × 1": 18,
            "0.05 × 10": 23,
        },
        "structural": {"0.01 × 10": 21, "0.01 × 40": 22, "0.02 × 10": 22, "0.02 × 40": 22, "0.05 × 10": 23},
    }


def test_paired_tests(released):
    found = tables.mcnemar(released)["tests"]
    seen = {
        name: {(*row["right"], *row["discordant"], round(row["p"], 6)) for row in rows} for name, rows in found.items()
    }
    assert seen == {
        "32k stochastic, best, against no documents": {(24, 19, 8, 3, 0.226562)},
        "64k structural, best, against no documents": {(42, 33, 15, 6, 0.078354)},
        "64k stochastic, best, against no documents": {(40, 33, 14, 7, 0.189247)},
        "64k structural against stochastic, best": {(42, 40, 4, 2, 0.6875)},
    }
    assert [row["configurations"][0] for row in found["64k stochastic, best, against no documents"]] == [
        "0.05 × 40",
        "0.05 × 50",
        "0.05 × 60",
    ]


def test_no_gain_is_significant_and_harm_is(released):
    found = tables.against_the_floor(released)
    assert not any(row["significant_gain"] for row in found.values())
    assert {name: (row["configurations"], row["significant_harm"]) for name, row in found.items()} == {
        "32k stochastic": (33, 0),
        "32k structural": (33, 0),
        "64k stochastic linear": (30, 6),
        "64k stochastic yarn": (33, 2),
        "64k structural yarn": (33, 0),
        "64k structural yarn, sub-percent": (36, 0),
    }
    assert found["64k stochastic linear"]["below_the_floor"] == 18
    corrected = {name: round(row["bonferroni"], 3) for name, row in found.items()}
    assert corrected["64k structural yarn"] == corrected["32k stochastic"] == corrected["32k structural"] == 1
    assert corrected["64k stochastic yarn"] == 0.244


def test_the_key_favours_one_letter(released):
    found = tables.answer_key(released)
    assert found["64k"] == {"A": 14, "B": 38, "C": 11, "D": 1, "E": 0}
    assert found["32k"] == {"A": 6, "B": 6, "C": 6, "D": 7, "E": 7}
    assert (found["majority_letter"], found["majority_right"]) == ("B", 38)
    assert (found["configurations"], found["above_majority"], found["equal_to_majority"]) == (96, 16, 11)
    test = found["best_structural_against_majority"]
    assert (*test["right"], *test["discordant"], round(test["p"], 2)) == (42, 38, 17, 13, 0.58)
    assert sum(right for right, _ in found["recall_of_best_structural"].values()) == 42


def test_the_grid_is_one_experiment(released):
    assert round(tables.agreement(released)["agreement"], 3) == 0.845


def test_losing_the_rows_without_a_mode_gives_the_figure_of_the_paper(released):
    found = tables.blank_modes(released)
    lost = {w: [(row[key]["right"], row[key]["asked"]) for key in row] for w, row in found.items()}
    assert lost == {"8192": [(5, 8), (4, 8)], "16384": [(10, 16), (5, 8)], "65536": [(38, 64), (17, 32)]}


def test_no_setting_touched_tinyllama(released):
    found = tables.tinyllama(released)
    assert found["best"] == {"4096": [2, 4], "8192": [1, 8], "16384": [1, 16], "32768": [6, 32]}
    assert list(found["configurations"].values()) == [30, 30, 30, 21]
    assert found["identical_in_every_configuration"] == found["window_question_pairs"] == 60
    qwen = published.untouched_by_settings(released.grid("yarn"), lambda a: (a.predicted, a.probability))
    assert qwen[0] < qwen[1] == 64


def test_coverage_formula():
    found = tables.coverage()
    formula = [round(100 * row["formula"], 2) for row in found.values()]
    assert formula == [9.56, 50.52, 63.40, 40.13, 87.15, 97.24]
    assert [round(100 * row["as_drawn"], 1) for row in found.values()] == [9.5, 50.3, 63.2, 39.3, 86.5, 97.0]


def test_time_before_the_first_answer(released):
    found = tables.setup(released)
    assert list(found["median_s"].values()) == [60, 144, 279, 770, 2394]
    assert list(found["runs"].values()) == [29, 29, 29, 14, 29]
    assert [round(value, 1) for value in found["exponents"].values()] == [1.3, 1.0, 1.5, 1.6]
    assert max(found["largest_deviation"]["4096"], found["largest_deviation"]["8192"]) < 0.034
    seconds = {
        cell: (row["seconds"], round(100 * row["share"]))
        for cell, row in found["64k"].items()
        if cell in ("0.01 × 10", "0.01 × 100", "0.05 × 1", "0.05 × 40", "0.05 × 70")
    }
    assert seconds == {
        "0.01 × 10": (2211, 13),
        "0.01 × 100": (2398, 65),
        "0.05 × 1": (2223, 9),
        "0.05 × 40": (2524, 87),
        "0.05 × 70": (3371, 97),
    }


def test_right_answers_follow_the_share_of_pairs(released):
    found = tables.share_of_pairs(released)
    assert found["configurations"] == 102
    assert [round(value, 2) for value in found["spearman"].values()] == [0.72, 0.85, 0.53, 0.73]
    bins = [
        tuple(row[name] if row[name] is None else round(row[name], 1) for name in list(row)[2:])
        for row in found["bins"]
    ]
    assert bins == [
        (23.0, 27.5, None),
        (28.5, 28.0, 29.7),
        (32.7, 34.7, 33.8),
        (35.5, 35.8, 36.1),
        (36.2, 37.0, 37.7),
        (36.0, 38.6, 36.5),
        (38.2, 37.0, 37.5),
        (39.0, 37.5, None),
    ]
