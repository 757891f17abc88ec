"""The preparation of prompts: from a client's text for one model to tokens, block keys and limits.

Short prompts are tokenized on the event loop (a few µs), and so are longer ones that the tokenizer mostly knows. Others
go to threads, and long texts for a tokenizer that keeps the GIL to a process, so that one long prompt does not hold up
the streams of others."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
from xxhash import xxh3_128_digest

from pinyon.core.block_keys import KEY_BYTES, BlockKey, chain_block_keys, variant
from pinyon.core.errors import InvalidArgument
from pinyon.core.logprobs import PROMPT_LOGPROBS_MAX
from pinyon.core.request import NO_LIMIT, RequestClass, SamplingParams
from pinyon.frontdoor.failures import unknown_model
from pinyon.frontdoor.instances.instances import ConductorCluster
from pinyon.frontdoor.instances.request import Request, Terms
from pinyon.frontdoor.instances.tokenizer_process import TokenizerProcess, tokenize
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.model import ByteTokenizer, HfTokenizer, IncrementalDetokenizer, ModelCard
from pinyon.model.tokenizer import MuchNew
from pinyon.openai.format import ContextExceeded
from pinyon.openai.parse import Call, PromptInput, Rendering
from pinyon.openai.token_texts import TokenTexts

INLINE_CHARS = 2048
NEW_CHARS = 2 * INLINE_CHARS
"""The unseen characters that a tokenizer which remembers texts may process on the event loop, in about 1 ms."""
THREAD_CHARS = 64 << 10
"""The characters, if all are unseen, that a tokenizer processes in about 5 ms."""
INLINE_BYTE_CHARS = 128 << 10
"""The size up to which texts are tokenized on the event loop where every byte is a token."""
INLINE_MESSAGES = 64
INLINE_TOKENS = 64 << 10
"""The number of tokens whose block keys are computed on the event loop, in about 1 ms."""
PROMPT_TOKENS_MAX = 768 * 1024
"""The longest prompt that, with its keys, still fits into one gRPC message of 4 MiB."""
PROMPTS_LOGPROBS_MAX = 4 * PROMPT_LOGPROBS_MAX
"""The limit for log-probabilities of all prompts and choices of a call, likeliest tokens included, as all are in memory
before the answer is written."""
DECODED_TOKENS = 1024
"""The number of tokens that are decoded at once: the tokenizer keeps the GIL for about 2 ms."""
COMPLETION_MAX_TOKENS = 16
"""The default of OpenAI's ``/v1/completions``."""
RUN_BLOCKS = 32
"""The number of blocks that are looked up together."""
RUNS_MAX = 8192
"""The default size of the cache, about 6 MiB."""


class KeyChains:
    """The block keys of prompts, with a cache of at most ``runs`` runs; the least recently used is evicted first.

    A system prompt or an earlier turn recurs with every request. A run of blocks that was seen before, after the same
    key, costs one hash here instead of one per block. The result equals that of
    :func:`pinyon.core.block_keys.chain_block_keys`, packed."""

    def __init__(self, runs: int = RUNS_MAX) -> None:
        self._limit = runs
        self._runs: OrderedDict[bytes, bytes] = OrderedDict()
        # A secret seed: with a known one, a client could make a prompt that is mistaken for another one.
        self._seed = int.from_bytes(os.urandom(8), "little")

    def __len__(self) -> int:
        return len(self._runs)

    def packed(self, start: BlockKey, tokens_le32: bytes, block_tokens: int) -> bytes:
        """Returns the 16-byte keys of all full blocks of ``tokens_le32`` (little-endian u32) in namespace ``start``."""
        step = 4 * block_tokens * RUN_BLOCKS
        runs, seed = self._runs, self._seed
        parts: list[bytes] = []
        key, position = start, 0
        for end in range(step, len(tokens_le32) + 1, step):
            run = tokens_le32[position:end]
            name = xxh3_128_digest(key + run, seed)
            found = runs.get(name)
            if found is None:
                found = b"".join(chain_block_keys(key, run, block_tokens))
                if len(runs) >= self._limit:
                    runs.popitem(last=False)
                runs[name] = found
            else:
                runs.move_to_end(name)
            parts.append(found)
            key, position = found[-KEY_BYTES:], end
        parts += chain_block_keys(key, tokens_le32[position:], block_tokens)
        return b"".join(parts)


