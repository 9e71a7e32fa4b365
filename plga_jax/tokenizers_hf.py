"""Tokenizers of pretrained models: the `tokenizers` library with a chat template, behind the house's protocol.

Text is text: what a document or a user writes never becomes a control token, whatever it spells. Only the template's
own markup does.
"""

import datetime
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from plga_jax.gguf_files import metadata, open_gguf
from plga_jax.tokenizers import StreamDecoder, _check_fingerprint, _check_ids, _PieceStream

FILE = "tokenizer.json"
ROLES = ("system", "user", "assistant", "tool")

# Kinds of entries in the vocabulary of a GGUF file.
_CONTROL, _USER_DEFINED = 3, 4
_PRE_TOKENIZERS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


class HFTokenizer:
    """A tokenizer of the `tokenizers` library; see `from_path` and `from_gguf`.

    Attributes:
        vocab_size: ids are below it; the model's vocabulary may be padded beyond.
        eos_id: the id that ends a text.
        pad_id: the id of padding.
        bos_id: the id that begins a text; None when this tokenizer begins texts with none.
        has_chat_template: whether `chat` follows a template of the model's own.
        fingerprint: SHA-256 of what decides the ids.
        path: the file it was read from.
    """

    name = "hf"

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        path: str | os.PathLike[str],
        fingerprint: str,
        eos_id: int,
        pad_id: int | None = None,
        bos_id: int | None = None,
        template: str | None = None,
        template_tokens: Mapping[str, str] | None = None,
    ):
        """Wraps a tokenizer.

        Args:
            tokenizer: of the library.
            path: the file it came from.
            fingerprint: of what decides the ids.
            eos_id: the id that ends a text.
            pad_id: the id of padding; None takes `eos_id`.
            bos_id: the id that begins a text, None for none.
            template: Jinja source of the chat markup; None for none.
            template_tokens: what templates may name beside the messages, such as `bos_token`.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._special = {
            token: added.content for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        }
        self._template, self._template_tokens = template, dict(template_tokens or {})
        self.path, self.fingerprint = pathlib.Path(path), fingerprint
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_id, self.bos_id = eos_id, bos_id
        self.pad_id = eos_id if pad_id is None else pad_id
        _check_ids([token for token in (self.eos_id, self.pad_id, bos_id) if token is not None], self.vocab_size)

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], *, eos_id: int | None = None) -> Self:
        """Reads `tokenizer.json`, and what `tokenizer_config.json` and `chat_template.jinja` beside it say.

        Args:
            path: of the file or its folder.
            eos_id: the id that ends a text, where `tokenizer_config.json` names none.

        Returns:
            The tokenizer.

        Raises:
            ValueError: a file is missing or damaged, or nothing names the id that ends a text.
        """
        path = pathlib.Path(path)
        path = path / FILE if path.is_dir() else path
        try:
            source = path.read_bytes()
            tokenizer = tokenizers.Tokenizer.from_buffer(source)
        except OSError as error:
            raise ValueError(
                f"cannot read the tokenizer {path} ({error.strerror}); give a folder with {FILE}. A "
                "tokenizer.model alone is converted by loading and saving it with the model's own library"
            ) from None
        except Exception as error:  # the library raises bare Exception for whatever is wrong with a file
            raise ValueError(f"{path} is no tokenizer of the `tokenizers` library, or is damaged ({error})") from None
        config = _read_json(path.with_name("tokenizer_config.json"))
        named = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        named = {name: text for name, text in named.items() if text is not None}
        ids = {name: token for name, text in named.items() if (token := tokenizer.token_to_id(text)) is not None}
        eos_id = ids.get("eos_token", eos_id)
        if eos_id is None:
            raise ValueError(f"nothing beside {path} names the token that ends a text; give eos_id=")
        before = tokenizer.encode("", add_special_tokens=True).ids
        return cls(
            tokenizer,
            path=path,
            fingerprint=hashlib.sha256(source).hexdigest(),
            eos_id=eos_id,
            pad_id=ids.get("pad_token"),
            bos_id=before[0] if before and before[0] == ids.get("bos_token") else None,
            template=_template(path, config),
            template_tokens=named,
        )

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Self:
        """Reads the tokenizer of a GGUF file, and nothing of its weights; otherwise as `from_gguf_metadata`."""
        return cls.from_gguf_metadata(metadata(open_gguf(path)), path)

    @classmethod
    def from_gguf_metadata(cls, fields: Mapping[str, Any], path: str | os.PathLike[str]) -> Self:
        """Rebuilds a byte-level BPE from the metadata of a GGUF file.

        Args:
            fields: its metadata, `tokenizer.…`, as Python values.
            path: the file.

        Returns:
            The tokenizer.

        Raises:
            ValueError: another kind of tokenizer, or fields are missing.
        """

        def field(name: str) -> Any:
            if (value := fields.get(f"tokenizer.ggml.{name}")) is None:
                raise ValueError(f"{path} lacks tokenizer.ggml.{name}; its tokenizer cannot be rebuilt")
            return value

        kind, pre = field("model"), field("pre")
        if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
            raise ValueError(
                f"{path} has a tokenizer {kind!r} with pre-tokenizer {pre!r}; of GGUF files, only 'gpt2' with "
                f"{' or '.join(_PRE_TOKENIZERS)} is implemented. Use the model's Hugging Face folder"
            )
        tokens, merges, types = field("tokens"), field("merges"), field("token_type")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        if len(types) != len(tokens) or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"{path} has {len(tokens)} tokens of {len(types)} types, or a merge that is no pair")
        try:
            model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs)
        except Exception as error:  # bare Exception, as above
            raise ValueError(f"{path} holds no byte-level BPE ({error})") from None
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre])
        tokenizer.decoder = decoders.ByteLevel()
        for code, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            added = [token for token, found in zip(tokens, types) if found == code]
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
        bos_id, eos_id = fields.get("tokenizer.ggml.bos_token_id"), field("eos_token_id")
        _check_ids([token for token in (bos_id, eos_id) if token is not None], len(tokens))
        return cls(
            tokenizer,
            path=path,
            fingerprint=hashlib.sha256(json.dumps([kind, pre, tokens, merges, types]).encode()).hexdigest(),
            eos_id=eos_id,
            pad_id=fields.get("tokenizer.ggml.padding_token_id"),
            bos_id=bos_id if fields.get("tokenizer.ggml.add_bos_token", False) else None,
            template=fields.get("tokenizer.chat_template"),
            template_tokens={"eos_token": tokens[eos_id]} | ({} if bos_id is None else {"bos_token": tokens[bos_id]}),
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` follows a template of the model's own."""
        return self._template is not None

    @property
    def special_ids(self) -> dict[str, int]:
        """Control tokens by what they spell."""
        return {text: token for token, text in self._special.items()}

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text, without any that begin or end it.

        Args:
            text: any.
            special: whether control tokens spelled out in the text become such. Never for text of others.

        Returns:
            Ids.
        """
        self._tokenizer.encode_special_tokens = not special
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; control tokens give nothing, broken UTF-8 gives replacement characters.

        Raises:
            ValueError: when an id is outside the vocabulary.
        """
        return self._tokenizer.decode(_check_ids(ids, self.vocab_size), skip_special_tokens=True)

    def stream(self) -> StreamDecoder:
        """A `StreamDecoder`."""
        return _PieceStream(self)

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the model's own markup; what messages spell stays text.

        Args:
            messages: of role ("system", "user", "assistant" or "tool") and content.
            add_generation_prompt: whether to begin the model's answer.

        Returns:
            Ids, with those that the template begins and ends texts with. Without a template: `bos_id` where there is
            one, then "[role]" lines over the contents.

        Raises:
            ValueError: no messages, one without role or content, or a template that refuses them.
        """
        for message in messages:
            if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
                raise ValueError(f"message {message!r} needs a role of {', '.join(ROLES)} and a content of text")
        if not messages:
            raise ValueError("a conversation needs at least one message")
        if self._template is None:
            lines = [f"[{message['role']}]\n{message['content']}\n\n" for message in messages]
            text = "".join(lines) + ("[assistant]\n" if add_generation_prompt else "")
            return ([] if self.bos_id is None else [self.bos_id]) + self.encode(text)
        ids = self.encode(self._render(messages, add_generation_prompt), special=True)
        # The same conversation with every content replaced by a mark tells which control tokens are the template's.
        marks = {f"\ue000{index}\ue001": message["content"] for index, message in enumerate(messages)}
        marked = [message | {"content": mark} for message, mark in zip(map(dict, messages), marks)]
        skeleton = self._render(marked, add_generation_prompt)
        if self._controls(ids) == self._controls(self.encode(skeleton, special=True)):
            return ids
        return self._spliced(skeleton, marks)

    def to_config(self) -> dict[str, Any]:
        """A JSON-able description: where the file is, the id that ends a text, and the fingerprint."""
        return {"name": self.name, "path": str(self.path), "eos_id": self.eos_id, "fingerprint": self.fingerprint}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The inverse of `to_config`, for `tokenizer.json` and GGUF files; one that has changed since is refused."""
        path = pathlib.Path(config["path"])
        gguf = path.suffix == ".gguf"
        tokenizer = cls.from_gguf(path) if gguf else cls.from_path(path, eos_id=config.get("eos_id"))
        _check_fingerprint(tokenizer, config)
        return tokenizer

    def _controls(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._special]

    def _spliced(self, skeleton: str, marks: Mapping[str, str]) -> list[int]:
        """Ids of a rendered template whose marks stand for contents that spell control tokens."""
        # Longest first: one control token may begin with another.
        texts = sorted(self._special.values(), key=len, reverse=True)
        ids = []
        for piece in re.split(f"({'|'.join(map(re.escape, texts))})", skeleton):
            if piece in texts:
                ids.append(self._tokenizer.token_to_id(piece))
            elif piece:
                # Template text and content between two control tokens are one text: they may share a token.
                ids += self.encode(re.sub("\ue000\\d+\ue001", lambda mark: marks.get(mark[0], mark[0]), piece))
        return ids

    def _render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        try:
            import jinja2
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ValueError("chat templates need jinja2: pip install jinja2") from None

        def refuse(message: str):
            raise jinja2.TemplateError(message)

        # A template comes with a model and is not to be trusted: no attribute of Python's is within its reach.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }
        try:
            return environment.from_string(self._template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._template_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ValueError(f"the chat template of {self.path} refuses these messages: {error}") from None


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__}, not an object")
    return found


def _content(token: Any) -> str | None:
    """What a token spells, which files give as text or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _template(path: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own today, a field before, of which there may be several by name."""
    own = path.with_name("chat_template.jinja")
    if own.is_file():
        return own.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}.get("default")
    return found if isinstance(found, str) else None
