"""The settings of an agent, and what it refuses at the start."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.security import load_security
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.setting_sources import load_settings
from pinyon.runtime.telemetry import Telemetry
from services.agent.__main__ import main
from services.agent.settings import AgentSettings
from tests.tls_files import TestAuthority

SERVER, CONDUCTOR = "--server=http://127.0.0.1:8000/v1", "--conductor=127.0.0.1:7000"


@pytest.mark.parametrize(
    "option",
    [
        *("--server=127.0.0.1:8000", "--server=http://a,http://b", "--events=tcp://*:5557", "--replay=127.0.0.1:5558"),
        *("--gone-s=0", "--block-tokens=-1", "--conductor=nowhere"),
    ],
)
def test_settings_that_cannot_work_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load_settings(AgentSettings, [option], {})
    assert f"pinyon agent: {option.partition('=')[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(("given", "missing"), [(SERVER, "--conductor"), (CONDUCTOR, "--server")])
async def test_server_and_conductor_are_needed(given: str, missing: str) -> None:
    pytest.importorskip("zmq")
    pytest.importorskip("msgpack")
    from services.agent.app import serving

    context = ServiceContext("agent", "a", Telemetry("agent", "a"), CollectorRegistry(), asyncio.Event())
    with pytest.raises(InvalidArgument, match=f"an agent needs {missing}"):
        async with serving(load_settings(AgentSettings, [given], {}), context):
            pass


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("app", "agent", "feed"):
        monkeypatch.delitem(sys.modules, f"services.agent.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.setattr("services.agent.__main__.spare_collector", lambda: None)
    with pytest.raises(SystemExit, match=r"(zmq|msgpack).*pip install 'pinyon\[agent\]'"):
        main([SERVER, CONDUCTOR])


def test_an_agent_has_the_certificate_of_a_worker(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    for role, fits in (("worker", True), ("lb", False)):
        settings = load_settings(AgentSettings, [f"--tls-dir={authority.folder(role, 'gpu-3')}"], {})
        if fits:
            assert load_security(settings, settings.certified_role()).tls is not None
        else:
            with pytest.raises(InvalidArgument, match="is that of lb gpu-3"):
                load_security(settings, settings.certified_role())
