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
from pinyon.runtime.setting_sources import SERVICES, load_settings, option
from pinyon.runtime.settings import ServiceSettings, service_config
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


def test_the_environment_wins_over_the_file(tmp_path):
    file = tmp_path / "suite.toml"
    file.write_text('[example]\npool_mib = 8\nlog_level = "debug"\nallow_insecure = true\n[lb]\n')
    settings = load_settings(Example, ["--config", str(file)], {"PINYON_EXAMPLE_POOL_MIB": "32"})
    assert (settings.pool_mib, settings.log_level, settings.allow_insecure) == (32, "debug", True)
    for name in ("PINYON_EXAMPLE_CONFIG", "PINYON_CONFIG"):
        assert load_settings(Example, [], {name: str(file)}).pool_mib == 8


def test_one_file_does_for_a_suite(tmp_path):
    file = tmp_path / "suite.toml"
    file.write_text("[lb]\nqueue_limit = 1\n[worker]\nmax_batch = 2\n")
    assert load_settings(LbSettings, [], {"PINYON_CONFIG": str(file)}).queue_limit == 1
    assert load_settings(WorkerSettings, [], {"PINYON_CONFIG": str(file)}).max_batch == 2
    assert load_settings(KvStoreSettings, [], {"PINYON_CONFIG": str(file)}) == KvStoreSettings()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[example]\npool_mb = 1\n", "unknown setting 'pool_mb' in [example] (did you mean 'pool_mib'?)"),
        ("[exampel]\npool_mib = 1\n", "'exampel' is no table of a service (did you mean 'example'?)"),
        ("pool_mib = 1\n", "'pool_mib' is no table of a service"),
        ("[example]\npool_mib = 0\n", "--pool-mib"),
        ("[example]\npool_mib = [1]\n", "pool_mib in [example] must be a number, a text or a boolean, got [1]"),
        ("[example]\nlisten = 1\n", "--listen"),
        ("[example]\ntls_dir = 1\n", "--tls-dir"),
        ("[[example]]\npool_mib = 1\n", "'example' must be a table: [example]"),
        ("[example]\npool_mib = 0x" + "f" * 5000 + "\n", "pool_mib in [example] has more than 64 bits"),
        ("[example]\npool_mib = " + "[" * 5000 + "]" * 5000 + "\n", "too deep"),
        ("[example\n", "line 1"),
        ("[example]\nlisten = '\xff'\n", "utf-8"),
        ("#" * (1 << 20) + "\n", "larger than 1048576 bytes"),
        (None, "cannot read"),
    ],
)
def test_a_bad_file_ends_with_its_name(content, words, tmp_path, capsys):
    file = tmp_path / "suite.toml"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    message = refused(capsys, Example, "--config", str(file))
    assert message.startswith("pinyon example: ")
    assert str(file) in message
    assert words in message


def test_a_pipe_is_no_file_of_settings(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert "it is no file" in refused(capsys, Example, "--config", str(tmp_path / "pipe"))


def test_a_bad_variable_is_named(capsys):
    message = refused(capsys, Example, environ={"PINYON_EXAMPLE_POOL_MIB": "0"})
    assert "--pool-mib (PINYON_EXAMPLE_POOL_MIB): " in message


def test_variables_may_be_in_small_letters():
    assert load_settings(Example, [], {"pinyon_example_pool_mib": "8", "pinyon_example_else": "1"}).pool_mib == 8
    both = {"PINYON_EXAMPLE_POOL_MIB": "32", "pinyon_example_pool_mib": "8"}
    assert load_settings(Example, [], both).pool_mib == 32


@pytest.mark.parametrize("name", ["LISTEN", "HTTP_LISTEN"])
def test_an_empty_address_is_no_defect(name):
    assert load_settings(LbSettings, [], {f"PINYON_LB_{name}": ""}).exposed() == []


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
    assert word in refused(capsys, Example, *argv, environ=environment)


def settings_of(service: str) -> type[ServiceSettings]:
    module = importlib.import_module(f"services.{service}.settings")
    return next(
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, ServiceSettings) and each.__module__ == module.__name__
    )


def said(capsys, cls: type[ServiceSettings], *argv: str, environ: dict[str, str] | None = None) -> str:
    """Returns what a command printed before it ended."""
    with pytest.raises(SystemExit):
        load_settings(cls, argv, environ or {})
    captured = capsys.readouterr()
    return captured.out + captured.err


def refused(capsys, cls: type[ServiceSettings], *argv: str, environ: dict[str, str] | None = None) -> str:
    """Returns why these settings are refused."""
    with pytest.raises(SystemExit) as stopped:
        load_settings(cls, argv, environ or {})
    assert stopped.value.code == 2
    return capsys.readouterr().err


