"""A stream that outlives its server: another one gets the prompt and the tokens so far, and goes on.

That is exact for greedy requests whose next token depends on nothing but the tokens before it. vLLM names the tokens
if it is asked to (``return_token_ids``). The load balancer keeps them, and removes them from what the client sees. All
other streams end with an error if their server goes away.

The route for chats may tell less than the tokens say: its parsers keep back what could become a call or a thought. So
before a chat goes on by its tokens, the next server is asked for their text. Where that is not what the client was
told, the client's own request is sent again, and what comes again is compared and left out."""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json, to_json

from pinyon.frontdoor.failures import Broke
from pinyon.frontdoor.servers.given_prompt import CHAT, COMPLETION
from pinyon.openai.format import DONE

ASK: Final = b'"return_token_ids":true'
HELD_BYTES_MAX: Final = 16 << 20
"""The size of the largest event that is taken apart: the first one names the prompt's tokens."""
STOP_CHARS_MAX: Final = 1024
"""The length of stop strings up to which a stream can go on: so much of the text's end is kept, to be compared."""
COMPLETION_TOKENS: Final = 16
"""The limit of a completion that names none, also by null."""
_IDS: Final = re.compile(rb',\s*"(?:prompt_)?token_ids":\s*(?:\[[0-9,\s]*\]|null)')
_PROMPT_IDS: Final = re.compile(rb'"prompt_token_ids":\s*\[([0-9,\s]+)\]')
_EVENT: Final = b"data: {"
_DONE: Final = b"data: [DONE]"
_OF_THE_REQUEST: Final = range(400, 500)
"""The codes of errors that another server would say, too."""
_CARRIED: Final = (
    *("model", "stream", "stream_options", "temperature", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "priority", "user"),
)
"""The fields that mean the same to the server that goes on."""
_FREE: Final = frozenset(
    (
        *_CARRIED,
        *("messages", "prompt", "max_tokens", "max_completion_tokens", "min_tokens", "top_p", "top_k", "min_p", "seed"),
        *("cache_salt", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template_kwargs"),
        "return_token_ids",
    )
)
"""The fields that a stream which can go on may have. ``top_p`` and the like are void where the likeliest is taken."""
_NEUTRAL: Final[Mapping[str, Any]] = {
    "n": 1, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0, "echo": False, "logprobs": False, "tools": [],
    "tool_choice": "none", "response_format": {"type": "text"},
}  # fmt: skip
"""Other fields that it may have, with the one value that changes nothing."""


def followed(path: str, values: Mapping[str, Any]) -> StreamSoFar | None:
    """Returns what follows the answer of this request; None if no other server could go on with it."""
    temperature = values.get("temperature")
    if path not in (CHAT, COMPLETION) or values.get("stream") is not True:
        return None
    if type(temperature) not in (int, float) or temperature or values.get("return_token_ids", True) is not True:
        return None
    for name, value in values.items():
        if name in _FREE or value is None:
            continue
        neutral = _NEUTRAL.get(name)
        if value != neutral or (type(value) is bool) != (type(neutral) is bool):
            return None
    if not (_only_text(values.get("messages")) if path == CHAT else _one_prompt(values.get("prompt"))):
        return None
    if not isinstance(values.get("stream_options") or {}, dict):
        return None
    stops = values.get("stop") or []
    stops = [stops] if type(stops) is str else stops
    if type(stops) is not list or not all(type(each) is str and len(each) <= STOP_CHARS_MAX for each in stops):
        return None
    numbers = [values.get(name) for name in ("max_tokens", "max_completion_tokens", "min_tokens")]
    if not all(each is None or type(each) is int for each in numbers):
        return None
    return StreamSoFar(path, values, max(map(len, stops), default=1) - 1)


def _one_prompt(prompt: Any) -> bool:
    """Returns whether it is a text or one list of tokens; a list of prompts has a choice for each."""
    return type(prompt) is str or (type(prompt) is list and all(type(each) is int for each in prompt))


def _only_text(messages: Any) -> bool:
    contents = [each.get("content") for each in messages if type(each) is dict] if type(messages) is list else [0]
    parts = [part for each in contents if type(each) is list for part in each]
    return all(each is None or type(each) in (str, list) for each in contents) and all(
        type(part) is dict and part.get("type") == "text" for part in parts
    )


class StreamSoFar:
    """The answer that the client has so far, which :meth:`passed` follows.

    Places in the text are counted in characters. While stop strings are looked for, a server keeps back as many as the
    longest one could begin with. So what it has told after some tokens ends ``kept`` before their text does."""

    __slots__ = ("_asked", "_back", "_done", "_finished", "_given", "_given_ids", "_head", "_ids", "_kept", "_least",
                 "_limit", "_lost", "_marks", "_more", "_place", "_prompt_ids", "_tells_usage", "_text", "asked",
                 "chat", "shows_tokens")  # fmt: skip

    def __init__(self, path: str, values: Mapping[str, Any], back: int) -> None:
        self.chat, self._back = path == CHAT, max(0, back)
        self._asked = {name: values[name] for name in _CARRIED if name in values}
        limit = values.get("max_completion_tokens") if self.chat else None
        if limit is None:
            limit = values.get("max_tokens")
        self._limit: int | None = COMPLETION_TOKENS if limit is None and not self.chat else limit
        self._least: int = values.get("min_tokens") or 0
        self.shows_tokens = values.get("return_token_ids") is True
        """True if the client itself has asked for tokens."""
        self.asked = False
        """True if a server was asked for its tokens."""
        self._kept = 0 if values.get("include_stop_str_in_output") else self._back
        self._prompt_ids = b""
        self._ids = array("I")
        """The generated tokens."""
        self._given_ids = 0
        """The number of tokens that the client has, or would have."""
        self._marks = deque([(0, 0)])
        """The places where text was told of one token: how many tokens there were then, and how much text the server
        had told. The first one is the last from which a server that goes on would see each stop string that ends
        later. At the start it gets the client's request, and makes all again."""
        self._place = 0
        """The place up to which the present server has told the text."""
        self._given = 0
        """The place up to which the client has it."""
        self._text: list[str] = []
        """The text that the client has."""
        self._head: dict[str, Any] = {}
        """The fields that all chunks have in common."""
        self._lost = self._finished = self._done = False
        self._tells_usage = bool((values.get("stream_options") or {}).get("include_usage"))
        """True if the client is still to be told how many tokens there were."""
        self._more: int | None = None
        """The number of tokens that the present server got with the prompt; None: it has the stream from the start."""

    @property
    def begun(self) -> bool:
        """True if the client has a part of the answer."""
        return bool(self._head)

    @property
    def made(self) -> int:
        """The number of tokens that the client has, or would have."""
        return self._given_ids

    @property
    def tokens(self) -> list[int]:
        return self._ids.tolist()

    @property
    def can_go_on(self) -> bool:
        """True if another server can go on with the stream. It cannot with thoughts and calls, of which only the
        beginnings may have been told."""
        return bool(self._prompt_ids) and not (self._lost or self._finished)

    def ending(self) -> bytes | None:
        """Returns the last events of a stream whose server went away behind the end of the answer; else None."""
        if not self._finished or self._lost:
            return None
        if self._done:
            return b""
        prompt, made = self._prompt_ids.count(b",") + 1, len(self._ids)
        used = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        last = to_json({**self._head, "choices": [], "usage": used})
        return b"data: %b\n\n%b" % (last, DONE) if self._tells_usage else DONE

    def question(self, model: str) -> bytes:
        """Returns the body of a question to ``/detokenize`` for the text of the tokens with which a server goes on."""
        return to_json({"model": model, "tokens": self.tokens[: self._marks[0][0]]})

    def answered(self, text: str) -> bool:
        """Takes the answer to :meth:`question`; returns whether the client was told that text. If not, a server that
        goes on gets the client's request."""
        count, told = self._marks[0]
        given = "".join(self._text)[:told]
        if not count or (len(text) == told + self._kept and text.startswith(given)):
            return True
        self._marks = deque([(0, 0)])
        return False

    def request(self) -> tuple[bytes, bytes | None]:
        """Returns the path and the body for the server that goes on; no body if it gets the client's own."""
        if self._limit is None:  # only a server knows the limit of a chat that names none
            self._marks = deque([(0, 0)])
        self._text = ["".join(self._text)]
        count, told = self._marks[0]
        self._more = count
        self._marks = deque([(count, told)])
        del self._ids[count:]
        self._place = told + self._kept if count else 0
        if not count:
            return (CHAT if self.chat else COMPLETION).encode(), None
        left = max(1, (self._limit or 0) - count)
        asked = {**self._asked, "max_tokens": left, "min_tokens": max(0, self._least - count)}
        ids = b",".join((self._prompt_ids, to_json(self.tokens)[1:-1]))
        return COMPLETION.encode(), b'{"prompt":[%b],%b' % (ids, to_json(asked)[1:])

    def passed(self, data: bytes) -> bytes:
        """Returns what the client gets of these events. Raises :class:`Broke` if they say that the server gives up."""
        told = []
        *events, rest = data.split(b"\n\n")
        try:
            for event in filter(None, events):
                told.append(self._event(event))  # noqa: PERF401  # what comes before an error counts
        except Broke as error:
            error.before = b"".join(told)
            raise
        if rest:  # the stream's end, or more than is kept back
            self._lost = self._lost or rest.startswith(_EVENT)
            told.append(self._as_it_came(rest))
        return b"".join(told)

    def _as_it_came(self, event: bytes) -> bytes:
        return event if self.shows_tokens else _IDS.sub(b"", event)

    def _other(self, event: bytes) -> bytes:
        if event.startswith(_DONE):
            if not (self._finished or self._lost):
                raise Broke("The server ended the stream before the answer.", begun=self.begun)
            self._done = True
        return event + b"\n\n"

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(_EVENT):
            return self._other(event)
        try:
            return self._chunk(event, from_json(event[len(_EVENT) - 1 :]))
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError):  # no event of such a route
            self._lost = True
            return self._as_it_came(event) + b"\n\n"

    def _chunk(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        choices: list[Any] = chunk.get("choices") or []
        choice = None
        finish = choices[0].get("finish_reason") if choices else ""
        gave_up = finish in ("abort", "error")
        if "error" in chunk and (self.can_go_on or not self.begun):
            gave_up = self.begun or chunk["error"].get("code") not in _OF_THE_REQUEST
        if gave_up:  # the request may be to blame for an error
            raise Broke("The server gave the stream up.", begun=self.begun, its_fault=finish == "abort")
        more, usage = self._more, chunk.get("usage")
        self._tells_usage = self._tells_usage and not (usage and not choices)
        if not self._head:
            self._head = {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}
            if (found := _PROMPT_IDS.search(event)) is not None:
                self._prompt_ids = found[1]
        fresh: tuple[str, list[int]] = "", []
        if choices:
            choice = choices[0]
            self._lost = self._lost or len(choices) > 1 or choice.get("index") != 0
            fresh = self._follow(choice)
        if more is None:
            return self._as_it_came(event) + b"\n\n"
        if choice is not None and not self._as_before(choice, *fresh):
            return b""
        for name in ("prompt_token_ids", "system_fingerprint"):
            chunk.pop(name, None)
        if usage:
            usage["prompt_tokens"] -= more
            usage["completion_tokens"] += more
            if cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
                usage["prompt_tokens_details"]["cached_tokens"] = min(cached, usage["prompt_tokens"])
        return b"data: %b\n\n" % to_json({**chunk, **self._head})

    def _follow(self, choice: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Takes note of a choice's tokens and text; returns the part of each that the client does not have."""
        ids, delta = choice.get("token_ids") or [], choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        if delta.get("tool_calls") or delta.get("reasoning") or delta.get("reasoning_content"):
            self._lost = True
        self._lost = self._lost or bool(text and not ids)  # it came without its tokens
        fresh_ids = ids[max(0, self._given_ids - len(self._ids)) :]
        self._ids.extend(ids)
        self._given_ids = max(self._given_ids, len(self._ids))
        self._finished = choice.get("finish_reason") is not None
        again = max(0, min(len(text), self._given - self._place))
        if again and not self._again(text[:again]):
            raise Broke("The server that went on made other text of the stream.", begun=True, its_fault=False)
        fresh = text[again:]
        self._place += len(text)
        self._given = max(self._given, self._place)
        if fresh:
            self._text.append(fresh)
        if text and len(ids) == 1:  # of several, the last one may be a part of a character that was not told
            marks = self._marks
            marks.append((len(self._ids), self._place))
            while len(marks) > 1 and marks[1][1] <= self._given - self._back:
                marks.popleft()
        return fresh, fresh_ids

    def _again(self, text: str) -> bool:
        """Returns whether this text, which comes again at the present place, is what the client has there."""
        return self._text[0].startswith(text, self._place)  # what was told before the present server

    def _as_before(self, choice: dict[str, Any], fresh: str, ids: list[int]) -> bool:
        """Makes of a choice what the first server would have said; returns whether there is anything to say."""
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)
        if self.shows_tokens:
            choice["token_ids"] = ids
        says = bool(fresh) or choice.get("finish_reason") is not None or (self.shows_tokens and bool(ids))
        if not self.chat:
            choice["text"] = fresh
            return says
        delta = choice.setdefault("delta", {})
        choice.pop("text", None)
        delta.pop("role", None)
        delta.pop("content", None)
        if fresh:
            delta["content"] = fresh
        return says or bool(delta)
