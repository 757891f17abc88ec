"""The set-up of NumPy's BLAS: it must be single-threaded, and its arithmetic must treat every lane alike.

With several threads OpenBLAS may split one product differently from call to call; one thread per engine process also
keeps the other processes of the machine alive. Set ``OPENBLAS_NUM_THREADS=1`` before NumPy is imported if you can,
which saves the idle threads too; :func:`pin_blas_threads` does it afterwards by the library's own function."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pinyon.core.errors import FailedPrecondition

TILE = 16
"""The columns (lanes) of every matrix product, which a step computes side by side: tokens or query heads.

Not more: with 32, OpenBLAS's Haswell kernels give the middle 16 lanes other bits than the outer ones."""

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SUFFIXES = ("64_", "")
_PREFIXES = ("scipy_openblas", "openblas")


def pin_blas_threads() -> None:
    """Limits BLAS to one thread in this process.

    Raises :class:`FailedPrecondition` if neither the loaded OpenBLAS can be set nor the environment asks for one
    thread."""
    pinned = False
    for path in _loaded_openblas():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                setter = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                getter = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
                if setter is None or getter is None:
                    continue
                setter(1)
                pinned = pinned or getter() == 1
    if not pinned and not any(os.environ.get(name) == "1" for name in _THREAD_VARIABLES):
        raise FailedPrecondition(
            "the engine needs a single-threaded BLAS: set OPENBLAS_NUM_THREADS=1 before starting the process"
        )


def _loaded_openblas() -> list[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line and "/" in line}
    except OSError:
        return []
    return sorted(paths)


def check_lanes_alike(
    product: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]], depth: int, what: str
) -> None:
    """Checks that ``product``, which maps ``(depth, TILE)`` to ``(n, TILE)``, treats every lane alike.

    A lane's result must be bitwise the same in every lane of the tile and beside any others. Raises
    :class:`FailedPrecondition` if not."""
    rng = np.random.default_rng(depth)
    tile = rng.standard_normal((depth, TILE), dtype=np.float32)
    expected = product(tile)
    for _ in range(4):
        order = rng.permutation(TILE)
        if not same_bits(product(np.ascontiguousarray(tile[:, order])), expected[:, order]):
            raise _uneven(what)
    for lane in (0, TILE // 2, TILE - 1):
        alone = np.zeros_like(tile)
        alone[:, lane] = tile[:, 1]
        if not same_bits(product(alone)[:, lane], expected[:, 1]):
            raise _uneven(what)


def _uneven(what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"this machine's BLAS computes {what} with other bits depending on the lane; "
        "the engine cannot promise batch-invariant results with it"
    )


def same_bits(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Returns whether shapes and bytes are equal: -0.0 and 0.0 differ, equal NaNs do not."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()
