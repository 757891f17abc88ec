"""The process that tokenizes long prompts, as the library keeps the GIL for as long as a text takes.

A frame is its length as u64 and that many bytes. Frames to the process hold the pickled arguments of :func:`tokenize`,
from us only. Frames from it hold a status byte, then tokens as little-endian u32 or the reason why there are none (for
a refusal: field, newline, text). The process ends with its input, however the parent ends.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Timer
from typing import IO

from pinyon.core.errors import Internal, InvalidArgument, Unavailable
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.model import ModelCard, load_card
from pinyon.openai.parse import PLAIN, PromptInput, Rendering
from pinyon.runtime.logging import get_logger

WAITING_MAX = 64
ANSWER_S = 60.0
"""The time limit of an answer, longer than any allowed prompt takes."""
TOKENS, REFUSED, FAILED = 0, 1, 2

_log = get_logger("lb.tokenizer")


def strftime_now(form: str) -> str:
    """Returns local time as ``transformers`` gives it to templates that write the date."""
    return datetime.now().strftime(form)


def tokenize(card: ModelCard, prompt: PromptInput, rendering: Rendering = PLAIN, new_chars: int | None = None) -> bytes:
    """Returns the tokens of a text or a conversation as little-endian u32. Raises :class:`InvalidArgument`, and
    :class:`MuchNew` if more than ``new_chars`` of its characters are new to the tokenizer."""
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
    """The process, started with the first prompt. A thread gives it one prompt at a time. ``close`` ends it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._thread = OffLoop(1, WAITING_MAX, "long prompts")
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    async def tokenize(self, name: str, prompt: PromptInput, rendering: Rendering = PLAIN) -> bytes:
        """Returns the result of :func:`tokenize`, counted against the client ``name`` (empty: against none).

        Raises :class:`Unavailable` when too many prompts wait, of this client or of all, or the process dies.
        """
        return await self._thread.run(name, self._ask, prompt, rendering)

    async def close(self) -> None:
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # the waiting thread learns of that
        await asyncio.to_thread(self._thread.close)
        self._end()

    # -- in the thread

    def _ask(self, prompt: PromptInput, rendering: Rendering) -> bytes:
        overdue = False
        try:
            process = self._process
            if process is None:
                process = self._process = self._start()
            if self._closed:
                raise EOFError
            late = Timer(ANSWER_S, process.kill)
            late.start()
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                _write(process.stdin, pickle.dumps((prompt, rendering), protocol=5))
                answer = _read(process.stdout)
            finally:
                overdue = late.finished.is_set()
                late.cancel()
        except (OSError, EOFError) as error:
            if not self._closed:
                why = f"no answer within {ANSWER_S:g} s" if overdue else repr(error)
                _log.error("the tokenizer's process failed: %s", why)
            self._end()
            raise Unavailable("The prompt could not be tokenized.", retry_after_s=1.0) from None
        if answer[0] == TOKENS:
            return answer[1:]
        text = answer[1:].decode("utf-8")
        if answer[0] != REFUSED:
            raise Internal(text)
        field, _, text = text.partition("\n")
        raise InvalidArgument(text, field=field or None)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        arguments = (sys.executable, "-m", __name__, str(self._model))
        return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def _end(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            self._process = None


def serve(model: str, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers ``requests`` until they end. Raises :class:`EOFError` then."""
    card = load_card(model, strftime_now=strftime_now)
    while True:
        data = _read(requests)
        try:
            status, answer = TOKENS, tokenize(card, *pickle.loads(data))
        except InvalidArgument as error:
            status, answer = REFUSED, f"{error.field or ''}\n{error.message}".encode("utf-8", "replace")
        except Exception as error:  # the parent reports the failure
            status, answer = FAILED, type(error).__name__.encode("ascii", "replace")
        _write(answers, bytes((status,)) + answer)


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little"))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """Returns the data of one frame. Raises :class:`EOFError` at the end."""
    head = pipe.read(8)
    data = pipe.read(int.from_bytes(head, "little"))
    if len(head) < 8 or len(data) < int.from_bytes(head, "little"):
        raise EOFError
    return data


if __name__ == "__main__":
    with suppress(EOFError):
        serve(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer)
