"""A tokenizer for tests: bytes and a chat template with control tokens of its own."""

import re

from plga_jax.tokenizers import ByteTokenizer

BEGIN, END = 2, 3


class ToyChatTokenizer(ByteTokenizer):
    """Bytes, and turns `BEGIN role newline text END newline`; or "inst", see below."""

    name = "toy"
    has_chat_template = True

    def __init__(self, template="chatml"):
        self.template = template

    def chat(self, messages, add_generation_prompt=False):
        turns = [(message["role"], message["content"]) for message in messages]
        if self.template == "inst":
            # As in the oldest Llama chats: the system text is in the first question's brackets, only answers end.
            (_, system), (_, first), *rest = turns
            ids = [BEGIN, *self.encode(f"[[{system}\n\n{first}]]")]
            for role, text in rest:
                ids += [*self.encode(f" {text}"), END] if role == "assistant" else self.encode(f"[[{text}]]")
            return ids
        ids = [
            token for role, text in turns for token in (BEGIN, *self.encode(f"{role}\n{text}"), END, self.offset + 10)
        ]
        return ids + ([BEGIN, *self.encode("assistant\n")] if add_generation_prompt else [])

    def show(self, ids):
        """Text with control tokens spelled out."""
        names = {BEGIN: "{", END: "}"}
        text = "".join(names.get(token) or self.decode([token]) for token in ids)
        return re.sub(r"\n", "/", text)
