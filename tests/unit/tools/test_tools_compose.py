"""The compose files, alone and combined: their result, without starting anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from services.conductor.settings import ConductorSettings
from services.controller.settings import ControllerSettings
from services.kvstore.settings import KvStoreSettings
from services.lb.settings import LbSettings
from services.worker.settings import WorkerSettings
from tests.vllm_double import install

install()
from pinyon.vllm.settings import VllmSettings  # noqa: E402  # it needs vLLM, or its double

DEPLOY = Path(__file__).parents[3] / "deploy"
SETTINGS = {
    "CONDUCTOR": ConductorSettings,
    "CONTROLLER": ControllerSettings,
    "KVSTORE": KvStoreSettings,
    "LB": LbSettings,
    "VLLM": VllmSettings,
    "WORKER": WorkerSettings,
}
WANTED = {
    "PINYON_MODEL_DIR": "/models/one",
    "PINYON_SECOND_MODEL_DIR": "/models/two",
    "PINYON_SECOND_MODEL_NAME": "two",
    "PINYON_API_KEYS": "/keys",
}
OVERRIDES = {
    "alone": ((), {}),
    "model": (("compose.model.yaml",), {"lb": "PINYON_LB_MODEL: /model", "decode-2": "PINYON_WORKER_MODEL: /model"}),
    "second model": (
        ("compose.second-model.yaml",),
        {"lb": "PINYON_LB_MORE_MODELS: two=/second-model", "second-mixed": "PINYON_WORKER_SERVED_MODEL_NAME: two"},
    ),
    "regions": (
        ("compose.regions.yaml",),
        {
            "lb": "PINYON_LB_REGION: us",
            "eu-lb": "PINYON_LB_CONTROLLER: controller:7100",
            "controller": "PINYON_CONTROLLER_STATE_FILE: /var/lib/pinyon/controller.json",
        },
    ),
    "no registry": (
        ("compose.test.yaml",),
        {"redis": "image: pinyon:latest", "decode-2": "PINYON_WORKER_REDIS_URL: unix:///run/redis/redis.sock"},
    ),
    "no registry, regions": (
        ("compose.test.yaml", "compose.regions.yaml"),
        {"redis": "image: pinyon:latest", "eu-lb": "PINYON_LB_CONTROLLER: controller:7100"},
    ),
    "vllm": (
        ("compose.vllm.yaml",),
        {
            "lb": "PINYON_LB_UPSTREAM_CA_FILE: /run/pinyon/tls/ca.crt",
            "vllm-2": "PINYON_VLLM_INSTANCE_ID: vllm-2",
            "decode-1": "scale: 0",
        },
    ),
    "keys": (("compose.keys.yaml",), {"lb": "PINYON_LB_API_KEYS_FILE: /run/pinyon/keys"}),
}


def compose() -> list[str]:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
            return command
    pytest.skip("neither docker compose nor docker-compose is there (tools/docker_engine.sh installs one)")


def services(text: str) -> dict[str, str]:
    """Returns the text of each service, by name."""
    block = re.search(r"^services:\n((?: .*\n)+)", text, re.MULTILINE)
    assert block is not None
    _, *parts = re.split(r"^  (\S+):\n", block[1], flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", OVERRIDES)
def test_what_the_files_come_to_is_known_to_the_services(name: str) -> None:
    files, expected = OVERRIDES[name]
    given = [word for file in ("compose.yaml", *files) for word in ("-f", str(DEPLOY / file))]
    profiles = [word for profile in ("admin", "more", "second") for word in ("--profile", profile)]
    ended = subprocess.run(
        [*compose(), *given, *profiles, "config"], env={**os.environ, **WANTED}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found = services(ended.stdout)
    for service, setting in expected.items():
        assert setting in found[service]
    for kind, setting in re.findall(r"\bPINYON_(CONDUCTOR|CONTROLLER|KVSTORE|LB|VLLM|WORKER)_([A-Z_]+):", ended.stdout):
        assert setting.lower() in SETTINGS[kind].model_fields, setting
    for service, text in found.items():
        assert "max-size: 10m" in text, service
        assert "no-new-privileges:true" in text, service
        assert ("healthcheck:" in text) == (service not in ("certs", "admin")), service
    volume = re.compile(r"(?<![\w-])tls-[\w-]+")
    made = set(volume.findall(found["certs"]))
    for service, text in found.items():
        assert set(volume.findall(text)) <= made, f"nobody makes a certificate for {service}"
    for whose in re.findall(r"/certs/(\w+/[\w-]+)", found["certs"]):
        assert re.search(rf"- {whose}(@\w+)?\n", found["certs"]), f"{whose} has a volume and no certificate"
