"""Long-context tasks whose right answers are known exactly, made of token ids.

Every task is a context, as long as the filler it is made from, and probes: each is appended to the context by itself,
and says which ids are the right continuation. What a probe asks for *replaces* filler, so lengths and positions stay
those of the filler.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

Encode = Callable[[str], Sequence[int]]
"""Text to ids, without special ids."""

NAMES = (
    "amber", "birch", "cobalt", "delta", "ember", "falcon", "garnet", "harbor", "indigo", "juniper", "kestrel",
    "lantern", "marble", "nectar", "opal", "pepper", "quartz", "raven", "saffron", "timber", "umber", "velvet",
    "walnut", "yarrow",
)  # fmt: skip
PLACES = (
    "attic", "bakery", "cellar", "dairy", "elevator", "forge", "garage", "hangar", "island", "jetty", "kitchen",
    "library", "museum", "nursery", "office", "pantry", "quarry", "refinery", "stable", "tower", "vault", "windmill",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """One question about a context.

    Attributes:
        prompt: int32 [P], what follows the context.
        answer: int32 [A], the right continuation of the prompt.
        distance: tokens from the first token of what must be found to the end of the context; of several facts, the
            farthest.
        candidates: continuations to choose among, int32 each, the answer one of them; empty: nothing to choose.
    """

    prompt: np.ndarray
    answer: np.ndarray
    distance: int
    candidates: tuple[np.ndarray, ...] = ()

    @property
    def correct(self) -> int:
        """The answer's place among the candidates.

        Raises:
            ValueError: if there are no candidates.
        """
        for place, candidate in enumerate(self.candidates):
            if np.array_equal(candidate, self.answer):
                return place
        raise ValueError("this probe has no candidates: score it by its likelihood or by exact match")

    def inputs(self, continuation: np.ndarray | None = None) -> np.ndarray:
        """What a model must read for `log_probs` to score a continuation.

        Args:
            continuation: int32 [A]; None scores the answer.

        Returns:
            int32 [P + A - 1]: the prompt and all but the last token of the continuation.
        """
        return np.concatenate([self.prompt, (self.answer if continuation is None else continuation)[:-1]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A context and what is asked about it.

    Attributes:
        name: of the kind of task.
        context: int32 [C].
        probes: at least one, to be asked one at a time, each right after the context.
    """

    name: str
    context: np.ndarray
    probes: tuple[Probe, ...]


def log_probs(logits: np.ndarray, continuation: np.ndarray) -> np.ndarray:
    """Log-probabilities of a continuation's tokens.

    Args:
        logits: float [..., V], at least A rows; the last A rows are the predictions of the continuation's tokens, as
            after reading `Probe.inputs(continuation)`.
        continuation: int [A].

    Returns:
        float64 [A], in nats.

    Raises:
        ValueError: if there are fewer rows than tokens, or an id is outside the vocabulary.
    """
    continuation = np.asarray(continuation)
    if continuation.size == 0 or len(logits) < len(continuation):
        raise ValueError(f"{len(logits)} rows of logits cannot score {len(continuation)} tokens: one row each")
    rows = np.asarray(logits[-len(continuation) :], np.float64)
    if continuation.min() < 0 or continuation.max() >= rows.shape[-1]:
        raise ValueError(f"ids {continuation.tolist()} leave the vocabulary of {rows.shape[-1]}")
    rows = rows - rows.max(-1, keepdims=True)
    return rows[np.arange(len(rows)), continuation] - np.log(np.exp(rows).sum(-1))


def continuation(encode: Encode, prompt: str, text: str) -> np.ndarray:
    """The ids that a text adds to those of a prompt.

    Args:
        encode: text to ids.
        prompt: what comes before.
        text: what is added.

    Returns:
        int32 [A]. They may differ from the ids of the text by itself, which some tokenizers begin differently.

    Raises:
        ValueError: if the tokenizer joins the end of the prompt and the beginning of the text, or the text adds
            nothing.
    """
    before, whole = list(encode(prompt)), list(encode(prompt + text))
    if whole[: len(before)] != before or len(whole) == len(before):
        raise ValueError(
            f"the tokenizer joins {prompt[-20:]!r} and {text[:20]!r}: end the prompt where a token ends, for example "
            "before the space"
        )
    return np.array(whole[len(before) :], np.int32)


