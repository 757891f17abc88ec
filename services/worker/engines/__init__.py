"""Engines: what computes tokens. The worker knows :mod:`protocol` only; :func:`create_engine` picks one by name."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.errors import InvalidArgument
from pinyon.model.card import ModelCard
from pinyon.profiles.engine_profile import load_profile
from services.worker.engines.decode_plan import KERNEL_DEFAULT, KERNELS
from services.worker.engines.instant import InstantEngine
from services.worker.engines.numpy_llama import NumpyLlamaEngine
from services.worker.engines.paced import PacedEngine
from services.worker.engines.protocol import Engine, StepLogprobs, StepResult

__all__ = [
    "ENGINES",
    "KERNELS",
    "KERNEL_DEFAULT",
    "DecodeSlot",
    "Engine",
    "InstantEngine",
    "NumpyLlamaEngine",
    "PacedEngine",
    "PrefillChunk",
    "StepLogprobs",
    "StepResult",
    "create_engine",
]

ENGINES = ("numpy", "instant", "paced")


def create_engine(
    kind: str,
    card: ModelCard,
    num_blocks: int,
    block_tokens: int,
    pool: npt.NDArray[np.float32] | None = None,
    *,
    profile: str = "tiny",
    kernel: str = KERNEL_DEFAULT,
) -> Engine:
    """``kind`` is one of :data:`ENGINES`. ``pool``: see :class:`Engine`; allocated when None. ``profile``: what a paced
    engine imitates, see :func:`load_profile`. ``kernel``: who reads KV together in decode, one of :data:`KERNELS`;
    engines that read none do not heed it."""
    if kind == "numpy":
        return NumpyLlamaEngine.from_card(card, num_blocks, block_tokens, pool, kernel=kernel)
    if kind == "instant":
        return InstantEngine(card.config, num_blocks, block_tokens, pool)
    if kind == "paced":
        return PacedEngine(card.config, num_blocks, block_tokens, load_profile(profile), pool)
    raise InvalidArgument(f"engine must be one of {list(ENGINES)}, got {kind!r}", field="engine")
