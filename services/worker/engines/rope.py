"""Rotary position embeddings, in the half-split form that Hugging Face checkpoints use."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pinyon.model.config import ModelConfig

_F32 = npt.NDArray[np.float32]


class RopeTable:
    """The cosines and sines of positions ``[0, positions)``."""

    def __init__(self, config: ModelConfig, positions: int) -> None:
        frequencies = _frequencies(config)
        # In float32 like the reference implementation, whose angles carry float32's rounding, too.
        angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
        self._cos: _F32 = np.cos(angles)
        self._sin: _F32 = np.sin(angles)

    def at(self, positions: npt.NDArray[np.int64]) -> tuple[_F32, _F32]:
        """Maps positions ``(tiles, lanes)`` to cosines and sines, ``(tiles, 1, head_dim // 2, lanes)`` each."""
        cos = np.ascontiguousarray(self._cos[positions].transpose(0, 2, 1))
        sin = np.ascontiguousarray(self._sin[positions].transpose(0, 2, 1))
        return cos[:, None], sin[:, None]


def rotate(x: _F32, turn: tuple[_F32, _F32]) -> None:
    """Rotates ``x``, ``(tiles, heads, head_dim, lanes)``, in place by the result of :meth:`RopeTable.at`."""
    cos, sin = turn
    half = x.shape[2] // 2
    low, high = x[:, :, :half], x[:, :, half:]
    rotated_low = low * cos
    rotated_low -= high * sin
    high *= cos
    high += low * sin
    low[...] = rotated_low


def _frequencies(config: ModelConfig) -> _F32:
    dim = config.head_dim
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    base: _F32 = (1.0 / np.power(np.float64(config.rope_theta), exponent.astype(np.float64))).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return base
    if scaling.kind == "linear":
        return (base / np.float32(scaling.factor)).astype(np.float32)
    # Llama 3.1: long waves are stretched, short ones kept, the band between is blended.
    wavelength = 2.0 * math.pi / base.astype(np.float64)
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1.0 - smooth) * base / scaling.factor + smooth * base).astype(np.float32)
