"""The lines that ``up`` prints to be copied into another terminal. Each works as it is, from any folder."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from pinyon.runtime.identity import CONDUCTOR, peer_name

_FIRST_LINE_KEY = "awk '$1 ~ /^[^#]/ {print $1; exit}'"
_FIRST_JSON_KEY = "-c 'import json, sys; print(next(iter(json.load(open(sys.argv[1])))))'"
"""Commands that read the first key of a file; keys are not printed because terminals are logged."""


def hints(
    http: str,
    conductor: str,
    model: str,
    *,
    authority: Path | None = None,
    admin: Path | None = None,
    api_keys_file: str = "",
    controller: str = "",
) -> list[str]:
    """Returns shell lines for a suite whose load balancer is at the URL ``http``.

    With TLS, ``authority`` is the file that clients trust and ``admin`` the folder of an admin's certificate."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 32, "stream": True}
    trust = f"--cacert {_path(authority)} " if authority else ""
    lines = [
        f"curl -N {trust}{http}/v1/completions{_authorization(api_keys_file)} -H 'content-type: application/json' "
        f"-H 'x-request-id: first' -d {shlex.quote(json.dumps(body))}",
        *(_pinyon(f"{command} --conductor {conductor}", admin) for command in ("explain first", "instances")),
    ]
    if controller:
        lines += [_pinyon(f"{command} --controller {controller}", admin) for command in ("regions", "top")]
    else:
        lines.append(_pinyon(f"top --conductor {conductor} --lb {http}", admin))
    service = "pinyon.api.conductor.v1.ConductorService"
    if admin is None:
        lines.append(f"grpcurl -plaintext {conductor} list")
        asked = shlex.quote(json.dumps({"model": model, "prompt_tokens": 100}))
        lines.append(f"grpcurl -plaintext -d {asked} {conductor} {service}/Schedule")
    else:  # Schedule is for load balancers only
        files = (f"-{option} {_path(admin / name)}" for option, name in _ADMIN_FILES)
        secure = f"grpcurl {' '.join(files)} -authority {peer_name(CONDUCTOR)} {conductor}"
        lines += [f"{secure} list", f"{secure} {service}/ListInstances"]
    return lines


_ADMIN_FILES = (("cacert", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))


def _authorization(api_keys_file: str) -> str:
    """Returns a header with the file's first key, which is read from the file when the line is run."""
    if not api_keys_file:
        return ""
    path = Path(api_keys_file)
    first = _FIRST_LINE_KEY
    if path.read_text("utf-8-sig").lstrip().startswith("{"):
        first = f"{_path(Path(sys.executable))} {_FIRST_JSON_KEY}"
    return f' -H "Authorization: Bearer $({first} {_path(path)})"'


def _pinyon(arguments: str, admin: Path | None) -> str:
    """Returns a command line with the ``pinyon`` beside the running interpreter, as a checkout's is not on the PATH."""
    command = Path(sys.executable).with_name("pinyon")
    shown = _path(command) if command.exists() else f"{_path(Path(sys.executable))} -m pinyon.cli"
    return f"{shown} {arguments}" + ("" if admin is None else f" --tls-dir {_path(admin)}")


def _path(path: Path) -> str:
    return shlex.quote(str(path.absolute()))