class Prompts:
    """The factory that makes the requests of a :class:`Call` for the card's model. ``close`` ends its process."""

    def __init__(
        self,
        card: ModelCard,
        cluster: ConductorCluster,
        off_loop: OffLoop,
        chains: KeyChains,
        chat_max_tokens: int,
        chars_per_token_max: int,
    ) -> None:
        self._card = card
        self._cluster = cluster
        self._chat_max_tokens = chat_max_tokens
        self._chars_per_token_max = chars_per_token_max
        self.model = card.name
        self.tokenizer = tokenizer = card.tokenizer
        self._inline_chars = INLINE_BYTE_CHARS if isinstance(tokenizer, ByteTokenizer) else INLINE_CHARS
        remembers = isinstance(tokenizer, HfTokenizer) and tokenizer.remembers
        self._looked_at_chars = THREAD_CHARS if remembers else 0
        """The size up to which longer prompts are tried on the event loop, as the tokenizer may know most of them."""
        self._process = None if card.path is None else TokenizerProcess(card.path)
        self._off_loop = off_loop
        self._chains = chains
        self.texts = TokenTexts(tokenizer)

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    def max_context(self) -> int:
        """Returns the most tokens of prompt plus generation: the instances' limit, or the model's if none is known."""
        known = self._cluster.model(self.model)
        limit = (known.max_context if known is not None else 0) or self._card.config.max_context
        return min(limit, PROMPT_TOKENS_MAX)

    async def requests(
        self,
        call: Call,
        request_id: str,
        request_class: RequestClass,
        terms: Terms,
        *,
        holder: str = "",
        numbered: bool = False,
    ) -> list[Request]:
        """Returns the requests of all choices: ``n`` for the first prompt, ``n`` for the second, and so on.

        The choices of one prompt have consecutive seeds, starting with the call's. If they are ``numbered``, their
        numbers are part of their ids. ``holder`` names the client that places are counted against (empty: none). Raises
        :class:`InvalidArgument` naming the field of the call, and :class:`Unavailable`."""
        rendering = self._checked(call.rendering, holder, request_class.cache_salt)
        call.sampling.check_tokens(self._card.config.vocab_size)
        context = self.max_context()
        prompts = (call.prompt, *call.others)
        # many short prompts of one call must not hold up the event loop either
        inline = not call.others or sum(map(_size, prompts)) <= self._inline_chars
        all_tokens, total = [], 0
        for prompt in prompts:
            tokens = await self._tokens(prompt, call.prompt_field, rendering, context, holder, inline=inline)
            total += self._count(call, tokens, context)
            if total > PROMPT_TOKENS_MAX:
                raise InvalidArgument(
                    f"The prompts of one call have more than {PROMPT_TOKENS_MAX} tokens.", field=call.prompt_field
                )
            all_tokens.append(tokens)
        top = call.sampling.logprobs
        entries = call.n * total * (1 + top)
        if call.sampling.prompt_logprobs and entries > PROMPTS_LOGPROBS_MAX:
            raise InvalidArgument(
                f"{call.n} choices for each of these prompts, with {top} likeliest tokens beside each token, "
                f"have {entries} log-probabilities, at most {PROMPTS_LOGPROBS_MAX} are allowed in one call.",
                field="logprobs",
            )
        requests: list[Request] = []
        for tokens in all_tokens:
            count, seed = len(tokens) // 4, _seed(call)
            settled = [self._sampling(call, count, context, (seed + each) % (1 << 64)) for each in range(call.n)]
            keys = await self._keys(call.model, request_class, tokens, holder, inline=total <= INLINE_TOKENS)
            for sampling in settled:
                name = f"{request_id}-{len(requests)}" if numbered else request_id
                requests.append(Request(name, call.model, request_class, tokens, keys, sampling, terms))
        return requests

    async def given(
        self, prompt: PromptInput, rendering: Rendering, salt: str, adapter: str, holder: str
    ) -> tuple[bytes, bytes]:
        """Returns the tokens and packed block keys of a prompt that another engine renders. The keys are those of the
        ``salt`` that the engine gets, and of the ``adapter``, if one is named. Raises as :meth:`requests`."""
        tokens = await self.tokenize(prompt, "prompt", rendering, holder, salt)
        inline = len(tokens) <= 4 * INLINE_TOKENS
        whose = RequestClass(cache_salt=salt)
        return tokens, await self._keys(self.model, whose, tokens, holder, inline=inline, adapter=adapter)

    async def tokenize(
        self, prompt: PromptInput, prompt_field: str, rendering: Rendering, holder: str = "", salt: str = ""
    ) -> bytes:
        """Returns a prompt's tokens (little-endian u32), which may exceed the context. Raises as :meth:`requests`."""
        rendering = self._checked(rendering, holder, salt)
        return await self._tokens(prompt, prompt_field, rendering, self.max_context(), holder)

    async def decode(self, tokens: bytes, field: str, holder: str = "", *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens. Raises :class:`InvalidArgument` naming ``field`` if a token is outside the
        vocabulary, or there are more than a tokenized text may have."""
        limit = min(self.max_context() * self._chars_per_token_max, PROMPT_TOKENS_MAX)
        if len(tokens) > 4 * limit:
            count = len(tokens) // 4
            raise InvalidArgument(f"{field} has {count} token ids, at most {limit} are allowed.", field=field)
        self._check_tokens(tokens, field)
        large = len(tokens) > 4 * INLINE_CHARS
        return await self._off_loop.run_large(large, holder, self._decode, tokens, skip_special_tokens)

    def _decode(self, tokens: bytes, skip_special_tokens: bool) -> str:
        """Returns the text of tokens, decoding pieces so that other threads get the GIL in between."""
        ids = np.frombuffer(tokens, "<u4")
        detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens)
        starts = range(0, len(ids), DECODED_TOKENS)
        texts = [detokenizer.push(ids[start : start + DECODED_TOKENS].tolist()) for start in starts]
        return "".join(texts) + detokenizer.flush()

    def _checked(self, rendering: Rendering, holder: str, salt: str = "") -> Rendering:
        """Returns the rendering with an owner: what is remembered of a text is for those who share its KV."""
        if rendering.variables is not None and not rendering.as_given:
            self._card.chat_template.check_variables(rendering.variables)
        if not self._looked_at_chars or not (holder or salt):
            return rendering
        return rendering._replace(whose=f"{len(holder)}:{holder}{salt}")

    @staticmethod
    def _count(call: Call, tokens: bytes, context: int) -> int:
        count = len(tokens) // 4
        if not count:
            raise InvalidArgument(f"{call.prompt_field} must not be empty.", field=call.prompt_field)
        if count >= context:
            raise ContextExceeded(
                f"This model's maximum context length is {context} tokens, answer included, and there are {count} in "
                f"the {call.prompt_field}. Shorten the {call.prompt_field}.",
                field=call.prompt_field,
            )
        return count

    def _sampling(self, call: Call, count: int, context: int, seed: int) -> SamplingParams:
        wanted = call.sampling.max_tokens
        if wanted == NO_LIMIT:
            default = self._chat_max_tokens if call.prompt_field == "messages" else COMPLETION_MAX_TOKENS
            wanted = min(default, context - count)
        elif count + wanted > context:
            raise ContextExceeded(
                f"This model's maximum context length is {context} tokens. You asked for {count + wanted} "
                f"({count} in the {call.prompt_field}, {wanted} for the completion). Shorten the "
                f"{call.prompt_field}, or ask for at most {context - count}.",
                field="max_tokens",
            )
        return call.sampling.settled(wanted, seed)

    async def keys_of(self, request_class: RequestClass, tokens: bytes, holder: str = "") -> bytes:
        """Returns a prompt's packed block keys in the region's own layout; empty while that is unknown. Raises
        :class:`InvalidArgument` for tokens outside the model's vocabulary."""
        self._check_tokens(tokens, "prompt")
        return await self._keys(self.model, request_class, tokens, holder)

    async def _keys(
        self,
        model: str,
        request_class: RequestClass,
        tokens: bytes,
        holder: str,
        *,
        inline: bool = True,
        adapter: str = "",
    ) -> bytes:
        start = self._cluster.namespace(model, request_class.tenant, request_class.cache_salt)
        known = self._cluster.model(model)
        if start is None or known is None:
            return b""  # the layout is not known yet, so the worker computes them
        root = variant(start, "lora", adapter) if adapter else start
        block_tokens = known.layout.block_tokens
        if not inline or len(tokens) > 4 * INLINE_TOKENS:
            return await self._off_loop.run(holder, lambda: b"".join(chain_block_keys(root, tokens, block_tokens)))
        return self._chains.packed(root, tokens, block_tokens)

    async def _tokens(
        self, prompt: PromptInput, field: str, rendering: Rendering, context: int, holder: str, *, inline: bool = True
    ) -> bytes:
        if type(prompt) is bytes:
            self._check_tokens(prompt, field)
            return prompt
        chars = _json_size(prompt) if rendering.as_given else _size(prompt)
        if chars > context * self._chars_per_token_max:
            raise ContextExceeded(
                f"This model's maximum context length is {context} tokens, and there are {chars} characters in the "
                f"{field}. Shorten the {field}.",
                field=field,
            )
        if type(prompt) is not str and rendering.variables is not None:
            chars += _json_size(rendering.variables)  # the template may write them
        try:
            if inline and (type(prompt) is str or len(prompt) <= INLINE_MESSAGES):
                if chars <= self._inline_chars:
                    return tokenize(self._card, prompt, rendering)
                if chars <= self._looked_at_chars:
                    with suppress(MuchNew):
                        return tokenize(self._card, prompt, rendering, NEW_CHARS)
            if chars > THREAD_CHARS and self._process is not None:
                return await self._process.tokenize(holder, prompt, rendering)
            return await self._off_loop.run(holder, tokenize, self._card, prompt, rendering)
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field=field) from None

    def _check_tokens(self, tokens: bytes, field: str) -> None:
        vocab_size = self._card.config.vocab_size
        if tokens and int(np.frombuffer(tokens, "<u4").max()) >= vocab_size:
            raise InvalidArgument(f"{field} holds a token id outside the vocabulary of {vocab_size}.", field=field)


