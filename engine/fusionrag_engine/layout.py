"""Prompt layout: the chat template applied once, and the prompt cut into prefix, chunks, text between them, question.

Chunks are computed behind the cache prefix `P`: the system prompt as the chat template renders it, up to where the
first chunk begins. A request may stand behind another prefix, its own template or a chat history
(`Request.text_around`). Every piece is tokenized apart, without special tokens, so that a chunk has the same tokens
wherever it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .config import EngineConfig
from .errors import ConfigError
from .types import Request, as_chunks

REMEMBERED_TEXTS = 512
"""Texts whose tokens are kept: an adapter counts, compares and sends the same chunks, at every question anew."""

_SENTINEL = "\u2402fusionrag-context\u2403"
_TEMPLATE_DATE = "26 Jul 2024"
"""Some templates print today's date; it would change `P`, and with it every cache key, every day."""
_FIXED_CLOCK = f"{{%- macro strftime_now(format) %}}{_TEMPLATE_DATE}{{% endmacro -%}}"


@dataclass(frozen=True)
class Segment:
    """Tokens `start .. stop - 1` of a prompt; `chunk` is the index of the request's chunk, None for other text."""

    start: int
    stop: int
    chunk: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt. `segments` cover it in order: text, chunk, text, ..., chunk, text; the last is the
    question."""

    token_ids: list[int]
    segments: list[Segment]

    @property
    def chunks(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.chunk is not None]

    @property
    def texts(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.chunk is None]


class PromptLayout:
    """Renders and tokenizes prompts for one tokenizer and configuration.

    Attributes:
        prefix_ids: tokens of the cache prefix `P`; never empty.
    """

    def __init__(self, tokenizer: Any, config: EngineConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._tokens = lru_cache(REMEMBERED_TEXTS)(self._tokenize)
        self.bos_id = _wanted_bos(tokenizer)
        rendered = self.render_chat(self.default_messages(_SENTINEL, ""))
        if rendered.count(_SENTINEL) != 1:
            raise ConfigError(
                f"the chat template renders the user's message {rendered.count(_SENTINEL)} times; exactly once is "
                f"needed to find where the first chunk begins"
            )
        self.prefix_text = rendered[: rendered.index(_SENTINEL)]
        self.prefix_ids = self.tokenize_prefix(self.prefix_text)

    def default_messages(self, context: str, question: str) -> list[dict[str, str]]:
        """The chat messages whose rendering is the engine's own layout."""
        user = context + self.config.question_template.replace("{question}", question)
        system = self.config.system_prompt
        return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": user}]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Apply the chat template once. Base models without one get a plain layout: the texts, then "Answer:".

        A template that refuses or drops the system message gets it at the head of the first user message.
        """
        turns = [dict(message) for message in messages]
        if not getattr(self.tokenizer, "chat_template", None):
            text = "\n\n".join(str(message["content"]) for message in turns)
            return text + "\nAnswer:" if add_generation_prompt else text
        from jinja2.exceptions import TemplateError

        system = [message for message in turns if message["role"] == "system"]
        try:
            rendered = self._apply(turns, add_generation_prompt)
        except TemplateError:
            if not system:
                raise
            rendered = None
        if rendered is None or any(str(message["content"]).strip() not in rendered for message in system):
            rendered = self._apply(_merge_system(turns), add_generation_prompt)
        return rendered

    def _apply(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        template = self.tokenizer.get_chat_template()
        if "strftime_now" in template:
            template = _FIXED_CLOCK + template
        text: str = self.tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **{"date_string": _TEMPLATE_DATE, **self.config.chat_template_kwargs},
        )
        return text

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a piece of the prompt, without special tokens added."""
        return list(self._tokens(text))

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else ()

    def tokenize_prefix(self, text: str) -> list[int]:
        """Tokens of the head of a prompt: as `tokenize`, with exactly one BOS where the model wants one."""
        ids = self.tokenize(text)
        if self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def text_around(self, num_chunks: int, question: str) -> list[str]:
        """The engine's own layout: the rendered text before, between and behind `num_chunks` chunks."""
        rendered = self.render_chat(self.default_messages(_SENTINEL, question))
        head, tail = rendered.split(_SENTINEL, 1)
        if num_chunks == 0:
            return [head + tail]
        return [head, *[self.config.chunk_separator] * (num_chunks - 1), tail]

    def prompt(self, request: Request) -> Prompt:
        """Tokenize a request. Each text and each chunk is a segment of its own."""
        chunks = as_chunks(request.chunks)
        texts = request.text_around or self.text_around(len(chunks), request.question)
        token_ids: list[int] = []
        segments: list[Segment] = []

        def append(ids: list[int], chunk: int | None = None) -> None:
            segments.append(Segment(len(token_ids), len(token_ids) + len(ids), chunk))
            token_ids.extend(ids)

        append(self.tokenize_prefix(texts[0]))
        for index, chunk in enumerate(chunks):
            append(self.tokenize(chunk.text), index)
            append(self.tokenize(texts[index + 1]))
        return Prompt(token_ids, segments)


def _wanted_bos(tokenizer: Any) -> int | None:
    """The BOS that the tokenizer itself puts before a text, or None."""
    bos: int | None = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return None
    with_special = tokenizer("a")["input_ids"]
    without = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bos if with_special[:1] == [bos] and without[:1] != [bos] else None


def _merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move the system messages' text to the head of the first user message."""
    system = "\n\n".join(str(message["content"]) for message in messages if message["role"] == "system")
    others = [dict(message) for message in messages if message["role"] != "system"]
    for message in others:
        if message["role"] == "user":
            message["content"] = f"{system}\n\n{message['content']}"
            return others
    return [{"role": "user", "content": system}, *others]
