"""The files of a checkpoint folder. A faulty file raises :class:`InvalidArgument`, which names the file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pinyon.core.errors import InvalidArgument

JSON_BYTES_MAX = 256 << 20
HEADER_BYTES_MAX = 100 << 20
FILES_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a safetensors file: its ``size`` bytes begin at byte ``start`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint in name order: those of the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json_object(index, read_bytes(index)).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise InvalidArgument(f"{index.name}: weight_map must map tensor names to file names", field="model")
        names = sorted(set(weight_map.values()))
        for file_name in names:
            # Only names of files beside the index are allowed; a path could point anywhere.
            if Path(file_name).name != file_name:
                raise InvalidArgument(f"{index.name}: {file_name!r} is not a plain file name", field="model")
        files = [folder / file_name for file_name in names]
    else:
        files = [folder / "model.safetensors"]
        if not files[0].is_file():
            files = sorted(folder.glob("*.safetensors"))
    if not files or len(files) > FILES_MAX:
        raise InvalidArgument(f"{folder.name}: {len(files)} safetensors files found", field="model")
    for file in files:
        if not file.is_file():
            raise InvalidArgument(f"{folder.name}: {file.name} is missing", field="model")
    return files


def read_header(file: Path) -> tuple[bytes, dict[str, Tensor]]:
    """Returns a safetensors file's header, as it stands in the file, and its tensors by name, none beyond the file.

    The format is that of huggingface/safetensors' README."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(HEADER_BYTES_MAX, size - 8):
                raise InvalidArgument(f"{file.name}: not a safetensors file, or truncated", field="model")
            header = stream.read(length)
    except OSError as error:
        raise InvalidArgument(f"{file.name} cannot be read: {error.strerror}", field="model") from None
    tensors = {}
    for name, entry in json_object(file, header).items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
                0 <= begin <= end <= size - 8 - length and all(type(n) is int and n >= 0 for n in shape)
            ):
                tensors[name] = Tensor(dtype, tuple(shape), 8 + length + begin, end - begin)
            case _:
                raise InvalidArgument(
                    f"{file.name}: malformed header, or truncated: tensor {name[:200]}", field="model"
                )
    return prefix + header, tensors


def read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise InvalidArgument(f"{path.parent.name}: {path.name} is missing", field="model")
    if path.stat().st_size > JSON_BYTES_MAX:
        raise InvalidArgument(f"{path.name} is larger than {JSON_BYTES_MAX} bytes", field="model")
    return path.read_bytes()


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path.name} is not UTF-8: {error}", field="model") from error


def json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path.name} is not valid JSON: {error}", field="model") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path.name} must hold a JSON object", field="model")
    return value