def prompts_of(served: Mapping[str, Prompts], name: str | None) -> Prompts:
    """Returns the one for the model of that name, or the first one, which is the default. Raises :class:`NotFound`."""
    found = next(iter(served.values())) if name is None else served.get(name)
    if found is None:
        assert name is not None
        raise unknown_model(name, served)
    return found


def _seed(call: Call) -> int:
    if call.seeded:
        return call.sampling.seed
    return int.from_bytes(os.urandom(8), "little") if call.sampling.temperature else 0


def _size(prompt: PromptInput) -> int:
    """Returns the characters of a prompt, or the bytes of tokens. The template reports malformed conversations."""
    if isinstance(prompt, str | bytes):
        return len(prompt)
    total = 0
    for message in prompt:
        content, name = message.get("content"), message.get("name")
        total += len(name) if type(name) is str else 0
        if type(content) is str:
            total += len(content)
        elif type(content) is list:
            total += sum(len(part["text"]) for part in content
                         if type(part) is dict and type(part.get("text")) is str)  # fmt: skip
    return total


def _json_size(value: object) -> int:
    """Returns about how many characters a value has as JSON."""
    if type(value) is str:
        return len(value)
    if type(value) is dict:
        return sum(len(name) + _json_size(item) for name, item in value.items())
    return sum(map(_json_size, value)) if type(value) is list else 8
