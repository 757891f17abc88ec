"""Files that settings name."""

from __future__ import annotations

from pathlib import Path

from pinyon.core.errors import InvalidArgument


def read_file(path: Path | str, bytes_max: int, field: str) -> bytes:
    """Returns a file's content. Raises :class:`InvalidArgument` naming the field if it cannot be read, or is larger."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field=field) from None
    if len(content) > bytes_max:
        raise InvalidArgument(f"{path} is larger than {bytes_max} bytes", field=field)
    return content
