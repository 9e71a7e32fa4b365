"""Conversations as a user has them: real processes, driven through their pipes."""

import json
import signal
import threading

import pytest

from plga_jax.interop.pretrained import load_any
from plga_jax.ops.sampling import SamplingConfig
from ris_jax.probe import ProbeGeometry
from ris_jax.recall import TEXT, recall_heads
from ris_jax.session import Session
from ris_jax.session_config import AnswerConfig, SessionConfig
from tests.experiments.ris_model import start, write_model

SCRIPT = ["Who?", "", "/undo", "/undo", "Who?", "And Bert?", "/history", "/save {folder}/talk.txt", "/dance"]
SCRIPT += ["x" * 3000, "/reset", "Who?", "/save /dev/full/a", "exit", "never read"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("ris")
    write_model(root / "model")
    (root / "a.txt").write_text("Anna keeps bees. Bert has a boat.\n")
    return root


def begin(folder, *arguments):
    common = [f"--model={folder / 'model'}", "--context", str(folder / "a.txt"), "--greedy", "--nostore"]
    return start("ris_chat", *common, "--buffer=512", *arguments)


@pytest.fixture(scope="module")
def talked(folder):
    process = begin(folder, "--max_new_tokens=6", f"--log={folder / 'log.json'}")
    out, err = process.communicate("\n".join(SCRIPT).format(folder=folder) + "\n", timeout=180)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def answers(folder):
    """Of a session in this process: to "Who?", and to "And Bert?" after it."""
    model, tokenizer = load_any(folder / "model")
    recall = recall_heads(model, tokenizer.encode(TEXT))
    geometry = lambda n: ProbeGeometry(length=n, recall=recall)  # noqa: E731
    session = Session(model, tokenizer, SessionConfig(geometry=geometry, max_new_tokens=6, question_room=512))
    session.open([folder / "a.txt"])
    greedy = AnswerConfig(sampling=SamplingConfig(greedy=True, repetition_penalty=1.1))
    return ["".join(session.chat(question, greedy)) for question in ("Who?", "And Bert?")]


def test_a_conversation(talked, answers, folder):
    code, out, err = talked
    assert code == 0, err
    first, second = answers
    assert out.splitlines() == [first, first, second, first]
    told = err.splitlines()
    assert "forgotten: Who?" in told and "there is nothing to undo" in told and "the conversation is forgotten" in told
    assert "/dance is no command" in told and sum(line.startswith("error: The question has") for line in told) == 1
    history = f"> Who?\n\n{first}\n\n> And Bert?\n\n{second}"
    assert history in err and (folder / "talk.txt").read_text() == history + "\n"
    assert "error: not saved" in err


def test_the_log(talked, folder):
    assert talked[0] == 0
    log = json.loads((folder / "log.json").read_text())
    assert [turn["question"] for turn in log["turns"]] == ["Who?", "Who?", "And Bert?", "Who?"]
    assert [turn["fresh"] for turn in log["turns"]] == [True, True, False, True]


def test_ctrl_c_forgets_the_question_that_is_being_answered(folder, answers):
    process = begin(folder, "--max_new_tokens=1000")
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        process.stdin.write("Who?\n")
        process.stdin.flush()
        assert process.stdout.read(3) == answers[0][:3]
        process.send_signal(signal.SIGINT)
        while "this question is forgotten" not in (line := process.stderr.readline()):
            assert line, "the conversation ended"
        out, err = process.communicate("/history\n/undo\n", timeout=60)
    finally:
        watchdog.cancel()
        process.kill()
    assert process.returncode == 0 and "\n" not in out
    assert err.splitlines()[-2:] == ["nothing has been said", "there is nothing to undo"]
