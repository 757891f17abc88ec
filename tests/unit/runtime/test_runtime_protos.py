"""The committed generated code matches the protos, and the protos keep their own rules."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def test_generated_code_has_not_drifted(tmp_path, monkeypatch):
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import gen_protos

    written = gen_protos.generate(tmp_path)
    sys.modules.pop("gen_protos", None)
    assert len(written) >= 3 * len(PROTOS) - 1
    for path in written:
        committed = ROOT / "src" / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), f"run ./dev protos: {committed} is not up to date"


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_every_field_and_value_is_documented(path):
    documented = False
    for line in path.read_text().splitlines():
        text = line.strip()
        is_field = re.match(r"^[\w.]+( [\w.]+)? \w+ = \d+;$", text) or re.match(r"^rpc ", text)
        is_zero_value = re.match(r"^[A-Z_]+_UNSPECIFIED = 0;$", text)
        if is_field and not is_zero_value:
            assert documented, f"{path.name}: no comment above {text!r}"
        documented = text.startswith("//")


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_package_is_the_folder_and_is_versioned(path):
    package = re.search(r"^package ([\w.]+);$", path.read_text(), re.M).group(1)
    assert package == ".".join(path.relative_to(ROOT / "protos").parent.parts)
    assert re.search(r"\.v\d+$", package)


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_rpcs_have_own_messages_and_services_end_in_service(path):
    text = path.read_text()
    for name, request, response in re.findall(r"rpc (\w+)\((?:stream )?(\w+)\) returns \((?:stream )?(\w+)\)", text):
        assert (request, response) == (f"{name}Request", f"{name}Response")
    assert all(name.endswith("Service") for name in re.findall(r"^service (\w+)", text, re.M))
