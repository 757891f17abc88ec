"""The process that tokenizes long prompts, as compiled merging keeps the GIL for as long as a text takes.

In a thread, 4 MiB of new text would stop the event loop for some 2 s. The library alone releases the GIL, but takes 1.7
times as long, and keeps the GIL for 70 ms or more while it lists so many tokens.

The process gets the pickled arguments of :func:`tokenize`, from us only, and answers with the tokens or with the reason
why there are none. It ends with its connection, however the parent ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer

from pinyon.core.errors import Internal, InvalidArgument, Unavailable
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.model import ModelCard, load_card
from pinyon.openai.parse import PLAIN, PromptInput, Rendering
from pinyon.runtime.logging import get_logger

WAITING_MAX = 64
ANSWER_S = 60.0
"""The time limit of an answer, longer than any allowed prompt takes."""

Answer = bytes | str | tuple[str, str | None]
"""The tokens as little-endian u32, the name of an unexpected error, or a refusal's message and field."""

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
        as_given=rendering.as_given,
        new_chars=new_chars,
        whose=rendering.whose,
    ).tobytes()


class TokenizerProcess:
    """The process, started with the first prompt. A thread gives it one prompt at a time. ``close`` ends it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._thread = OffLoop(1, WAITING_MAX, "long prompts")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._closed = False

    async def tokenize(self, name: str, prompt: PromptInput, rendering: Rendering = PLAIN) -> bytes:
        """Returns the result of :func:`tokenize`, counted against the client ``name`` (empty: against none).

        Raises :class:`Unavailable` when too many prompts wait, of this client or of all, or the process dies."""
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
            if self._process is None:
                self._start()
            process = self._process
            assert process is not None
            if self._closed:
                raise EOFError
            late = Timer(ANSWER_S, process.kill)
            late.start()
            try:
                self._connection.send((prompt, rendering))
                answer: Answer = self._connection.recv()
            finally:
                overdue = late.finished.is_set()
                late.cancel()
        except (OSError, EOFError) as error:
            if not self._closed:
                why = f"no answer within {ANSWER_S:g} s" if overdue else repr(error)
                _log.error("the tokenizer's process failed: %s", why)
            self._end()
            raise Unavailable("The prompt could not be tokenized.", retry_after_s=1.0) from None
        if isinstance(answer, bytes):
            return answer
        if isinstance(answer, str):
            raise Internal(answer)
        message, field = answer
        raise InvalidArgument(message, field=field)

    def _start(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._connection, theirs = Pipe()
        with theirs:
            arguments = (sys.executable, "-m", __name__, str(self._model), str(theirs.fileno()))
            # Without our own input and output: others may wait for their end, even after we have gone.
            nothing, shared = subprocess.DEVNULL, (theirs.fileno(),)
            self._process = subprocess.Popen(arguments, stdin=nothing, stdout=nothing, pass_fds=shared, env=environment)

    def _end(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            self._connection.close()
            self._process = None


def serve(model: str, connection: Connection) -> None:
    """Answers requests until the connection ends. Raises :class:`EOFError` then."""
    card = load_card(model, strftime_now=strftime_now)
    while True:
        arguments = connection.recv()
        answer: Answer
        try:
            answer = tokenize(card, *arguments)
        except InvalidArgument as error:
            answer = error.message, error.field
        except Exception as error:  # the parent reports the failure
            answer = type(error).__name__
        connection.send(answer)


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # the parent is gone
        serve(sys.argv[1], Connection(int(sys.argv[2])))
