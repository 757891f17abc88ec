"""The logits after every token of a prompt, which no caller of an engine needs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pinyon.batching import PrefillChunk
from services.worker.engines.numpy_llama import NumpyLlamaEngine, _to_rows


def prompt_logits(engine: NumpyLlamaEngine, chunk: PrefillChunk) -> npt.NDArray[np.float32]:
    """Returns logits after every token of the chunk, ``(len(tokens), vocab)``. Writes its KV."""
    return engine._logits(_to_rows(engine._forward(engine._plan([chunk], [])))[: len(chunk.tokens)])
