"""The main command as a user runs it: real processes, started together because each imports JAX."""

import json

import pytest

from plga_jax.interop.pretrained import load_any
from plga_jax.ops.sampling import SamplingConfig
from ris_jax.probe import ProbeGeometry
from ris_jax.recall import TEXT, recall_heads
from ris_jax.session import Session
from ris_jax.session_config import AnswerConfig, SessionConfig
from tests.experiments.ris_model import start, write_model

COMMON = ["--model={model}", "--greedy", "--max_new_tokens=6", "--chunk=512"]
DOCUMENTS = ["--context", "{folder}/a.txt", "{folder}/b.txt"]
ONE = ["--prompt=Who?", *DOCUMENTS]
BAD = {
    "no question": (DOCUMENTS, "there is no question"),
    "missing file": (["--prompt=Who?", "--context={folder}/absent.txt"], "absent.txt"),
    "long question": (["--prompt=" + "x" * 700, "--window=1024", *DOCUMENTS], "1024 tokens has no room for documents"),
    "unknown architecture": ([*ONE, "--model={folder}/other"], "mamba"),
    "density": ([*ONE, "--density=1.5"], "density = 1.5 must be within 0 … 1"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("ris")
    write_model(root / "model")
    (root / "a.txt").write_text("Anna keeps bees. " * 20)
    (root / "b.txt").write_text("Bert has a boat.\n")
    (root / "other").mkdir()
    (root / "other" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    return root


@pytest.fixture(scope="module")
def ran(folder):
    """Name of a case -> exit code, stdout, stderr."""
    places = {"model": str(folder / "model"), "folder": str(folder)}

    def begin(arguments):
        return start("ris_ask", *(argument.format(**places) for argument in (*COMMON, *arguments)))

    kept = ["--store_folder={folder}/kept", "--log={folder}/log.json", "--out={folder}/out.txt"]
    cases = {
        "two": ["--prompt=Who?", "--prompt=And Bert?", *DOCUMENTS, *kept],
        "window": [
            *("--prompt=-", "--context={folder}/a.txt,{folder}/b.txt", "--geometry=window", "--local=64"),
            *("--anchors=16", "--store_folder=/dev/full/prefill"),
        ],
    } | {name: [*arguments, "--nostore"] for name, (arguments, _) in BAD.items()}
    found = {}

    def finish(name, process):
        out, err = process.communicate("Who?\n" if name == "window" else None, timeout=180)
        found[name] = process.returncode, out, err

    for batch in (cases, {"again": [*ONE, *kept[:1]], "stored": ["--stored", *kept[:1]]}):
        for name, process in {name: begin(arguments) for name, arguments in batch.items()}.items():
            finish(name, process)
    return found


def test_two_questions_about_two_files(ran, folder):
    code, out, err = ran["two"]
    assert code == 0, err
    model, tokenizer = load_any(folder / "model")
    recall = recall_heads(model, tokenizer.encode(TEXT))
    geometry = lambda window: ProbeGeometry(length=window, recall=recall)  # noqa: E731
    session = Session(model, tokenizer, SessionConfig(geometry=geometry, max_new_tokens=6, chunk=512))
    session.open([folder / "a.txt", folder / "b.txt"])
    greedy = AnswerConfig(sampling=SamplingConfig(greedy=True, repetition_penalty=1.1))
    answers = ["".join(session.ask(question, greedy)) for question in ("Who?", "And Bert?")]
    assert out == "".join(answer + "\n" for answer in answers) and answers[0] != answers[1]
    assert (folder / "out.txt").read_text() == "\n\n".join(answers) + "\n"
    assert "a.txt: " in err and "of the causal pairs" in err and "memory: " in err
    assert err.index("FLOPs") < err.index("computed in") < err.index("answer: 6 tokens, length")


def test_the_log_tells_everything(ran, folder):
    assert ran["two"][0] == 0
    log = json.loads((folder / "log.json").read_text())
    assert [turn["question"] for turn in log["turns"]] == ["Who?", "And Bert?"]
    assert log["geometry"]["kind"] == "probe" and len(log["geometry_sha256"]) == 64
    assert 0 < log["real_density"] <= 1 and log["peak_rss_mb"] > 50 and log["seconds"] > 0
    assert log["reading"]["source"] == "computed" and log["turns"][0]["config"]["seed"] == 0
    assert log["model"]["num_layers"] == 2 and "jax" in log["environment"]


def test_the_second_run_starts_from_the_store(ran):
    code, out, err = ran["again"]
    assert code == 0 and " store in " in err
    assert out == ran["two"][1].splitlines()[0] + "\n"
    code, out, _ = ran["stored"]
    assert code == 0 and len(out.splitlines()) == 4 and "probe" in out


def test_standard_input_and_a_store_that_cannot_be_written(ran):
    code, out, err = ran["window"]
    assert code == 0, err
    assert len(out) > 1 and "geometry window, local 64, anchors 16" in err
    assert "note: What was read cannot be kept in /dev/full/prefill" in err


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(ran, case):
    code, out, err = ran[case]
    assert code == 2 and out == ""
    assert err.splitlines()[-1].startswith("error: ") and "Traceback" not in err
    assert BAD[case][1] in err.splitlines()[-1]
