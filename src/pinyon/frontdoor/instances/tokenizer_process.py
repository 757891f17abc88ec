"""Long prompts are tokenized in a process of its own: the library keeps the GIL for as long as a text takes.

A frame is its length as u64 and so many bytes. To the process: :func:`tokenize`'s pickled arguments, from us only.
From it: a status byte, then tokens as little-endian u32, or why there are none (of a refusal its field, a newline, its
text). It ends with its input, however we end.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from pinyon.core.errors import Internal, InvalidArgument, PinyonError, Unavailable
from pinyon.http.budget import Budget
from pinyon.model import ModelCard, load_card
from pinyon.openai.parse import PLAIN, PromptInput, Rendering
from pinyon.runtime.logging import get_logger

WAITING_MAX = 64
ANSWER_S = 60.0
"""Longer than any prompt that is allowed takes."""
TOKENS, REFUSED, FAILED = 0, 1, 2

Job = tuple[PromptInput, Rendering]

_log = get_logger("lb.tokenizer")


def strftime_now(form: str) -> str:
    """Local time, as ``transformers`` gives it to templates that write the date."""
    return datetime.now().strftime(form)


def tokenize(card: ModelCard, prompt: PromptInput, rendering: Rendering = PLAIN, new_chars: int | None = None) -> bytes:
    """Tokens as little-endian u32 of a text or a conversation. Raises :class:`InvalidArgument`, and :class:`MuchNew` if
    that would take longer than ``new_chars`` characters that the tokenizer has not seen."""
    added = rendering.add_special_tokens
    if type(prompt) is str:
        return card.tokenizer.encode(
            prompt, add_special_tokens=added is not False, new_chars=new_chars, whose=rendering.whose
        ).tobytes()
    return card.chat_template.encode_chat(
        prompt,  # type: ignore[arg-type]
        rendering.variables,
        add_generation_prompt=rendering.add_generation_prompt,
        continue_final_message=rendering.continue_final_message,
        add_special_tokens=bool(added),
        new_chars=new_chars,
        whose=rendering.whose,
    ).tobytes()


class TokenizerProcess:
    """Started with the first prompt, one prompt at a time. ``close`` ends it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._queue: asyncio.Queue[tuple[bytes, asyncio.Future[bytes], str]] = asyncio.Queue()
        self._places = Budget(WAITING_MAX)
        self._worker: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def tokenize(self, name: str, prompt: PromptInput, rendering: Rendering = PLAIN) -> bytes:
        """As :func:`tokenize`; ``name``: in whose, empty: in nobody's.

        Raises :class:`Unavailable` when too many prompts wait, of this client or of all, or the process dies.
        """
        if not self._places.take(1, name):
            raise Unavailable("Too many long prompts are being read.", retry_after_s=1.0)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((pickle.dumps((prompt, rendering), protocol=5), future, name))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await future

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None
        while not self._queue.empty():
            _, future, name = self._queue.get_nowait()
            self._places.take(-1, name)
            future.cancel()
        await self._end()

    async def _work(self) -> None:
        while True:
            question, future, name = await self._queue.get()
            self._places.take(-1, name)
            if future.done():
                continue  # nobody waits any more
            try:
                tokens = await self._ask(question)
            except PinyonError as error:
                if not future.done():
                    future.set_exception(error)
            except (OSError, EOFError, TimeoutError) as error:
                _log.error("the tokenizer's process failed: %r", error)
                if not future.done():
                    future.set_exception(Unavailable("The prompt could not be tokenized.", retry_after_s=1.0))
                await self._end()
            except asyncio.CancelledError:
                future.cancel()
                raise
            else:
                if not future.done():
                    future.set_result(tokens)

    async def _ask(self, data: bytes) -> bytes:
        async with asyncio.timeout(ANSWER_S):
            process = self._process
            if process is None:
                process = self._process = await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.writelines((len(data).to_bytes(8, "little"), data))
            await process.stdin.drain()
            size = int.from_bytes(await process.stdout.readexactly(8), "little")
            answer = await process.stdout.readexactly(size)
        if answer[0] == TOKENS:
            return answer[1:]
        text = answer[1:].decode("utf-8")
        if answer[0] != REFUSED:
            raise Internal(text)
        field, _, text = text.partition("\n")
        raise InvalidArgument(text, field=field or None)

    async def _start(self) -> asyncio.subprocess.Process:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, str(self._model)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )

    async def _end(self) -> None:
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            self._process = None  # only now: who is cancelled here leaves it to who closes us


def serve(model: str, requests: BinaryIO, answers: BinaryIO) -> None:
    """Until ``requests`` end."""
    card = load_card(model, strftime_now=strftime_now)
    while len(head := requests.read(8)) == 8:
        data = requests.read(int.from_bytes(head, "little"))
        try:
            status, answer = TOKENS, tokenize(card, *pickle.loads(data))
        except InvalidArgument as error:
            status, answer = REFUSED, f"{error.field or ''}\n{error.message}".encode("utf-8", "replace")
        except Exception as error:  # the parent says what became of it
            status, answer = FAILED, type(error).__name__.encode("ascii", "replace")
        answers.write((len(answer) + 1).to_bytes(8, "little") + bytes((status,)) + answer)
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer)
