"""The buffers that can be registered, and how long they are held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pinyon.transfer import InvalidTransfer, TransferError
from pinyon.transfer.memory.buffers import DRIVERS
from pinyon.transfer.memory.device import DeviceError
from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.memory.table import MemoryTable
from tests.unit.transfer.fake_device import DEVICE_TYPE, Tensor, fake_device


class OnlyDlpack:
    """An array without the buffer protocol, like most libraries' tensors."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **arguments: object) -> object:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


@contextmanager
def registered(buffer: object, location: str | None = None) -> Iterator[Region]:
    table = MemoryTable()
    region = table.register(buffer, location, Access.READ_WRITE)
    yield region
    table.unregister(region, 0.0)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(100, np.uint8),
        np.zeros((3, 5, 7), np.float32),
        np.zeros((4, 1, 6), np.float16)[:, :, :],
        np.zeros(9, np.complex64),
        np.zeros((), np.int64),
        np.zeros(5, bool),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
@pytest.mark.parametrize("wrap", [lambda array: array, OnlyDlpack], ids=["buffer", "dlpack"])
def test_arrays_are_registered_as_they_lie(array, wrap) -> None:
    with registered(wrap(array)) as region:
        assert (region.length, region.address, region.location) == (array.nbytes, array.ctypes.data, "cpu:0")
        assert region.device is None
        region.view[:] = bytes(range(1, array.nbytes + 1)) if array.nbytes < 255 else b"\1" * array.nbytes
        region.array[-1] = 1
        assert array.tobytes() == region.view.tobytes()


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("device_type", [1, 3, 11])
def test_capsules_are_read_to_the_letter(versioned: bool, device_type: int) -> None:
    memory = bytearray(1000)
    tensor = Tensor.over(
        memory, (2, 1, 5), device=(device_type, 0), versioned=versioned, byte_offset=24, bits=32, strides=(5, 77, 1)
    )
    with registered(tensor) as region:
        region.view[:] = b"x" * 40
        assert memory == bytes(24) + b"x" * 40 + bytes(1000 - 64)
        assert (tensor.exported, tensor.deleted, tensor.streams) == (1, 0, [None])
    assert tensor.deleted == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"flags": 1}, "read-only"),
        ({"flags": 2}, "copied"),
        ({"major": 2}, "version 2"),
        ({"shape": (0,)}, "empty"),
        ({"shape": (2, -3)}, "negative"),
        ({"shape": (1 << 40, 1 << 40)}, "larger"),
        ({"shape": (4, 4), "strides": (8, 1)}, "contiguous"),
        ({"shape": (4, 4), "strides": (1, 4)}, "contiguous"),
        ({"shape": (4,), "strides": (-1,)}, "contiguous"),
        ({"bits": 4}, "4 bits"),
        ({"bits": 0}, "0 bits"),
        ({"ndim": 65}, "65 dimensions"),
        ({"ndim": -1}, "-1 dimensions"),
        ({"byte_offset": (1 << 64) - 1}, "pointer"),
        ({"device": (7, 0)}, "no driver"),
        ({"device": (DEVICE_TYPE, 0)}, "not the fake device's"),
    ],
)
def test_tensors_that_make_no_sense_are_refused_and_freed(arguments, words) -> None:
    memory = bytearray(64)
    tensor = Tensor.over(memory, **arguments)
    with fake_device(), pytest.raises(InvalidTransfer, match=words) as caught:
        MemoryTable().register(tensor, None, Access.READ)
    assert caught.value.field == "buffer"
    del caught
    gc.collect()
    assert (tensor.exported, tensor.deleted) == (1, 1)


