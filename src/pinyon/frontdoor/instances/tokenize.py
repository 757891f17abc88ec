"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pinyon.frontdoor.admission import TenantAdmission
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.instances.prompts import Prompts, prompts_of
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.http.answer import JSON, Reply
from pinyon.openai.large import is_large
from pinyon.openai.parse import parse_detokenize, parse_tokenize

PIECE_TOKENS = 4096
"""The tokens that are written at once, in less than 1 ms."""
PIECE_CHARS = 64 << 10


@dataclass(slots=True, eq=False)
class Tokenization:
    """The handlers of both routes. They take no place in the queue, but each request counts in its tenant's limit per
    minute. Long work runs beside the event loop, where places are limited."""

    admission: TenantAdmission
    models: Mapping[str, Prompts]
    off_loop: OffLoop

    async def tokenize(self, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Returns the status. Raises :class:`PinyonError`."""
        self.admission.count(head.client)
        holder = head.client.holder
        call = await self.off_loop.run_large(is_large(body), holder, parse_tokenize, body)
        prompts = prompts_of(self.models, call.model)
        tokens = await prompts.tokenize(call.prompt, call.prompt_field, call.rendering, holder)
        arguments = (prompts, tokens, call.strings)
        answer = await self.off_loop.run_large(len(tokens) // 4 > PIECE_TOKENS, holder, self._answer, *arguments)
        reply.whole(200, answer, JSON)
        return 200

    def _answer(self, prompts: Prompts, tokens: bytes, strings: bool) -> bytes:
        ids = np.frombuffer(tokens, "<u4")
        # in pieces, so that other threads get the GIL in between
        pieces = [ids[at : at + PIECE_TOKENS].tolist() for at in range(0, len(ids), PIECE_TOKENS)]
        numbers = ",".join([",".join(map(str, piece)) for piece in pieces])
        texts = "null"
        if strings:
            texts = "[" + ",".join([json.dumps(prompts.texts.pieces(piece))[1:-1] for piece in pieces]) + "]"
        return (
            f'{{"count":{len(ids)},"max_model_len":{prompts.max_context()},"tokens":[{numbers}],"token_strs":{texts}}}'
        ).encode("ascii")

    async def detokenize(self, head: Head, body: bytes | bytearray, reply: Reply) -> int:
        """Returns the status. Raises :class:`PinyonError`."""
        self.admission.count(head.client)
        holder = head.client.holder
        model, tokens = await self.off_loop.run_large(is_large(body), holder, parse_detokenize, body)
        text = await prompts_of(self.models, model).decode(tokens, "tokens", holder, skip_special_tokens=False)
        answer = await self.off_loop.run_large(len(text) > PIECE_CHARS, holder, _detokenized, text)
        reply.whole(200, answer, JSON)
        return 200


def _detokenized(text: str) -> bytes:
    pieces = [json.dumps(text[start : start + PIECE_CHARS])[1:-1] for start in range(0, len(text), PIECE_CHARS)]
    return f'{{"prompt":"{"".join(pieces)}"}}'.encode("ascii")
