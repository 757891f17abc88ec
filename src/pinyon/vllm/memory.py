"""vLLM's KV memory: its tensors as registered ranges, and the name of the way in which its kernels pack them.

To pinyon a layer of a block is one opaque range, K and V together. On a GPU nothing is copied before the step that
computes it has ended; the transfer engine goes through pinned host memory where no NIC reaches the GPU's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.store.kv_memory import KvMemory, LayerMemory
from pinyon.transfer import Access, Region, TransferEngine

Fence = Callable[[], None]
"""Waits until what the device had been told to compute is computed; in any thread."""


class EngineMemory:
    """The registered tensors of one rank."""

    def __init__(
        self, engine: TransferEngine, tensors: Mapping[str, Any], spec: Any, num_blocks: int, version: str
    ) -> None:
        """Registers each storage once. Raises :class:`InvalidArgument` for tensors that are not understood."""
        import torch

        self.regions: list[Region] = []
        """The registered storages."""
        self.places: list[tuple[int, LayerMemory]] = []
        """All layers, each with the number of its region."""
        known: dict[int, int] = {}
        first = next(iter(tensors.values()))
        if first.device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"KV in memory of {first.device.type} is not supported")
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                known[storage.data_ptr()] = len(self.regions)
                self.regions.append(engine.register_local_memory(whole, access=Access.NONE))
            number = known[storage.data_ptr()]
            # K and V lie together, or each in a plane of its own
            planes = [tensor] if tensor.shape[0] % num_blocks == 0 else list(tensor)
            for plane in planes:
                self.places.append((number, _layer(name, plane, num_blocks, self.regions[number])))
        self.kv = KvMemory([layer for _, layer in self.places])
        self.blocks = num_blocks
        self.cuda = first.device.type == "cuda"
        self.layout = KvLayout(
            layers=len(tensors),
            kv_heads=int(getattr(spec, "num_kv_heads", 1)),
            head_dim=int(getattr(spec, "head_size", 1)),
            block_tokens=spec.block_size,
            dtype=str(first.dtype).removeprefix("torch."),
            packing=packing_of(first, version),
            packed_bytes=self.kv.object_bytes // len(tensors),
        )
        if self.layout.block_bytes != self.kv.object_bytes:
            raise InvalidArgument("layers of different sizes are not supported")

    def fence(self) -> Fence | None:
        """Returns what waits for the steps that were launched until now; None if they have ended already."""
        if not self.cuda:
            return None
        import torch

        event = torch.cuda.Event()
        event.record()
        wait: Fence = event.synchronize
        return wait


def _layer(name: str, tensor: Any, num_blocks: int, region: Region) -> LayerMemory:
    """Returns where the blocks of one plane lie. A kernel's blocks may be parts of vLLM's."""
    parts, rest = divmod(tensor.shape[0], num_blocks)
    item = tensor.element_size()
    part, stride = tensor[0].numel() * item, tensor.stride(0) * item
    if rest or not parts or not tensor[0].is_contiguous() or stride < part or (parts > 1 and stride != part):
        raise InvalidArgument(
            f"the KV of {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} for {num_blocks} blocks: "
            "pinyon needs each block of a layer in one range (try another attention backend or VLLM_KV_CACHE_LAYOUT)"
        )
    return LayerMemory(region, tensor.storage_offset() * item, stride * parts, part * parts)


async def passed(fence: Fence | None) -> None:
    if fence is not None:
        await asyncio.get_running_loop().run_in_executor(None, fence)


def packing_of(tensor: Any, version: str) -> str:
    """Returns what must be equal for two engines to read each other's blocks: vLLM's minor version, the device's
    kernels, and the shape and order of a block."""
    kernels = tensor.device.type
    if kernels == "cuda":
        import torch

        kernels += ".".join(map(str, torch.cuda.get_device_capability(tensor.device)))
    elif kernels == "cpu":
        kernels += f":{_cpu_kernels(tensor)}"
    shape = "x".join(map(str, tensor.shape[1:]))
    strides = "x".join(map(str, tensor.stride()[1:]))
    return f"vllm{'.'.join(version.split('.')[:2])}:{kernels}:{shape}:{strides}"


def _cpu_kernels(tensor: Any) -> str:
    """Returns the instruction set that vLLM's kernels pack for."""
    import torch

    capability = str(torch.backends.cpu.get_cpu_capability())
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return f"{capability}.{_get_attn_isa(tensor.dtype, tensor.shape[-2], tensor.shape[-1] // 2)}"
    except Exception:  # another version of vLLM has another name for it
        return capability