def test_what_cannot_be_exported_says_why() -> None:
    class Broken(Tensor):
        def __dlpack__(self, stream: object = None, **arguments: object) -> object:
            raise BufferError("it requires a gradient")

    class Used(Tensor):
        def __dlpack__(self, stream: object = None, **arguments: object) -> object:
            return "no capsule"

    for kind, words in ((Broken, "gradient"), (Used, "capsule")):
        with pytest.raises(InvalidTransfer, match=words):
            MemoryTable().register(kind.over(bytearray(8)), None, Access.READ)
    frozen = np.zeros(8)
    frozen.setflags(write=False)
    for nothing in (7, "text", b"read-only", bytearray(), frozen, OnlyDlpack(frozen), np.zeros((4, 4))[:, 1], None):
        with pytest.raises(InvalidTransfer) as caught:
            MemoryTable().register(nothing, None, Access.READ)
        assert caught.value.field == "buffer"


def test_a_consumed_capsule_is_not_consumed_again() -> None:
    tensor = Tensor.over(bytearray(8))
    capsules = [tensor.__dlpack__()]

    class Twice(Tensor):
        def __dlpack__(self, stream: object = None, **arguments: object) -> object:
            return capsules[0]

    table = MemoryTable()
    region = table.register(Twice.over(bytearray(8)), None, Access.READ)
    with pytest.raises(InvalidTransfer, match="unused"):
        table.register(Twice.over(bytearray(8)), None, Access.READ)
    capsules.clear()
    table.unregister(region, 0.0)
    assert tensor.deleted == 1


def test_a_capsule_without_deleter() -> None:
    with registered(Tensor.over(bytearray(8), has_deleter=False)) as region:
        assert region.length == 8


def test_a_tensor_lives_until_its_region_is_unregistered() -> None:
    table = MemoryTable()
    array = np.zeros(100)
    gone = weakref.ref(array)
    region = table.register(OnlyDlpack(array), None, Access.READ)
    del array
    gc.collect()
    assert gone() is not None
    part = region.view[10:20]
    table.unregister(region, 0.0)
    assert gone() is not None  # the memory is still in use
    del part
    assert gone() is None
    table.unregister(region, 0.0)
    assert not hasattr(region, "view")


def test_a_collected_region_frees_its_tensor() -> None:
    tensor = Tensor.over(bytearray(8))
    table = MemoryTable()
    table.register(tensor, None, Access.READ)
    del table
    gc.collect()
    assert tensor.deleted == 1


def test_unregistering_lets_a_bytearray_grow_again() -> None:
    memory = bytearray(8)
    with registered(memory), pytest.raises(BufferError):
        memory.append(1)
    memory.append(1)


def test_device_memory_is_a_region_without_a_view() -> None:
    with fake_device() as driver:
        memory = bytearray(b"d" * 100)
        tensor = Tensor(driver.allocate(memory), (90,), device=(DEVICE_TYPE, 0), byte_offset=10)
        with registered(tensor) as region:
            assert (region.length, region.location) == (90, "fake:0")
            assert region.address == tensor.data + 10
            assert tensor.streams == [-1]
            for name in ("view", "array"):
                with pytest.raises(TransferError, match="fake:0"):
                    getattr(region, name)
            with pytest.raises(AttributeError):
                _ = region.nothing
            assert "fake:0" in repr(region)
            assert region.device is not None
            taken = bytearray(90)
            region.device.copy_out(0, memoryview(taken))
            assert taken == memory[10:]
            assert tensor.deleted == 0
        assert tensor.deleted == 1
        with registered(driver.tensor(memory), "rack:7") as region:
            assert region.location == "rack:7"
        tensor = driver.tensor(memory)
        with pytest.raises(InvalidTransfer) as caught:
            MemoryTable().register(tensor, "cpu:0", Access.READ)
        assert caught.value.field == "location"


def test_a_gpu_without_its_driver_is_refused_with_the_reason() -> None:
    """The address is refused instead on a machine with the driver."""
    tensor = Tensor.over(bytearray(64), device=(2, 99))
    with pytest.raises(InvalidTransfer, match=r"CUDA driver cannot be loaded|cu[A-Z]|address") as caught:
        MemoryTable().register(tensor, None, Access.READ)
    assert caught.value.field == "buffer"
    del caught
    gc.collect()
    assert tensor.deleted == 1
    assert DRIVERS[2].name == "cuda"
    with pytest.raises(DeviceError):
        DRIVERS[2].pin(memoryview(bytearray(8)))