def printed_by(service: str, option: str) -> list[str]:
    """Returns the lines that a service prints in a process of its own, where no laboratory has added policies."""
    command = [sys.executable, "-m", f"services.{service}", option]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True, env={**os.environ, "COLUMNS": "80"}
    ).stdout.splitlines()


@pytest.mark.parametrize("service", SERVICES)
def test_help_shows_25_options_and_help_all_the_rest(service):
    cls = settings_of(service)
    shown = [line.split()[0] for line in printed_by(service, "--help") if line.startswith("  -")]
    assert len(shown) <= 25
    lines = printed_by(service, "--help-all")
    assert {line.split()[0] for line in lines if line.startswith("  -")} >= {*shown, *map(option, cls.model_fields)}
    texts = "\n".join("." if line.startswith("      ") else "" for line in lines).split("\n\n")
    assert max(text.count(".") for text in texts) <= 2, "help texts fit two lines"


def test_help_all_may_be_spelled_with_an_underscore(capsys):
    assert said(capsys, Example, "--help_all") == said(capsys, Example, "--help-all")
    assert said(capsys, Example, "--help_all") != said(capsys, Example, "--help")


@pytest.mark.parametrize("service", SERVICES)
def test_each_setting_is_in_one_group(service):
    cls = settings_of(service)
    groups = cls.grouped_fields()
    assert "others" not in groups
    assert sorted(name for names in groups.values() for name in names) == sorted(cls.model_fields)


@pytest.mark.parametrize("service", SERVICES)
def test_usage_shows_the_command_as_it_is_typed(service, monkeypatch, capsys):
    monkeypatch.setattr("sys.orig_argv", [".venv/bin/python", "-m", f"services.{service}", "--help"])
    with pytest.raises(SystemExit, match="0"):
        load_settings(settings_of(service), ["--help"], {})
    assert capsys.readouterr().out.startswith(f"usage: .venv/bin/python -m services.{service} ")


def test_a_descriptor_to_write_to_is_open_for_writing(capsys):
    reader, writer = os.pipe()
    try:
        assert load_settings(Example, ["--ready-fd", str(writer)], {}).ready_fd == writer
        assert "for reading only" in refused(capsys, Example, "--ready-fd", str(reader))
    finally:
        os.close(reader)
        os.close(writer)


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
    said = refused(capsys, Example, name, address)
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


def test_a_folder_wins_over_files_of_a_lesser_source(tmp_path):
    file = tmp_path / "suite.toml"
    file.write_text("[example]\ntls_cert = '/old/tls.crt'\ntls_key = '/old/tls.key'\ntls_ca = '/old/ca.crt'\n")
    settings = load_settings(Example, ["--tls-dir", "/new"], {"PINYON_CONFIG": str(file)})
    assert settings.tls_paths == (Path("/new/tls.crt"), Path("/new/tls.key"), Path("/new/ca.crt"))


def test_tls_needs_all_three_files(capsys):
    assert "--tls-key" in refused(capsys, Example, "--tls-cert", "a", "--tls-ca", "b")


def test_the_load_balancer_needs_api_keys_too(capsys):
    for argv in (("--http-listen", "0.0.0.0:0"), ("--listen", "0.0.0.0:0")):
        assert "--api-keys-file" in refused(capsys, LbSettings, *argv, "--tls-dir", "/somewhere")
        assert load_settings(LbSettings, [*argv, "--tls-dir", "/x", "--api-keys-file", "/keys"], {}).exposed() == []
        assert "--tls-dir" in refused(capsys, LbSettings, *argv, "--api-keys-file", "/keys")
    own = ("--http-listen", "0.0.0.0:0", "--api-keys-file", "/keys", "--http-tls-cert", "/c", "--http-tls-key", "/k")
    assert load_settings(LbSettings, own, {}).exposed() == [], "HTTPS with a certificate of its own"
    assert "--http-tls-key" in refused(capsys, LbSettings, *own[:-2])


def test_a_worker_and_a_store_listen_for_transfers_too(capsys):
    for cls in (WorkerSettings, KvStoreSettings):
        assert "--transfer-listen 10.0.0.7:0" in refused(capsys, cls, "--transfer-listen", "10.0.0.7:0")


def test_with_tls_redis_elsewhere_has_it_too(capsys):
    for cls in (WorkerSettings, KvStoreSettings):
        said = refused(capsys, cls, "--tls-dir", "/x", "--redis-url", "redis://secret@redis:6379/0")
        assert "rediss://" in said
        assert "secret" not in said
        for url in ("rediss://redis:6379/0", "redis://127.0.0.1:6379", "unix:///run/redis.sock"):
            assert load_settings(cls, ["--tls-dir", "/x", "--redis-url", url], {}).exposed() == []