def spread(length: int, count: int, span: int) -> np.ndarray:
    """Distances that put spans in the middle of equal parts of a context.

    Args:
        length: C, tokens of the context.
        count: number of spans.
        span: tokens of each.

    Returns:
        int64 [count], increasing: tokens from the first token of a span to the end of the context.

    Raises:
        ValueError: if the spans do not fit.
    """
    part = length // max(count, 1)
    if count < 1 or not 1 <= span <= part:
        raise ValueError(f"{count} spans of {span} tokens do not fit into {length}: ask for fewer, or give more filler")
    return part // 2 + span // 2 + part * np.arange(count)


def copy_probes(
    filler: Sequence[int] | np.ndarray, passages: Sequence[Sequence[int]], distances: Sequence[int], *, prompt: int = 16
) -> Task:
    """Passages placed in other text and begun again after it: does the model go on as before?

    Args:
        filler: [C] ids of the other text.
        passages: ids of each passage.
        distances: from the first token of each passage to the end of the context; `spread` gives even ones.
        prompt: leading tokens of a passage that are given again; the rest is the answer.

    Returns:
        A task with one probe per passage, in their order.

    Raises:
        ValueError: if passages overlap, leave the context, or are not longer than the prompt.
    """
    passages = [np.asarray(passage, np.int32) for passage in passages]
    for passage in passages:
        if not 1 <= prompt < len(passage):
            raise ValueError(f"prompt is {prompt}; a passage of {len(passage)} tokens needs 1 to {len(passage) - 1}")
    context = _place(filler, passages, distances)
    probes = [
        Probe(prompt=passage[:prompt], answer=passage[prompt:], distance=int(distance))
        for passage, distance in zip(passages, distances, strict=True)
    ]
    return Task(name="copy", context=context, probes=tuple(probes))


def passkey(
    encode: Encode, filler: Sequence[int] | np.ndarray, distance: int, seed: int, *, choices: int = 16, digits: int = 5
) -> Task:
    """One number hidden in a text and asked for.

    Args:
        encode: text to ids.
        filler: [C] ids of the text.
        distance: from the first token of the sentence with the number to the end of the context.
        seed: decides the number and the others it is to be told from.
        choices: candidates, the right one included, in random order.
        digits: of each number.

    Returns:
        A task with one probe.

    Raises:
        ValueError: if the sentence leaves the context, or the tokenizer joins prompt and answer into one token.
    """
    rng = np.random.default_rng(seed)
    numbers = _numbers(rng, choices, digits)
    key = numbers[rng.integers(choices)]
    said, asked = f"\nThe pass key is {key}. Remember it.\n", "\nThe pass key is"
    context = _place(filler, [encode(said)], [distance])
    return Task(name="passkey", context=context, probes=(_probe(encode, asked, key, distance, numbers),))


def key_table(
    encode: Encode,
    filler: Sequence[int] | np.ndarray,
    *,
    keys: int = 12,
    seed: int,
    asked: int | None = None,
    digits: int = 5,
) -> Task:
    """Named numbers hidden evenly through a text; they are each other's distractors.

    Args:
        encode: text to ids.
        filler: [C] ids of the text.
        keys: how many are hidden, up to the number of `NAMES`.
        seed: decides names, numbers and their order.
        asked: how many of them, drawn at random, are asked for; None asks for all. With one asked for, `keys` - 1
            is the number of distractors.
        digits: of each number.

    Returns:
        A task with one probe per key asked for, the nearest first; the candidates are all keys of the table.

    Raises:
        ValueError: if there are too many keys for the names or for the filler, or the tokenizer joins prompt and
            answer into one token.
    """
    asked = keys if asked is None else asked
    if not 1 <= asked <= keys <= len(NAMES):
        raise ValueError(f"keys is {keys} and asked {asked}; need 1 ≤ asked ≤ keys ≤ {len(NAMES)}")
    rng = np.random.default_rng(seed)
    names = rng.permutation(NAMES)[:keys]
    numbers = _numbers(rng, keys, digits)
    chosen = np.sort(rng.permutation(keys)[:asked])
    said = [encode(f"\nThe key of {name} is {number}.\n") for name, number in zip(names, numbers)]
    distances = spread(len(filler), keys, max(map(len, said)))
    probes = [
        _probe(encode, f"\nThe key of {names[i]} is", numbers[i], int(distances[i]), numbers) for i in chosen.tolist()
    ]
    return Task(name="key_table", context=_place(filler, said, distances), probes=tuple(probes))


