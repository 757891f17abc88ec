"""The backend has SGLang's methods and arguments, as recorded, and refuses at its start what it cannot serve."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.transfer import TransferEngine
from tests.sglang_double import Pool, Storage, config, install, recorded, serving

install()

from pinyon.sglang import PinyonHiCache  # noqa: E402 - needs the double
from pinyon.sglang.pages import model_fingerprint, register_pool  # noqa: E402
from pinyon.sglang.settings import load_sglang_settings  # noqa: E402

GIVEN = {"interface_v1": 1, "redis_url": "redis://127.0.0.1:1"}


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    engine = TransferEngine()
    engine.start()
    yield engine
    engine.close()


def test_the_backend_s_methods_have_sglang_s_arguments() -> None:
    for name, expected in recorded()["HiCacheStorage"].items():
        method = getattr(PinyonHiCache, name)
        assert list(inspect.signature(method).parameters) == expected, name


def test_all_abstract_methods_are_there() -> None:
    for name in recorded()["abstract"]["methods"]:
        assert getattr(PinyonHiCache, name) is not getattr(Storage, name, None)


def test_the_double_has_what_is_read_of_pools() -> None:
    pool = Pool()
    assert recorded()["HostKVCache"]["names"]
    assert all(hasattr(pool, name) for name in recorded()["HostKVCache"]["names"])


def test_settings_come_from_the_option_and_environment() -> None:
    environment = {"PINYON_SGLANG_LOOK_S": "3", "PINYON_SGLANG_LOAD_S": "4"}
    extra = {**GIVEN, "backend_name": "pinyon", "module_path": "m", "class_name": "c", "allocator": "shm", "load_s": 5}
    settings = load_sglang_settings(extra, environment)
    assert (settings.look_s, settings.load_s) == (3, 5)


@pytest.mark.parametrize(
    ("extra", "environment", "message"),
    [
        ({**GIVEN, "redis_ulr": ""}, {}, "redis_ulr.*redis_url"),
        (GIVEN, {"PINYON_SGLANG_LOKK_S": "1"}, "LOKK_S.*look_s"),
        ({**GIVEN, "load_s": -1}, {}, "load_s"),
        ({"redis_url": "redis://127.0.0.1:1"}, {}, "interface_v1"),
        ({"interface_v1": 1}, {}, "redis_url"),
    ],
)
def test_bad_settings_are_refused(extra: dict[str, Any], environment: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load_sglang_settings(extra, environment)


def test_sglang_is_told_why_it_cannot_start() -> None:
    with pytest.raises(InvalidArgument, match="unknown setting colour"):
        PinyonHiCache(config({**GIVEN, "colour": "red"}), {})


@pytest.mark.parametrize("layout", ["page_unified", "page_first_kv_split"])
def test_unknown_layouts_are_refused(layout: str, engine: TransferEngine) -> None:
    with pytest.raises(InvalidArgument, match=f"layout {layout} is not supported"):
        register_pool(engine, Pool(layout))


def test_pools_that_are_not_understood_are_refused(engine: TransferEngine) -> None:
    more, none, uneven, alien = Pool(), Pool(), Pool(), Pool()
    more.size_per_token += 2
    none.kv_buffer = None
    meta = uneven.get_page_buffer_meta
    uneven.get_page_buffer_meta = lambda slots: ([each + 2 * (slots[0] > 4) for each in meta(slots)[0]], meta(slots)[1])  # type: ignore[method-assign]
    alien.get_page_buffer_meta = Pool().get_page_buffer_meta  # type: ignore[method-assign]
    for pool in (more, none, uneven, alien):
        with pytest.raises(InvalidArgument):
            register_pool(engine, pool)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pieces_are_where_sglang_says(layout: str, engine: TransferEngine) -> None:
    pool = Pool(layout)
    memory = register_pool(engine, pool)
    base = pool.kv_buffer.ctypes.data
    for page in range(pool.page_num):
        pointers, lengths = pool.get_page_buffer_meta(pool.slots(page))
        assert [(piece.offset + base, piece.length) for piece in memory.pieces(page)] == list(
            zip(pointers, lengths, strict=True)
        )


def test_a_pool_of_one_page_has_pieces(engine: TransferEngine) -> None:
    assert register_pool(engine, Pool(pages=1)).object_bytes == Pool().page_size * Pool().size_per_token


def test_models_with_other_pools_are_refused() -> None:
    backend = PinyonHiCache.__new__(PinyonHiCache)
    backend.register_mem_host_pool_v2(Pool(), "kv")
    with pytest.raises(InvalidArgument, match="mamba"):
        backend.register_mem_host_pool_v2(Pool(), "mamba")


def test_without_interface_v1_s_calls_there_is_nothing() -> None:
    backend = PinyonHiCache.__new__(PinyonHiCache)
    assert backend.get("a") is None
    assert backend.batch_get(["a", "b"]) == [None, None]
    assert backend.set("a", b"") is backend.batch_set(["a"], [b""]) is False


def test_the_seed_counts_for_weights_made_up() -> None:
    names = set()
    for load_format, seed in (("auto", 1), ("auto", 2), ("dummy", 1), ("dummy", 2)):
        with serving(load_format=load_format, random_seed=seed):
            names.add(model_fingerprint())
    assert len(names) == 3
