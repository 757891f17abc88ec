"""Requests to a cluster over HTTP, as a program without any client library sends them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from launch.cluster import LocalCluster
from tests.waiting import WAIT_S

MODEL = "pinyon-tiny"
REPORT = {"x-pinyon-report": "1"}


class HttpAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def exchanged(
    connection: http.client.HTTPConnection, path: str, body: object, headers: Mapping[str, str] | None
) -> HttpAnswer:
    """Sends one request, a GET where the body is None, and closes the connection."""
    try:
        fields = {"content-type": "application/json", **(headers or {})}
        connection.request(*(("GET", path, None) if body is None else ("POST", path, json.dumps(body))), fields)
        response = connection.getresponse()
        return HttpAnswer(response.status, response.headers, response.read())
    finally:
        connection.close()


def ask(cluster: LocalCluster, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    return exchanged(cluster.access.http(cluster.services["lb-0"], WAIT_S), path, body, headers)


def completion(**changes: object) -> dict[str, object]:
    """Returns the body of a request for a few tokens."""
    return {"model": MODEL, "prompt": "The jay", "max_tokens": 4, **changes}


def complete(cluster: LocalCluster, headers: Mapping[str, str] | None = None, **changes: object) -> HttpAnswer:
    return ask(cluster, "/v1/completions", completion(**changes), headers)


def openai_client(cluster: LocalCluster, api_key: str = "unused") -> Any:
    """Returns OpenAI's own client; its context closes it."""
    import openai  # here, as importing it takes half a second in every worker that collects these files

    http_client = openai.DefaultHttpxClient(verify=cluster.access.ssl_context() or True)
    return openai.OpenAI(
        base_url=f"{cluster.http}/v1", api_key=api_key, max_retries=0, timeout=WAIT_S, http_client=http_client
    )
