"""Engines, which compute tokens. The worker knows :mod:`protocol` only; :func:`create_engine` picks one by name."""

from __future__ import annotations

from pinyon.core.errors import InvalidArgument
from pinyon.model.card import ModelCard
from pinyon.profiles.engine_profile import load_profile
from services.worker.engines.decode_plan import KERNEL_DEFAULT
from services.worker.engines.instant import InstantEngine
from services.worker.engines.numpy_llama import NumpyLlamaEngine
from services.worker.engines.paced import PacedEngine
from services.worker.engines.protocol import Engine
from services.worker.engines.weights import load_weights

ENGINES = ("numpy", "instant", "paced")


def create_engine(
    kind: str,
    card: ModelCard,
    num_blocks: int,
    block_tokens: int,
    *,
    profile: str = "tiny",
    kernel: str = KERNEL_DEFAULT,
) -> Engine:
    """Returns the engine of a ``kind`` of :data:`ENGINES`.

    A paced engine imitates ``profile``, see :func:`load_profile`. The requests that read KV together in decode are
    chosen by ``kernel``, see :data:`KERNEL_DEFAULT`; engines that read no KV ignore it. Raises :class:`InvalidArgument`
    that names what is wrong with the checkpoint."""
    if kind == "numpy":
        return NumpyLlamaEngine(card.config, load_weights(card), num_blocks, block_tokens, kernel=kernel)
    if kind == "instant":
        return InstantEngine(card.config, num_blocks, block_tokens)
    if kind == "paced":
        return PacedEngine(card.config, num_blocks, block_tokens, load_profile(profile))
    raise InvalidArgument(f"engine must be one of {list(ENGINES)}, got {kind!r}", field="engine")
