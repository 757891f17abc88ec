"""Memory of an engine with a tensor for each layer, without tensors."""

from __future__ import annotations

import numpy as np

from pinyon.store.kv_memory import KvMemory, LayerMemory
from pinyon.transfer import Access, TransferEngine

LAYERS, BLOCKS, LENGTH = 3, 8, 256


class LayeredMemory:
    """The memory of :class:`pinyon.vllm.memory.EngineMemory`: ``regions`` storages, which the layers share."""

    cuda = False

    def __init__(self, engine: TransferEngine, regions: int = 1, pad: int = 0) -> None:
        stride = LENGTH + pad
        self.buffers = [bytearray(LAYERS * BLOCKS * stride) for _ in range(regions)]
        self.regions = [engine.register_local_memory(each, access=Access.NONE) for each in self.buffers]
        self.places = [
            (layer % regions, LayerMemory(self.regions[layer % regions], layer * BLOCKS * stride, stride, LENGTH))
            for layer in range(LAYERS)
        ]
        self.kv = KvMemory([place for _, place in self.places])
        self.blocks = BLOCKS

    def fence(self) -> None:
        return None

    def write(self, block: int, seed: int) -> bytes:
        content = np.random.default_rng(seed).bytes(LAYERS * LENGTH)
        for layer, (number, place) in enumerate(self.places):
            at = place.base + block * place.stride
            self.buffers[number][at : at + LENGTH] = content[layer * LENGTH : (layer + 1) * LENGTH]
        return content

    def read(self, block: int) -> bytes:
        return b"".join(
            bytes(self.buffers[number][place.base + block * place.stride :][:LENGTH]) for number, place in self.places
        )
