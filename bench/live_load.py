"""Two kinds of requests that compete for room, by a seed: chats, whose next turn comes later, and calls of programs,
whose long prompts are never asked for again."""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Mapping
from dataclasses import dataclass

from bench.load import http_answer, http_request

REQUEST_S = 60.0
LETTERS = string.ascii_lowercase
ONLY_LETTERS = {str(ord(letter)): 100 for letter in LETTERS}
"""A bias, so that an answer has the same tokens in the next turn's prompt. Most of the built-in model's are no text."""


@dataclass(frozen=True)
class Mix:
    """The parameters of a load: times in seconds, lengths in characters, which are the built-in model's tokens."""

    seconds: float
    chats_per_s: float = 0.8
    calls_per_s: float = 4.0
    burst: int = 1
    """The number of calls that come at once."""
    more_turns: float = 0.8
    """The share of turns that another turn follows."""
    turns_max: int = 20
    think_s: float = 5.0
    """The mean time from an answer to the next turn, of an exponential distribution."""
    chat_system: int = 60
    turn: int = 50
    answer: int = 12
    programs: int = 4
    call_system: int = 40
    call: int = 200


@dataclass(frozen=True)
class Conversation:
    """The texts of one user; ``pauses_s`` come before each, the first one since the beginning of the load."""

    kind: str
    system: str
    says: tuple[str, ...]
    pauses_s: tuple[float, ...]


@dataclass(frozen=True)
class Served:
    """One request, as its client saw it: tokens of the prompt, seconds since the load began."""

    kind: str
    prompt: int
    cached: int
    sent_s: float
    answered_s: float


def mixed(mix: Mix, seed: int) -> list[Conversation]:
    """Returns chats and calls, each with Poisson arrivals."""
    dice = random.Random(seed)
    instructions = _text(dice, mix.chat_system)
    programs = [_text(dice, mix.call_system) for _ in range(mix.programs)]
    found = []
    for at_s in _arrivals(dice, mix.chats_per_s, mix.seconds):
        turns = 1
        while turns < mix.turns_max and dice.random() < mix.more_turns:
            turns += 1
        says = tuple(_text(dice, dice.randint(mix.turn // 2, mix.turn * 3 // 2)) for _ in range(turns))
        pauses_s = (at_s, *(dice.expovariate(1 / mix.think_s) for _ in says[1:]))
        found.append(Conversation("chat", instructions, says, pauses_s))
    for at_s in _arrivals(dice, mix.calls_per_s / mix.burst, mix.seconds):
        for _ in range(mix.burst):
            asked = _text(dice, dice.randint(mix.call // 2, mix.call * 3 // 2))
            found.append(Conversation("api", dice.choice(programs), (asked,), (at_s,)))
    return found


def _text(dice: random.Random, length: int) -> str:
    return "".join(dice.choices(LETTERS, k=length))


def _arrivals(dice: random.Random, per_s: float, seconds: float) -> list[float]:
    times = []
    at_s = dice.expovariate(per_s)
    while at_s < seconds:
        times.append(at_s)
        at_s += dice.expovariate(per_s)
    return times


async def serve(
    address: str, conversations: list[Conversation], mix: Mix, at_once: int, fields: Mapping[str, object]
) -> list[Served]:
    """Sends all requests that come before the end of the mix, at most ``at_once`` at a time: the others wait here.
    ``fields`` are added to each.

    Raises RuntimeError for a request that fails, TimeoutError for one that takes too long."""
    gate = asyncio.Semaphore(at_once)
    clock = asyncio.get_running_loop().time
    began_s = clock()
    served: list[Served] = []

    async def converse(number: int, conversation: Conversation) -> None:
        headers = {"x-pinyon-type": conversation.kind, "x-pinyon-session": f"s{number}"}
        messages = [{"role": "system", "content": conversation.system}]
        for text, pause_s in zip(conversation.says, conversation.pauses_s, strict=True):
            if clock() + pause_s > began_s + mix.seconds:
                return
            await asyncio.sleep(pause_s)
            messages.append({"role": "user", "content": text})
            body: dict[str, object] = {
                "model": "pinyon-tiny",
                "messages": messages,
                "max_tokens": mix.answer,
                "temperature": 0,
                "ignore_eos": True,
                **fields,
            }
            request = http_request(address, "/v1/chat/completions", body, headers)
            async with gate, asyncio.timeout(REQUEST_S):
                sent_s = clock() - began_s
                answer = await http_answer(address, request)
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            served.append(Served(conversation.kind, usage["prompt_tokens"], cached, sent_s, clock() - began_s))
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    async with asyncio.TaskGroup() as group:
        for number, conversation in enumerate(conversations):
            group.create_task(converse(number, conversation))
    return served
