"""Settings: the command line overrides the environment, unknown keys are refused, addresses are checked."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field

from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument
from pinyon.runtime.settings import ServiceSettings, load_settings, service_config
from services.kvstore.settings import KvStoreSettings
from services.lb.settings import LbSettings
from services.worker.settings import WorkerSettings


class Example(ServiceSettings):
    model_config = service_config("example")
    pool_mib: int = Field(16, ge=1, description="pool in MiB")


def test_defaults_listen_on_loopback():
    settings = load_settings(Example, [], {})
    assert settings.listen.startswith("127.0.0.1:")
    assert settings.metrics_listen.startswith("127.0.0.1:")


def test_the_command_line_wins_over_the_environment():
    environment = {"PINYON_EXAMPLE_POOL_MIB": "32", "PINYON_EXAMPLE_LOG_LEVEL": "debug"}
    settings = load_settings(Example, ["--pool-mib", "64"], environment)
    assert (settings.pool_mib, settings.log_level) == (64, "debug")


@pytest.mark.parametrize(
    ("argv", "environment", "word"),
    [
        ([], {"PINYON_EXAMPLE_POLL_MIB": "1"}, "PINYON_EXAMPLE_POLL_MIB"),
        (["--poll-mib", "1"], {}, "--poll-mib"),
        (["--pool-mib", "0"], {}, "--pool-mib"),
        (["--pool-mib", "many"], {}, "--pool-mib"),
        (["--listen", "nowhere"], {}, "host:port"),
        (["--log-level", "loud"], {}, "--log-level"),
        ([], {"PINYON_EXAMPLE_POLL_MIB": "1"}, "(did you mean 'PINYON_EXAMPLE_POOL_MIB'?)"),
        (["--poll_mib", "1"], {}, "--poll-mib (did you mean '--pool-mib'?)"),
        (["--log-level", "inf"], {}, "got 'inf' (did you mean 'info'?)"),
        (["--ready-fd", "70000"], {}, "--ready-fd"),
        (["--ready-fd", str(1 << 40)], {}, "no open file descriptor"),
    ],
)
def test_bad_input_ends_with_status_2_and_names_the_key(argv, environment, word, capsys):
    with pytest.raises(SystemExit) as stopped:
        load_settings(Example, argv, environment)
    assert stopped.value.code == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize("service", ["conductor", "controller", "kvstore", "lb", "worker"])
def test_usage_shows_the_command_as_it_is_typed(service, monkeypatch, capsys):
    monkeypatch.setattr("sys.orig_argv", [".venv/bin/python", "-m", f"services.{service}", "--help"])
    settings = importlib.import_module(f"services.{service}.settings")
    cls = next(
        each
        for each in vars(settings).values()
        if isinstance(each, type) and issubclass(each, ServiceSettings) and each.__module__ == settings.__name__
    )
    with pytest.raises(SystemExit, match="0"):
        load_settings(cls, ["--help"], {})
    assert capsys.readouterr().out.startswith(f"usage: .venv/bin/python -m services.{service} ")


def test_a_descriptor_to_write_to_is_open_for_writing(capsys):
    reader, writer = os.pipe()
    try:
        assert load_settings(Example, ["--ready-fd", str(writer)], {}).ready_fd == writer
        with pytest.raises(SystemExit):
            load_settings(Example, ["--ready-fd", str(reader)], {})
    finally:
        os.close(reader)
        os.close(writer)
    assert "for reading only" in capsys.readouterr().err


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_settings(Example, [], {}).pool_mib = 3


def test_every_field_has_a_help_text():
    assert all(field.description for field in ServiceSettings.model_fields.values())


@pytest.mark.parametrize(
    ("text", "parsed"), [("a:1", ("a", 1)), ("[::1]:80", ("::1", 80)), ("10.0.0.1:65535", ("10.0.0.1", 65535))]
)
def test_addresses(text, parsed):
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["", "a", ":1", "a:", "a:b", "a:70000", "a:-1"])
def test_what_is_not_an_address(text):
    with pytest.raises(InvalidArgument):
        parse_address(text)


def test_advertised_host_replaces_the_bound_one():
    settings = load_settings(Example, ["--advertise-host", "worker-1"], {})
    assert settings.reachable("0.0.0.0:7000") == "worker-1:7000"


def listening(*argv: str) -> Example:
    return load_settings(Example, argv, {})


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.8.8:1", "[::1]:0", "localhost:0"])
def test_loopback_stays_plain(address):
    assert listening("--listen", address).exposed() == []


@pytest.mark.parametrize("name", ["--listen", "--metrics-listen"])
@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.7:1", "worker-1:7200"])
def test_elsewhere_it_needs_tls_or_a_flag(name, address, capsys):
    with pytest.raises(SystemExit) as stopped:
        listening(name, address)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in (f"{name} {address}", "--tls-dir", "pinyon certs", "--allow-insecure"))
    (warning,) = listening(name, address, "--allow-insecure").exposed()
    assert address in warning
    assert listening(name, address, "--tls-dir", "/somewhere").exposed() == []


def test_the_flag_is_warned_of():
    program = (
        "from pinyon.runtime.service import run_service\n"
        "from pinyon.runtime.settings import ServiceSettings\n"
        "async def main(settings, context): pass\n"
        "run_service(ServiceSettings(listen='192.0.2.1:7000', metrics_listen='', allow_insecure=True), main)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert "warning" in run.stderr
    assert "--listen 192.0.2.1:7000 is not loopback" in run.stderr


def test_a_folder_is_short_for_its_files():
    settings = listening("--tls-dir", "/run/certs", "--tls-ca", "/etc/other-ca.crt")
    assert settings.tls_paths == (Path("/run/certs/tls.crt"), Path("/run/certs/tls.key"), Path("/etc/other-ca.crt"))
    assert settings.cluster_secret_file == "/run/certs/cluster.secret"
    assert settings == load_settings(
        Example, [], {"PINYON_EXAMPLE_TLS_DIR": "/run/certs", "PINYON_EXAMPLE_TLS_CA": "/etc/other-ca.crt"}
    )


def test_tls_needs_all_three_files(capsys):
    with pytest.raises(SystemExit):
        listening("--tls-cert", "a", "--tls-ca", "b")
    assert "--tls-key" in capsys.readouterr().err


def test_the_load_balancer_needs_api_keys_too(capsys):
    for argv in (("--http-listen", "0.0.0.0:0"), ("--listen", "0.0.0.0:0")):
        with pytest.raises(SystemExit):
            load_settings(LbSettings, [*argv, "--tls-dir", "/somewhere"], {})
        assert "--api-keys-file" in capsys.readouterr().err
        assert load_settings(LbSettings, [*argv, "--tls-dir", "/x", "--api-keys-file", "/keys"], {}).exposed() == []
        with pytest.raises(SystemExit):
            load_settings(LbSettings, [*argv, "--api-keys-file", "/keys"], {})
        assert "--tls-dir" in capsys.readouterr().err
    own = ("--http-listen", "0.0.0.0:0", "--api-keys-file", "/keys", "--http-tls-cert", "/c", "--http-tls-key", "/k")
    assert load_settings(LbSettings, own, {}).exposed() == [], "HTTPS with a certificate of its own"
    with pytest.raises(SystemExit):
        load_settings(LbSettings, own[:-2], {})


def test_a_worker_and_a_store_listen_for_transfers_too(capsys):
    for cls in (WorkerSettings, KvStoreSettings):
        with pytest.raises(SystemExit):
            load_settings(cls, ["--transfer-listen", "10.0.0.7:0"], {})
        assert "--transfer-listen 10.0.0.7:0" in capsys.readouterr().err


def test_with_tls_redis_elsewhere_has_it_too(capsys):
    for cls in (WorkerSettings, KvStoreSettings):
        with pytest.raises(SystemExit):
            load_settings(cls, ["--tls-dir", "/x", "--redis-url", "redis://secret@redis:6379/0"], {})
        said = capsys.readouterr().err
        assert "rediss://" in said
        assert "secret" not in said
        for url in ("rediss://redis:6379/0", "redis://127.0.0.1:6379", "unix:///run/redis.sock"):
            assert load_settings(cls, ["--tls-dir", "/x", "--redis-url", url], {}).exposed() == []
