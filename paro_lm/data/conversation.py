"""Rows that are no plain text, as tokens and a mask of those that the model should say: conversations, and prompts with completions.

Runs in preparation workers: transformers is imported for conversations only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paro_lm.data.encoding import Encoder

MARKER = "\ue000\ue001\ue000"
"""Stands for the content of a message; nothing that a template strips or a person writes."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """`kind` messages (keys: the list of messages; `tokenizer`: the folder with the chat template) or completion (keys: prompt,
    completion)."""

    kind: str
    keys: tuple[str, ...]
    tokenizer: str = ""


class RowEncoder:
    """Rows to (ids, mask); `eod` ends a completion and carries loss, since the model should say where it ends.

    Raises ValueError for a tokenizer without a chat template.
    """

    def __init__(self, row_format: RowFormat, encode: Encoder, *, eod: int | None) -> None:
        self.format, self._encode, self._eod = row_format, encode, eod
        self._chat = ChatRenderer(row_format.tokenizer) if row_format.kind == "messages" else None

    def __call__(self, where: str, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Raises ValueError, beginning with `where` the row stands, for what is no conversation, prompt or completion."""
        if self._chat is not None:
            (key,) = self.format.keys
            return self._chat(where, _messages(where, key, row[key]))
        prompt, completion = (_text(where, key, row[key]) for key in self.format.keys)
        ids, before = self._encode([prompt + completion, prompt])
        start = next((i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), min(len(ids), len(before)))
        mask = [0] * start + [1] * (len(ids) - start)
        if self._eod is not None and 1 in mask:
            ids, mask = [*ids, self._eod], [*mask, 1]
        return ids, mask


class ChatRenderer:
    """Conversations through the chat template of a tokenizer.

    Templates that mark what the assistant says ({% generation %}) are asked for it. Others are rendered up to each assistant message
    and past it: what lies between is what the model should say, its end-of-turn token included. Where the beginning of a conversation
    renders otherwise than inside it, the message's content is found by a marker instead.
    """

    def __init__(self, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise ValueError(
                f"data.format=messages: the tokenizer {tokenizer} has no chat template (chat_template.jinja, or chat_template in its "
                "tokenizer_config.json); take the tokenizer of a chat model, add a template, or use data.format=completion"
            )
        if not self._tokenizer.is_fast:
            raise ValueError(f"data.format=messages: the tokenizer {tokenizer} has no tokenizer.json, which is needed to find the answers")
        self._marks_answers = bool(_GENERATION.search(template))
        self._special = set(self._tokenizer.all_special_ids)

    def __call__(self, where: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Raises ValueError, beginning with `where`, when the template refuses the conversation."""
        if self._marks_answers:
            try:
                result = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            except Exception as error:
                raise self._refusal(where, error) from error
            return list(result["input_ids"]), list(result["assistant_masks"])
        try:
            text = self._render(messages)
        except Exception as error:
            raise self._refusal(where, error) from error
        spans = [self._span(text, messages, i) for i, message in enumerate(messages) if message["role"] == "assistant"]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return self._masked(text, encoded["input_ids"], encoded["offset_mapping"], spans)

    def _render(self, messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> str:
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))

    def _span(self, text: str, messages: list[dict[str, Any]], index: int) -> tuple[int, int]:
        """The characters of `text` that the model should say as message `index`."""
        try:
            before, after = self._render(messages[:index], prompt=True), self._render(messages[: index + 1])
        except Exception:  # templates may refuse a conversation without its end
            before, after = MARKER, MARKER
        if text.startswith(before) and text.startswith(after) and len(before) <= len(after):
            return len(before), len(after)
        marked = self._render([m | {"content": MARKER} if i == index else m for i, m in enumerate(messages)])
        head, found, tail = marked.partition(MARKER)
        if not found or not text.startswith(head) or not text.endswith(tail):
            return 0, 0
        return len(head), len(text) - len(tail) + self._end_of_turn(tail)

    def _end_of_turn(self, tail: str) -> int:
        """Characters of the special token with which what follows a message begins."""
        tokens = sorted((str(token) for token in self._tokenizer.all_special_tokens), key=len, reverse=True)
        space = len(tail) - len(tail.lstrip())
        return next((space + len(token) for token in tokens if tail.lstrip().startswith(token)), 0)

    def _masked(
        self, text: str, ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]]
    ) -> tuple[list[int], list[int]]:
        mask = [0] * len(ids)
        for start, stop in spans:
            inside = [i for i, (a, b) in enumerate(offsets) if a < stop and max(b, a + 1) > start]
            last = next((i for i in reversed(inside) if ids[i] in self._special), None)
            if last is None or text[offsets[last][1] : stop].strip():
                last = len(ids)
            for i in inside:
                mask[i] = int(i <= last)  # blanks behind the end of the turn are the template's
        return list(ids), mask

    def _refusal(self, where: str, error: Exception) -> ValueError:
        return ValueError(f"{where}: the chat template refuses this conversation: {error}")


def _messages(where: str, key: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{where}: {key!r} must be a list of messages, got {type(value).__name__}; correct the row")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | None):
            raise ValueError(f"{where}: a message of {key!r} must be an object with a string role and content, got {str(message)[:80]}")
    return [
        {name: part for name, part in message.items() if part is not None} | {"content": message.get("content") or ""} for message in value
    ]


def _text(where: str, key: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: field {key!r} holds {type(value).__name__}, not text; correct the row")
    return value or ""
