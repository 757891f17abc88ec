"""The generator of ``pinyon.api`` from ``protos/``.

``./dev protos`` writes into ``src``; ``--out DIR`` writes elsewhere (the drift test compares the two)."""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def generate(out: Path) -> list[Path]:
    """Writes ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` below ``out`` and returns their paths."""
    from grpc_tools import protoc

    sources = sorted(PROTOS.rglob("*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *(str(source) for source in sources),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    written: list[Path] = []
    for source in sources:
        base = out / source.relative_to(PROTOS).with_suffix("")
        for ending in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
            path = base.with_name(base.name + ending)
            if ending == "_pb2_grpc.py" and "service " not in source.read_text():
                path.unlink(missing_ok=True)  # nothing in it
                continue
            written.append(path)
        for folder in base.parents:
            if folder == out:
                break
            if folder != out / "pinyon":
                (folder / "__init__.py").touch()
    return written


def main() -> None:
    parser = argparse.ArgumentParser("./dev protos", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "src")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in generate(arguments.out):
        print(path.relative_to(arguments.out), file=sys.stderr)


if __name__ == "__main__":
    main()
