"""The block keys of one of vLLM's requests. Equal keys mean equal KV: that of the same tokens, images and adapter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from pinyon.core.block_keys import BlockKey, chain_block_keys, namespace, tokens_to_bytes, variant


class KeySpace:
    """The keys of one engine: they start from its weights, the layout of its KV, and the cluster's secret."""

    def __init__(self, fingerprint: str, layout_id: str, block_tokens: int, secret: bytes) -> None:
        self.fingerprint, self._layout_id, self._secret = fingerprint, layout_id, secret
        self.block_tokens = block_tokens

    def root(self, request: Any) -> BlockKey:
        """Returns where the request's chain starts: a load balancer's salt stands for the tenant."""
        root = namespace(self.fingerprint, self._layout_id, "", self._secret, request.cache_salt or "")
        adapter = request.lora_request
        return variant(root, "lora", f"{adapter.lora_name}\0{adapter.lora_path}") if adapter else root


class PromptKeys:
    """The keys of one request, which grow with it."""

    def __init__(self, space: KeySpace, request: Any) -> None:
        self._space = space
        self._request = request
        self._root = space.root(request)
        self.keys: list[BlockKey] = []

    def upto(self, blocks: int) -> list[BlockKey]:
        """Returns the keys of all blocks, of which at least ``blocks`` were wanted; fewer if tokens are not known."""
        have, size = len(self.keys), self._space.block_tokens
        if have < blocks:
            first = have * size
            tokens = tokens_to_bytes(self._request.all_token_ids[first : blocks * size])
            tokens = with_images(tokens, first, images_of(self._request))
            parent = self.keys[-1] if self.keys else self._root
            self.keys += chain_block_keys(parent, tokens, size)
        return self.keys


def images_of(request: Any) -> Iterable[tuple[str, int, int]]:
    """Yields the images (or sounds) of a request: what each is, the place of its first token, and their number."""
    for feature in request.mm_features or ():
        yield feature.identifier, feature.mm_position.offset, feature.mm_position.length


def with_images(tokens_le32: bytes, first: int, images: Iterable[tuple[str, int, int]]) -> bytes:
    """Returns the tokens from place ``first`` on, with those that stand for an image replaced by its digest.

    All images have the same placeholder, so that the tokens alone would not tell them apart."""
    tokens: np.ndarray[Any, Any] | None = None
    end = first + len(tokens_le32) // 4
    for identifier, offset, length in images:
        begin, stop = max(first, offset), min(end, offset + length)
        if begin < stop:
            if tokens is None:
                tokens = np.frombuffer(tokens_le32, "<u4").copy()
            digest = np.frombuffer(xxh3_128_digest(identifier.encode()), "<u4")
            tokens[begin - first : stop - first] = digest[(np.arange(begin, stop) - offset) % len(digest)]
    return tokens_le32 if tokens is None else tokens.tobytes()


def has_keys(request: Any) -> bool:
    """Returns whether tokens and images say all of the prompt: embeddings that a client sends do not."""
    return request.pooling_params is None and request.prompt_embeds is None and request.prompt_token_ids is not None


def shard_keys(keys: Sequence[BlockKey], rank: int, ranks: int) -> list[BlockKey]:
    """Returns the keys under which one of several ranks keeps its part of the blocks."""
    if ranks == 1:
        return list(keys)
    name = f"{rank}/{ranks}".encode("ascii")
    return [xxh3_128_digest(key + name)[:-1] + key[-1:] for key in keys]
