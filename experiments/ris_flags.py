"""What `ris_ask` and `ris_chat` share: flags, and the session they describe."""

import contextlib
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

import jax
from absl import flags

from experiments.benchmarks.harness import machine, peak_rss_mb
from plga_jax.audit.report import write_json
from plga_jax.interop.fetch import cache_folder
from plga_jax.interop.pretrained import load_any
from plga_jax.ops.sampling import SamplingConfig
from ris_jax.block_shared import BlockSharedGeometry
from ris_jax.geometry import Geometry, PublishedGeometry
from ris_jax.patterns import DenseGeometry, WindowGeometry
from ris_jax.probe import ProbeGeometry
from ris_jax.prompts import SYSTEM
from ris_jax.recall import TEXT, recall_heads
from ris_jax.session import Session
from ris_jax.session_config import ROPES, AnswerConfig, SessionConfig
from ris_jax.store import PrefillStore

GEOMETRIES = ("probe", "dense", "window", "stochastic", "structural", "block_shared")

_CONTEXT = flags.DEFINE_multi_string(
    "context", [], "Text files, or folders of them: --context a b, --context a,b, or repeated."
)
_MODEL = flags.DEFINE_string("model", None, ".gguf file or Hugging Face folder; default: SmolLM2-135M-Instruct.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "auto"], "Of matrix products.")
_KV_DTYPE = flags.DEFINE_enum("kv_dtype", None, ["float32", "bfloat16"], "Of keys and values; default: as --dtype.")
_WINDOW = flags.DEFINE_integer("window", None, "Tokens of documents, questions and answers; default: what they need.")
_ROPE = flags.DEFINE_enum("rope", "yarn", ROPES, "How positions are stretched beyond the model's own context.")
_CHUNK = flags.DEFINE_integer("chunk", 1024, "Tokens read at once.")
_SYSTEM = flags.DEFINE_string("system", SYSTEM, "The rules that the model is given.")
_GEOMETRY = flags.DEFINE_enum("geometry", "probe", GEOMETRIES, "Which earlier tokens a token attends to.")
_DENSITY = flags.DEFINE_float(
    "density", None, "stochastic, structural: nominal, of one seed. probe, block_shared: real share of causal pairs."
)
_SEEDS = flags.DEFINE_integer("seeds", None, "stochastic, structural: redundant samplings.")
_LOCAL = flags.DEFINE_integer("local", None, "Nearest keys that every token sees.")
_ANCHORS = flags.DEFINE_integer("anchors", None, "Keys at the start that every token sees.")
_REFRESH = flags.DEFINE_string(
    "refresh",
    None,
    "When an answer chooses its far keys: frozen (once), own (each token), or every so many tokens; default: as the "
    "geometry does.",
)
_NEW = flags.DEFINE_integer("max_new_tokens", 512, "The most tokens of an answer.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.2, "Logits are divided by it.")
_TOP_K = flags.DEFINE_integer("top_k", 50, "How many of the likeliest tokens remain; 0: all.")
_TOP_P = flags.DEFINE_float("top_p", 0.9, "Probability mass that remains, (0, 1].")
_PENALTY = flags.DEFINE_float("repetition_penalty", 1.1, "Above 1: tokens seen before lose.")
_SCOPE = flags.DEFINE_enum("penalty_scope", "turn", ["turn", "everything"], "Where they may have been seen.")
_GREEDY = flags.DEFINE_bool("greedy", False, "Take the likeliest token each time.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")
_STOP = flags.DEFINE_multi_string("stop", [], "An answer ends before this text; may be repeated.")
_TOPIC = flags.DEFINE_float("topic", None, "End answers that correlate less with their beginning; -0.1 is usual.")
_STORE = flags.DEFINE_bool("store", True, "Keep what was read, and read it from there the next time.")
_STORE_FOLDER = flags.DEFINE_string("store_folder", None, "Where; default: a folder beside the models.")
_PRUNE = flags.DEFINE_float("prune", 20.0, "Gigabytes to keep there; what was not used for longest goes.")
_LOG = flags.DEFINE_string("log", None, "JSON file for everything that the answers depend on, and the answers.")


def open_session(questions: Sequence[str] = (), *, question_room: int = 512) -> Session:
    """The session that the flags describe, with its documents opened and its plan printed.

    Args:
        questions: that will be asked.
        question_room: tokens kept free for a question or a conversation.

    Returns:
        The session; nothing has been read.

    Raises:
        ValueError: flags that make no sense, or files that cannot be read.
    """
    paths, config = _paths(), _session_config(question_room)
    answer_config()
    if _STORE.value:
        # Compiling the program of one token takes longer than many an answer.
        jax.config.update("jax_compilation_cache_dir", str(store().folder / "programs"))
    dtype = _DTYPE.value
    if dtype == "auto":
        dtype = "bfloat16" if machine()["instructions"][1:] else "float32"
    model, tokenizer = load_any(_MODEL.value, compute_dtype=dtype)
    if _GEOMETRY.value == "probe":
        recall = recall_heads(model, tokenizer.encode(TEXT))
        config = dataclasses.replace(config, geometry=functools.partial(_geometry, recall=recall))
    session = Session(
        model,
        tokenizer,
        config,
        name=_MODEL.value or "SmolLM2-135M-Instruct",
        store=store() if _STORE.value else None,
        notify=lambda text: say(f"note: {text}"),
        progress=sys.stderr.isatty(),
    )
    say(session.open(paths, questions).text())
    return session


def answer_config() -> AnswerConfig:
    """How the flags say that answers are drawn."""
    sampling = SamplingConfig(
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        repetition_penalty=_PENALTY.value,
        greedy=_GREEDY.value,
    )
    return AnswerConfig(
        sampling=sampling,
        seed=_SEED.value,
        penalty_scope=_SCOPE.value,
        stop_strings=tuple(_STOP.value),
        topic_threshold=_TOPIC.value,
    )


def store() -> PrefillStore:
    """The store that the flags name."""
    return PrefillStore(_STORE_FOLDER.value or cache_folder() / "prefill")


def read(session: Session) -> None:
    """Reads the documents, says how, and prunes the store."""
    reading = session.read()
    rate = f", {reading.num_tokens / reading.seconds:.0f} tokens/s" if reading.source == "computed" else ""
    share = "" if reading.real_share is None else f"; {reading.real_share:.1%} of the causal pairs were read"
    say(f"documents: {reading.num_tokens} tokens, {reading.source} in {reading.seconds:.1f} s{rate}{share}")
    if session.store is not None:
        session.store.prune(max_bytes=int(_PRUNE.value * 1e9))


@contextlib.contextmanager
def logged(session: Session) -> Iterator[None]:
    """Writes the log, if one is wanted, at the end, whatever the end is."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        write_log(session, time.perf_counter() - begun)


def write_log(session: Session, seconds: float) -> None:
    """Writes the log, if one is wanted: the session's manifest, its time, and the most memory that it took."""
    if _LOG.value:
        path = pathlib.Path(_LOG.value)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, session.manifest() | {"seconds": seconds, "peak_rss_mb": peak_rss_mb()})


def say(text: str) -> None:
    """Tells the user something that is no part of an answer."""
    print(text, file=sys.stderr, flush=True)


def _paths() -> list[str]:
    paths = []
    for value in _CONTEXT.value:
        # A file may have a comma in its name.
        paths += [value] if pathlib.Path(value).exists() else value.split(",")
    if not all(paths) or not paths:
        raise ValueError("give --context: text files, or folders of them")
    for path in paths:
        if not pathlib.Path(path).exists():
            raise ValueError(f"--context names {path}, which is no file or folder")
    return paths


def _session_config(question_room: int) -> SessionConfig:
    anchors, refresh = _REFRESH.value, None
    if anchors not in (None, "frozen", "own"):
        if not anchors.isdecimal():
            raise ValueError(f"--refresh={anchors} must be frozen, own, or a number of tokens")
        anchors, refresh = "refresh", int(anchors)
    _geometry(1024)  # so that flags that do not go together are refused before a model is loaded
    return SessionConfig(
        geometry=_geometry,
        anchors=anchors,
        refresh=refresh,
        window=_WINDOW.value,
        rope=_ROPE.value,
        chunk=_CHUNK.value,
        kv_dtype=_KV_DTYPE.value,
        question_room=question_room,
        max_new_tokens=_NEW.value,
        system=_SYSTEM.value,
    )


def _geometry(window: int, recall: tuple[tuple[int, int], ...] = ()) -> Geometry:
    """The geometry of the flags; each kind takes those that mean something to it, the probes the heads that recall."""
    kind = _GEOMETRY.value
    given = {flag.name: flag.value for flag in (_DENSITY, _SEEDS, _LOCAL, _ANCHORS) if flag.value is not None}
    published = {"density": 0.03, "seeds": 30}
    makers = {
        "dense": (DenseGeometry, ()),
        "window": (WindowGeometry, ("local", "anchors")),
        "probe": (ProbeGeometry, ("density", "local", "anchors")),
        "stochastic": (PublishedGeometry, ("density", "seeds", "local", "anchors")),
        "structural": (PublishedGeometry, ("density", "seeds", "local", "anchors")),
        "block_shared": (BlockSharedGeometry.with_share, ("density", "local", "anchors")),
    }
    make, known = makers[kind]
    if unknown := sorted(set(given) - set(known)):
        names = ", ".join(f"--{name}" for name in unknown)
        raise ValueError(f"--geometry={kind} has no use for {names}; it takes {', '.join(known) or 'none of these'}")
    if kind in ("stochastic", "structural"):
        given = published | given | {"mode": kind}
    if kind == "block_shared":
        given = {"local": 256, "anchors": 64} | given
        given["share"] = given.pop("density", 0.25)
    if kind == "probe":
        return ProbeGeometry(length=window, recall=recall, **given).thinned()
    return make(length=window, **given)
