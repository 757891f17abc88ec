"""What is remembered of instances between the conductor's lists."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.routing.least_loaded import LeastLoaded
from services.lb.instances import FIRST_PAUSE_S, InstanceView

MODEL = "m"


def listed(**boots: str) -> conductor_pb2.InstanceList:
    """Instances by name; a boot id that begins with a dash takes no requests."""
    layout = common_pb2.KvLayout(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")
    return conductor_pb2.InstanceList(
        instances=[
            conductor_pb2.Instance(
                info=conductor_pb2.InstanceInfo(
                    instance_id=name, boot_id=boot, role=common_pb2.ROLE_MIXED, address=f"{name}:1", model=MODEL,
                    model_fingerprint="f", layout=layout,
                ),
                schedulable=not boot.startswith("-"),
            )
            for name, boot in boots.items()
        ]
    )  # fmt: skip


def view_of(**boots: str) -> InstanceView:
    view = InstanceView(LeastLoaded())
    view.update(listed(**boots))
    return view


def chosen(view: InstanceView, now_s: float, *exclude: str) -> str:
    return view.choose(MODEL, 10, exclude, now_s).decode_instance_id


def test_who_failed_comes_last_until_the_pause_ends():
    view = view_of(a="1", b="1")
    assert chosen(view, 0.0) == "a"
    view.failed("a", 0.0)
    assert chosen(view, FIRST_PAUSE_S - 0.1) == "b"
    assert chosen(view, FIRST_PAUSE_S - 0.1, "b") == "a"  # better than nobody
    assert view.avoided(["a", "b"], FIRST_PAUSE_S - 0.1) == {"a"}
    assert view.avoided(["a", "b"], FIRST_PAUSE_S) == set()
    assert chosen(view, FIRST_PAUSE_S) == "a"


def test_news_of_an_instance_and_its_success_end_the_pause():
    view = view_of(a="1", b="1")
    for news in (listed(a="2", b="1"), listed(b="1"), listed(a="-2", b="1")):
        view.failed("a", 0.0)
        view.update(news)
        view.update(listed(a="2", b="1"))
        assert view.avoided("a", 0.0) == set()
    view.failed("a", 0.0)
    view.update(listed(a="2", b="1"))  # the same again
    view.update(listed(a="2", b="1", c="1"))  # news of another one
    assert view.avoided("abc", 0.0) == {"a"}
    view.succeeded("a", -1.0)  # of a request that was placed before that
    assert view.avoided("abc", 0.0) == {"a"}
    view.succeeded("a", 0.0)
    assert view.avoided("abc", 0.0) == set()
