"""Settings: command line over environment, unknown keys refused, addresses checked."""

import pytest
from pydantic import Field

from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument
from pinyon.runtime.settings import ServiceSettings, load_settings, service_config


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
    ],
)
def test_bad_input_ends_with_status_2_and_names_the_key(argv, environment, word, capsys):
    with pytest.raises(SystemExit) as stopped:
        load_settings(Example, argv, environment)
    assert stopped.value.code == 2
    assert word in capsys.readouterr().err


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
