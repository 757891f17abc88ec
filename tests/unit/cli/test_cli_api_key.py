"""Commands that ask a load balancer show it an API key: the given one, else the environment's."""

from __future__ import annotations

import grpc
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.cli import main


class Balancer(lb_pb2_grpc.LbServiceServicer):
    """A load balancer that serves clients with the key ``sesame``, like one with a file of keys."""

    def __init__(self) -> None:
        self.shown: set[str] = set()

    def Generate(self, request, context):
        authorization = dict(context.invocation_metadata()).get("authorization", "")
        self.shown.add(authorization)
        if authorization != "Bearer sesame":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "Incorrect API key provided.")
        yield lb_pb2.GenerateResponse(tokens=[7], text="jays")
        yield lb_pb2.GenerateResponse(usage=common_pb2.Usage(prompt_tokens=9, completion_tokens=1))


@pytest.fixture
def balancer(serve) -> tuple[str, Balancer]:
    balancer = Balancer()
    return serve(lb_pb2_grpc.add_LbServiceServicer_to_server, balancer)[0], balancer


def asked(command: str, trace: str, address: str) -> list[str]:
    if command == "replay":
        return ["replay", trace, "--lb", address, "--warm-up", "0"]
    return [command, "What do jays cache?", "--lb", address]


@pytest.mark.parametrize("command", ["generate", "replay"])
def test_key_of_the_environment_is_shown(command, balancer, trace, monkeypatch):
    monkeypatch.setenv("PINYON_API_KEY", "sesame")
    address, seen = balancer
    assert main(asked(command, trace, address)) == 0
    assert seen.shown == {"Bearer sesame"}


@pytest.mark.parametrize("command", ["generate", "replay"])
def test_key_that_is_given_wins(command, balancer, trace, monkeypatch):
    monkeypatch.setenv("PINYON_API_KEY", "another")
    address, seen = balancer
    assert main([*asked(command, trace, address), "--api-key", "sesame"]) == 0
    assert seen.shown == {"Bearer sesame"}


@pytest.mark.parametrize("command", ["generate", "replay"])
def test_refusal_says_how_a_key_is_given(command, balancer, trace, monkeypatch, capsys):
    monkeypatch.delenv("PINYON_API_KEY", raising=False)
    address, seen = balancer
    assert main(asked(command, trace, address)) == 1
    assert seen.shown == {""}
    assert "(--api-key, or PINYON_API_KEY)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "replay"])
def test_help_names_the_variable(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "$PINYON_API_KEY" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["two\nlines", "clé", "\x1b[2J"])
@pytest.mark.parametrize("command", ["generate", "replay"])
def test_key_that_cannot_be_sent_is_told_in_plain_words(command, key, balancer, trace, monkeypatch, capfd):
    monkeypatch.setenv("PINYON_API_KEY", key)
    address, seen = balancer
    assert main(asked(command, trace, address)) == 1
    assert not seen.shown
    assert capfd.readouterr().err.startswith("pinyon: --api-key (or PINYON_API_KEY) has characters that cannot be sent")
