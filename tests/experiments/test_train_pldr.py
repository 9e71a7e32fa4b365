"""The real program in a process of its own: trains, is killed, goes on, refuses bad input."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.configs import pldr
from experiments.configs.overrides import parse_overrides
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.tokenizers import tokenizer_from_config
from plga_jax.train.checkpoint import load_model
from plga_jax.train.optim import OptimConfig
from plga_jax.train.records import Records

ROOT = pathlib.Path(__file__).parents[2]
SMALL = [
    *("num_layers=2", "num_heads=2", "head_width=4", "residual_units=1", "blocks_per_unit=1"),
    *("batch_size=4", "data.context=16", "data.sample=4", "data.prompt=4", "eval_batches=2"),
    *("save_every=3", "eval_every=12", "log_every=1", "warmup_steps=2", "steps=24"),
]


def start(workdir, corpus, *arguments, **options):
    flags = [f"--set={assignment}" for assignment in SMALL]
    command = [sys.executable, "-m", "experiments.train_pldr", f"--corpus={corpus}"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # Compiling is most of the time here.
    }
    return subprocess.Popen(
        [*command, f"--workdir={workdir}", *flags, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def losses(workdir):
    return {r["step"]: r["loss"] for r in Records(workdir / "metrics.jsonl") if "loss" in r}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("".join(f"Line {i} says that {i} times {i} is {i * i}.\n" for i in range(150)))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    """A finished run of 24 steps, and what it printed."""
    workdir = tmp_path_factory.mktemp("run") / "straight"
    return workdir, finish(start(workdir, corpus))


def test_a_run(trained):
    workdir, (code, out, err) = trained
    assert code == 0, err
    assert "done after step 24" in out and "val_loss" in out and str(workdir) in out
    assert sorted(losses(workdir)) == list(range(1, 25))
    records = list(Records(workdir / "metrics.jsonl"))
    assert [r["step"] for r in records if "val_loss" in r] == [0, 12, 24]
    (sample,) = Records(workdir / "samples.jsonl")
    assert sample["step"] == 24 and " → " in sample["text"]
    model, config = load_model(workdir)
    assert model.config.num_heads == 2 and config["optim"]["warmup_steps"] == 2
    assert tokenizer_from_config(config["tokenizer"]).vocab_size == model.config.vocab_size


def test_killed_and_started_again(trained, corpus):
    """SIGKILL after the first checkpoint, SIGTERM at once, then to the end: the same losses, bit for bit."""
    straight, _ = trained
    workdir, silent = straight.parent / "killed", "--set=sample_every=0"
    process = start(workdir, corpus, silent)
    saved = workdir / "checkpoints" / "3" / "checksums.json"
    while process.poll() is None and not saved.exists():
        time.sleep(0.001)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    process = start(workdir, corpus, silent)
    seen = ""
    while "going on from step" not in seen and (line := process.stdout.readline()):
        seen += line
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 0, err
    assert "stopped by SIGTERM" in out and "Traceback" not in err
    code, _, err = finish(start(workdir, corpus, silent, "--steps=24"))
    assert code == 0, err
    assert losses(workdir) == losses(straight)


def test_a_probed_run_stops_at_a_collapse_and_tells_when_symptoms_fell(trained, corpus):
    workdir = trained[0].parent / "probed"
    # Every m is below 2, and the fresh model's must be above 10 to count as uncollapsed: the run is collapsed at once,
    # but has not come from anywhere, so nothing is done about it.
    probed = ("--emergence", "--emergence_every=8", "--on_collapse=abort", "--set=sample_every=0")
    code, out, err = finish(start(workdir, corpus, *probed, "--collapsed_below=2"))
    assert code == 0, err
    assert "done after step 24" in out and "How the collapse came about" in out
    probes = [line for line in Records(workdir / "metrics.jsonl") if "phase" in line]
    assert [(line["step"], line["phase"]) for line in probes] == [(step, "collapsed") for step in (0, 8, 16, 24)]
    record = json.loads((workdir / "emergence.json").read_text())
    assert record["steps"] == [0, 8, 16, 24] and record["cost"]["probes"] == 4
    assert (workdir / "emergence.png").stat().st_size > 10_000
    assert losses(workdir) == losses(trained[0])  # probes change nothing
    code, _, err = finish(start(workdir, corpus, *probed, "--collapsed_below=1"))
    assert code == 2 and "monitor.collapsed_below was 2.0, is 1.0" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on_collapse=cut"], "--on_collapse=cut needs --emergence"),
        (["--config=huge"], "there is no run 'huge'; choose tiny, small, medium, 110m"),
        (["--corpus=/no/such/text"], "there is no file or folder /no/such/text"),
        (["--set=leraning_rate=1"], "the nearest are optim.learning_rate"),
        (["--set=learning_rate=3e-3"], "optim.learning_rate was 0.001, is 0.003"),
    ],
)
def test_bad_input_is_one_line(trained, corpus, arguments, message):
    workdir, _ = trained
    before = losses(workdir)
    code, _, err = finish(start(workdir, corpus, *arguments))
    errors = [line for line in err.splitlines() if "error:" in line]
    assert code == 2 and len(errors) == 1 and message in errors[0]
    assert err.splitlines()[-1] == errors[0] and "Traceback" not in err
    assert losses(workdir) == before


class TestPresets:
    def test_published_run(self):
        run = pldr.make_run("110m", vocab_size=32_000)
        assert (run.model.num_layers, run.model.num_heads, run.model.head_width) == (5, 14, 64)
        assert (run.optim.learning_rate, run.optim.warmup_steps) == (1e-3, 1000)
        assert run.optim.total_steps == run.train.steps == 250_000
        assert (run.train.batch_size, run.data.context) == (32, 1024)

    @pytest.mark.parametrize("name", pldr.NAMES)
    def test_what_follows_from_a_change_follows(self, name):
        run = pldr.make_run(name, ["head_width=32", "steps=40"], vocab_size=300)
        # tiny names its own width, that of the published gates; the others derive it from the head.
        assert run.model.metric_width == (170 if name == "tiny" else 32 * 8 // 3)
        assert run.model.hidden_width == run.model.num_heads * 32 * 8 // 3
        assert run.optim.total_steps == 40 and run.optim.warmup_steps == 20
        assert run.model.vocab_size == 300

    def test_rows_longer_than_the_model(self):
        with pytest.raises(ValueError, match=r"rows of 128 .* context of 64"):
            pldr.make_run("tiny", ["model.context=64"], vocab_size=262)


class TestOverrides:
    SECTIONS = {"model": PLDRConfig, "optim": OptimConfig}  # noqa: RUF012

    def read(self, *assignments):
        return parse_overrides(assignments, self.SECTIONS)

    def test_types(self):
        found = self.read(
            "remat=true", "hidden_width=none", "optim.b1=0.5", "attention=none", "clip_value=2", "init=hf"
        )
        assert found["model"] == {"remat": True, "hidden_width": None, "attention": None, "init": "hf"}
        assert found["optim"] == {"b1": 0.5, "clip_value": 2.0}
        assert json.dumps(found)

    @pytest.mark.parametrize(
        ("assignment", "message"),
        [
            ("num_layers", "write it as key=value"),
            ("num_layers=2.5", "'2.5' is not an integer"),
            ("remat=yes", "'yes' is not true or false"),
            ("init=xavier", "is not one of soc, kvg, hf"),
            ("num_layer=2", "the nearest are model.num_layers"),
            ("zzz=1", "the keys are model.vocab_size"),
        ],
    )
    def test_mistakes(self, assignment, message):
        with pytest.raises(ValueError, match=message):
            self.read(assignment)

    def test_ambiguous(self):
        with pytest.raises(ValueError, match=r"could be a\.b1 or b\.b1"):
            parse_overrides(["b1=0.5"], {"a": OptimConfig, "b": OptimConfig})