def two_hop(encode: Encode, filler: Sequence[int] | np.ndarray, *, chains: int = 4, seed: int, digits: int = 5) -> Task:
    """Names lead to places and places to numbers; the number of a name is asked for.

    The facts of all chains are shuffled and spread evenly, so that the second fact may come before the first.

    Args:
        encode: text to ids.
        filler: [C] ids of the text.
        chains: how many, up to the number of `PLACES`.
        seed: decides names, places, numbers and where the facts are.
        digits: of each number.

    Returns:
        A task with one probe per chain; the candidates are the numbers of all chains.

    Raises:
        ValueError: if there are too many chains for the places or for the filler, or the tokenizer joins prompt and
            answer into one token.
    """
    if not 1 <= chains <= min(len(NAMES), len(PLACES)):
        raise ValueError(f"chains is {chains}; there are names and places for 1 to {min(len(NAMES), len(PLACES))}")
    rng = np.random.default_rng(seed)
    names, places = rng.permutation(NAMES)[:chains], rng.permutation(PLACES)[:chains]
    numbers = _numbers(rng, chains, digits)
    said = [encode(f"\nThe key of {name} is in the {place}.\n") for name, place in zip(names, places)]
    said += [encode(f"\nThe key in the {place} is {number}.\n") for place, number in zip(places, numbers)]
    distances = rng.permutation(spread(len(filler), 2 * chains, max(map(len, said))))
    farthest = np.maximum(distances[:chains], distances[chains:])
    probes = [
        _probe(encode, f"\nThe number on the key of {name} is", number, int(distance), numbers)
        for name, number, distance in zip(names, numbers, farthest)
    ]
    return Task(name="two_hop", context=_place(filler, said, distances), probes=tuple(probes))


def _place(filler, passages: Sequence[Sequence[int]], distances: Sequence[int]) -> np.ndarray:
    context = np.array(filler, np.int32)
    spans = [
        (len(context) - int(distance), len(context) - int(distance) + len(passage))
        for passage, distance in zip(passages, distances, strict=True)
    ]
    for start, end in spans:
        if not 0 <= start < end <= len(context):
            raise ValueError(
                f"a passage of {end - start} tokens at distance {len(context) - start} leaves the context of "
                f"{len(context)}: distances go from the passage's length to the context's"
            )
    ordered = sorted(spans)
    for (start, end), (following, _) in itertools.pairwise(ordered):
        if following < end:
            raise ValueError(f"the passages from tokens {start} and {following} on overlap: spread the distances")
    for (start, end), passage in zip(spans, passages):
        context[start:end] = passage
    return context


def _probe(encode: Encode, prompt: str, answer: str, distance: int, candidates: Sequence[str]) -> Probe:
    return Probe(
        prompt=np.array(encode(prompt), np.int32),
        answer=continuation(encode, prompt, f" {answer}"),
        distance=int(distance),
        candidates=tuple(continuation(encode, prompt, f" {candidate}") for candidate in candidates),
    )


def _numbers(rng: np.random.Generator, count: int, digits: int) -> list[str]:
    """Different numbers without leading zeros."""
    low, high = 10 ** (digits - 1), 10**digits
    if not 1 <= count <= high - low:
        raise ValueError(f"{count} different numbers of {digits} digits: there are {high - low}; ask for 1 or more")
    found: set[int] = set()
    while len(found) < count:
        found.add(int(rng.integers(low, high)))
    return [str(number) for number in rng.permutation(sorted(found))]
