"""The scheduler's side of the connector, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.block_keys import salt_of
from pinyon.core.orders import FetchSpan, KvSource
from pinyon.core.request import RequestClass
from pinyon.messages.plan import seal_plan
from pinyon.messages.request_class import class_to_proto
from pinyon.vllm.drops import DROPS_MAX
from pinyon.vllm.jobs import StepJobs, StepNews
from pinyon.vllm.prompt_keys import KeySpace, PromptKeys
from pinyon.vllm.scheduler import SchedulerSide
from pinyon.vllm.times import Times
from tests.vllm_double import BlockPool, Engine, Request

SIZE = 4
SECRET = b"secret"
SPACE = KeySpace("weights", "layout", SIZE, SECRET)
STORE = FetchSpan("kv", "kv:1", KvSource.STORE, 0, 3)


class Place:
    """A scheduler's side, an engine that drives it, and the questions that it asked."""

    def __init__(self, *, saves: bool = False, secret: bytes = SECRET) -> None:
        self.now_s = 0.0
        self.asked: list[tuple[list[bytes], Future[tuple[FetchSpan, ...]]]] = []
        self.jobs: list[StepJobs] = []
        self.pool = BlockPool(40)
        self.side = SchedulerSide(
            SPACE, 1, self._look, Times("x", SIZE), lambda: self.now_s, look_s=0.1, saves=saves, pinned_share=0.25,
            secret=secret,
        )  # fmt: skip
        self.engine = Engine(self.side, self.pool, SIZE, self._work)
        self.output: dict[str, Any] = {}

    def _look(self, keys: Sequence[bytes]) -> Future[tuple[FetchSpan, ...]]:
        self.asked.append((list(keys), Future()))
        return self.asked[-1][1]

    def _work(self, jobs: StepJobs) -> Any:
        self.jobs.append(jobs)
        nothing = {"kv_connector_worker_meta": None, "finished_recving": set(), "invalid_block_ids": set()}
        said, self.output = self.output, {}
        return SimpleNamespace(**nothing | said)


@pytest.fixture
def place() -> Place:
    return Place()


def request(tokens: int = 14, **fields: Any) -> Request:
    return Request("r", list(range(tokens)), 4, **fields)


def test_a_request_waits_for_the_store_but_not_past_the_deadline(place: Place) -> None:
    asked = request()
    place.side.arrived(asked)
    assert place.side.matched(asked, 0) == (None, False)
    assert place.side.matched(asked, 0) == (None, False), "the question has no side effects"
    place.now_s = 0.11
    assert place.side.matched(asked, 0) == (0, False)
    place.asked[0][1].set_result((STORE,))
    assert place.side.matched(asked, 0) == (0, False), "a late answer is not used"


def test_what_the_store_has_beyond_vllm_s_own_is_offered(place: Place) -> None:
    asked = request()
    place.side.arrived(asked)
    assert len(place.asked[0][0]) == 3, "one token at least is computed"
    place.asked[0][1].set_result((STORE,))
    assert place.side.matched(asked, 0) == (12, True)
    assert place.side.matched(asked, 4) == (8, True)
    assert place.side.matched(asked, 12) == (0, False)


@pytest.mark.parametrize("fault", [OSError("away"), None])
def test_a_store_that_fails_or_has_nothing_is_a_miss(place: Place, fault: Exception | None) -> None:
    asked = request()
    place.side.arrived(asked)
    if fault is None:
        place.asked[0][1].set_result(())
    else:
        place.asked[0][1].set_exception(fault)
    assert place.side.matched(asked, 0) == (0, False)


def test_a_failed_load_is_computed_and_never_offered_again(place: Place) -> None:
    place.engine.add(request())
    place.asked[0][1].set_result((STORE,))
    place.engine.step()
    (job,) = place.jobs[0].loads
    assert place.engine.requests["r"].waits_for_kv
    place.output = {"finished_recving": {"r"}, "invalid_block_ids": {job.blocks[0]}}
    place.engine.step()
    for _ in range(8):
        place.engine.step()
    assert not any(jobs.loads for jobs in place.jobs[1:])
    assert not place.engine.requests
    assert place.side.counts["load_failures"] == 1
    assert not place.side.pins


def test_an_aborted_load_holds_its_blocks_until_it_has_ended(place: Place) -> None:
    place.engine.add(request())
    place.asked[0][1].set_result((STORE,))
    place.engine.step()
    free = place.pool.get_num_free_blocks()
    place.engine.abort("r")
    place.engine.step()
    assert place.pool.get_num_free_blocks() == free
    place.output = {"finished_recving": {"r"}}
    place.engine.step()
    assert place.pool.get_num_free_blocks() == len(place.pool.blocks) - 1
    assert not place.side.pins


def test_a_preempted_request_asks_the_store_anew(place: Place) -> None:
    asked = request()
    place.side.arrived(asked)
    place.asked[0][1].set_result(())
    assert place.side.matched(asked, 0) == (0, False)
    asked.num_preemptions = 1
    assert place.side.matched(asked, 0) == (None, False)
    place.asked[1][1].set_result((STORE,))
    assert place.side.matched(asked, 0) == (12, True)


def test_saves_are_pinned_until_all_ranks_are_done_and_are_few() -> None:
    place = Place(saves=True)
    place.engine.add(Request("r", list(range(100, 133)), 4))
    place.asked[0][1].set_result(())
    place.engine.step()
    (job,) = place.jobs[0].saves
    assert len(job.blocks) == 8
    assert place.side.saving
    place.engine.add(Request("s", list(range(200, 233)), 1))
    place.asked[1][1].set_result(())
    place.engine.step()
    assert not place.jobs[1].saves, "no more than the share may wait"
    assert place.side.counts["unsaved_blocks"] == 8
    assert not place.side.frees, "the request holds its blocks, too"
    place.engine.abort("r")
    assert place.side.frees
    place.output = {"kv_connector_worker_meta": StepNews({job.job_id: 1})}
    place.engine.step()
    assert not place.side.saving


def saved(place: Place) -> None:
    """Makes all save jobs so far end with the next step."""
    place.output = {"kv_connector_worker_meta": StepNews({job.job_id: 1 for jobs in place.jobs for job in jobs.saves})}
    place.engine.step()


def dropping(place: Place, **whose: Any) -> list[int]:
    """Fills the pool with a request of this class until its blocks are next to be dropped; returns them."""
    plan = worker_pb2.Plan(request_id="p", request_class=class_to_proto(RequestClass(**whose)))
    params = {"pinyon": seal_plan(plan.SerializeToString(), SECRET)}
    place.engine.add(Request("r", list(range(100, 112)), 1, kv_transfer_params=params))
    place.asked[-1][1].set_result(())
    place.engine.step()
    held = [block.block_id for block in place.engine.requests["r"].blocks]
    place.engine.abort("r")
    saved(place)
    queue = place.pool.free
    while queue[0].block_hash is None:
        queue.rotate(-1)
    assert [block.block_id for block in list(queue)[:3]] == held[2::-1]
    return held


def computing(place: Place) -> Any:
    """Runs a step that computes a short prompt; returns its save job, if there is one."""
    place.engine.add(Request(f"c{len(place.jobs)}", [1], 1))
    place.engine.step()
    return next(iter(place.jobs[-1].saves), None)


def test_what_vllm_drops_next_is_offered_once_with_whose_it_was() -> None:
    place = Place(saves=True)
    held = dropping(place, kind="chat", turn=3, session="s")
    place.jobs.clear()
    place.engine.step()
    assert not place.jobs[0].saves, "old versions of vLLM save nothing in a step that computes nothing"
    job = computing(place)  # in the first one of them
    assert (job.blocks, job.places) == (held[1::-1], [1, 0])
    assert (job.request_class.kind, job.request_class.turn, job.request_class.session) == ("chat", 3, "s")
    saved(place)
    assert [block.block_id for block in list(place.pool.free)[:2]] == held[1::-1], "they are dropped next as before"
    assert not place.side.pins
    place.jobs.clear()
    assert computing(place) is None


def test_nothing_is_offered_where_few_blocks_are_free() -> None:
    place = Place(saves=True)
    dropping(place)
    while place.pool.get_num_free_blocks() > DROPS_MAX:
        place.pool.free.pop()
    assert computing(place) is None


def test_what_the_store_must_not_keep_is_not_offered() -> None:
    place = Place(saves=True)
    dropping(place, no_store=True)
    assert not any(jobs.saves for jobs in place.jobs)


def test_what_is_used_again_is_offered_again_for_its_last_user() -> None:
    place = Place(saves=True)
    dropping(place, kind="chat")
    place.engine.step()
    saved(place)
    place.jobs.clear()
    place.engine.add(Request("s", list(range(100, 113)), 1))
    place.engine.step()
    place.engine.abort("s")
    while place.pool.free[0].block_hash is None:
        place.pool.free.rotate(-1)
    computing(place)
    offered = [job for jobs in place.jobs for job in jobs.saves]
    assert {block for job in offered for block in job.places} >= {0, 1}
    assert all(job.request_class.kind == "" for job in offered)


def apart(
    *, address: str = "p:1", secret: bytes = SECRET, part: worker_pb2.PlanPart = worker_pb2.PLAN_PART_DECODE
) -> dict[str, Any]:
    """Returns the parameters of a request whose prompt ``p`` was to compute, and which ``x`` decodes."""
    plan = worker_pb2.Plan(request_id="q", prefill_ms=250, part=part)
    placement = plan.placement
    placement.policy, placement.prefill_instance_id, placement.prefill_address = "pinyon", "p", address
    placement.decode_instance_id, placement.decode_address = "x", "x:1"
    return {"pinyon": seal_plan(plan.SerializeToString(), secret)}


def test_a_stranger_names_no_source_of_a_computed_prompt() -> None:
    place = Place(secret=b"")
    asked = request(kv_transfer_params=apart(address="203.0.113.9:7400", secret=b""))
    place.side.arrived(asked)
    assert not place.side.prompts["r"].planned
    assert len(place.asked) == 1


def test_a_prompt_computed_elsewhere_is_fetched_from_there(place: Place) -> None:
    asked = request(kv_transfer_params=apart())
    place.side.arrived(asked)
    assert not place.asked
    assert place.side.matched(asked, SIZE) == (2 * SIZE, True)
    assert place.side.prompts["r"].offer[2] == (FetchSpan("p", "p:1", KvSource.PEER, 1, 3),)
    times = place.side.prompts["r"].times
    assert (times.computes, times.decodes, times.before_s) == (False, True, 0.25)


def test_a_prompt_for_another_is_no_decode_here(place: Place) -> None:
    asked = request(kv_transfer_params=apart(part=worker_pb2.PLAN_PART_PREFILL))
    place.side.arrived(asked)
    times = place.side.prompts["r"].times
    assert (times.computes, times.decodes) == (True, False)
    assert place.side.matched(asked, 0) == (0, False)


def test_what_is_being_stored_is_waited_for(place: Place) -> None:
    asked = request(kv_transfer_params=apart(address=""))
    place.side.arrived(asked)
    place.asked[0][1].set_result(())
    assert place.side.matched(asked, 0) == (None, False)
    place.asked[1][1].set_result((STORE,))
    assert place.side.matched(asked, 0) == (12, True)


def test_what_is_never_stored_is_computed_in_time(place: Place) -> None:
    asked = request(kv_transfer_params=apart(address=""))
    place.side.arrived(asked)
    place.asked[0][1].set_result(())
    place.now_s = 0.2
    assert place.side.matched(asked, 0) == (0, False)


def test_what_was_stored_by_the_deadline_is_used(place: Place) -> None:
    asked = request(kv_transfer_params=apart(address=""))
    place.side.arrived(asked)
    place.asked[0][1].set_result((FetchSpan("store-1", "s:1", KvSource.STORE, 0, 2),))
    assert place.side.matched(asked, 0) == (None, False)
    assert place.side.matched(asked, 0) == (None, False), "the last block is waited for"
    place.now_s = 0.11
    assert place.side.matched(asked, 0) == (8, True)
    assert len(place.asked) == 2, "it is not asked at each step"


def planned(*spans: tuple[int, int]) -> worker_pb2.Plan:
    made = worker_pb2.Plan(request_id="p")
    made.placement.policy = "pinyon"
    made.placement.number = 7
    for first, count in spans:
        made.placement.fetches.add(source_id="b", source_address="b:1", first_block=first, block_count=count)
    return made


def test_a_plan_s_sources_are_used_and_the_store_is_not_asked(place: Place) -> None:
    text = seal_plan(planned((0, 2), (2, 1)).SerializeToString(), SECRET)
    asked = request(kv_transfer_params={"pinyon": text})
    place.side.arrived(asked)
    assert not place.asked
    assert place.side.matched(asked, 0) == (12, True)
    assert place.side.prompts["r"].times.placed_as == "p"
    assert place.side.prompts["r"].times.number == 7


def test_a_plan_that_does_not_fit_any_more_asks_the_store(place: Place) -> None:
    text = seal_plan(planned((1, 2)).SerializeToString(), SECRET)
    asked = request(kv_transfer_params={"pinyon": text})
    place.side.arrived(asked)
    assert place.side.matched(asked, 0) == (None, False)
    place.asked[0][1].set_result((STORE,))
    assert place.side.matched(asked, 0) == (12, True)


def test_a_plan_for_what_vllm_holds_by_now_asks_nobody(place: Place) -> None:
    text = seal_plan(planned((0, 2)).SerializeToString(), SECRET)
    asked = request(kv_transfer_params={"pinyon": text})
    place.side.arrived(asked)
    assert place.side.matched(asked, 2 * SIZE) == (0, False)
    assert not place.asked


@pytest.mark.parametrize(("address", "asks"), [("b:1", True), ("127.0.0.1:1", False), ("[::1]:1", False)])
def test_without_a_secret_plans_name_only_this_machine(address: str, asks: bool) -> None:
    place, plan = Place(secret=b""), planned((0, 3))
    plan.placement.fetches[0].source_address = address
    place.side.arrived(request(kv_transfer_params={"pinyon": seal_plan(plan.SerializeToString(), b"")}))
    assert bool(place.asked) is asks


@pytest.mark.parametrize("text", ["nonsense", 7, None, seal_plan(b"", b"another"), seal_plan(b"\xff\xff", SECRET)])
def test_a_plan_that_is_none_or_not_signed_changes_nothing(place: Place, text: object) -> None:
    asked = request(kv_transfer_params={"pinyon": text})
    place.side.arrived(asked)
    assert place.side.prompts["r"].times.placed_as == ""
    place.asked[0][1].set_result((STORE,))
    assert place.side.matched(asked, 0) == (12, True)


def test_tenants_adapters_and_images_have_keys_of_their_own() -> None:
    def keys(**fields: Any) -> list[bytes]:
        return PromptKeys(SPACE, request(12, **fields)).upto(3)

    def image(name: str, offset: int) -> SimpleNamespace:
        return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=3))

    plain = keys()
    adapters = [SimpleNamespace(lora_name="x", lora_path=path) for path in "pq"]
    spaces = [KeySpace("w2", "layout", SIZE, SECRET), KeySpace("weights", "other", SIZE, SECRET)]
    others = [
        *(keys(cache_salt=salt) for salt in "ab"),
        *(keys(lora_request=adapter) for adapter in adapters),
        *(PromptKeys(space, request(12)).upto(3) for space in spaces),
    ]
    firsts = {each[0] for each in (plain, *others)}
    assert len(firsts) == 1 + len(others)
    assert keys(mm_features=[image("cat", 5)])[0] == plain[0]
    assert len({keys(mm_features=[image(name, at)])[1] for name, at in (("cat", 5), ("dog", 5), ("cat", 4))}) == 3
    salt = salt_of("anna", "", SECRET)
    same, another = (KeySpace(weights, "layout", SIZE, SECRET) for weights in ("weights", "w2"))
    assert keys(cache_salt=salt) == PromptKeys(same, request(12, cache_salt=salt)).upto(3)
    assert keys(cache_salt=salt) != PromptKeys(another, request(12, cache_salt=salt)).upto(3)
    assert not set(keys(cache_salt=f"pinyon:{SPACE.root(request()).hex()}")) & set(plain), "a key is no way in"


def test_prompts_that_tokens_do_not_tell_are_left_alone(place: Place) -> None:
    for fields in ({"prompt_embeds": object()}, {"pooling_params": object()}):
        asked = request(**fields)
        place.side.arrived(asked)
        assert place.side.matched(asked, 0) == (0, False)
        assert not place.side.prompts


def test_new_weights_make_all_content_void(place: Place) -> None:
    place.engine.add(request())
    place.asked[0][1].set_result(())
    place.engine.step()
    held = place.side.snapshot()
    assert held
    place.side.changes()
    place.side.forget_all(KeySpace("weights.1", "layout", SIZE, SECRET))
    assert place.side.changes() == ([], held)
    place.engine.step()
    assert place.jobs[-1].forget
    assert not place.side.snapshot()


def test_blocks_of_a_load_that_was_not_made_fail_no_other(place: Place) -> None:
    asked = request()
    place.side.arrived(asked)
    place.asked[0][1].set_result((STORE,))
    assert place.side.matched(asked, 0) == (12, True)
    given = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],))
    place.side.allocated(asked, given, 12)
    news = SimpleNamespace(kv_connector_worker_meta=None, finished_recving={"r"}, invalid_block_ids={1, 39})
    place.side.news(news)
    assert place.side.counts["load_failures"] == 1
    assert not place.side._invalid, "39 is of another load"


def test_a_request_that_is_not_known_any_more_leaves_nothing(place: Place) -> None:
    asked = request()
    place.side.arrived(asked)
    place.side.forget_all(SPACE)
    given = SimpleNamespace(get_block_ids=lambda: ([1],))
    place.side.not_allocated(asked, given, 4)
    place.side.ended(asked)
    assert not place.side._refused


def test_where_vllm_keeps_no_blocks_nothing_is_reused() -> None:
    place = Place(saves=True)
    place.pool.enable_caching = False
    place.side.bind(place.pool)
    place.engine.add(request())
    place.engine.step()
    assert not place.asked
    assert not place.jobs[0].saves
    assert not place.jobs[0].complete


def test_after_a_step_that_failed_all_content_is_void(place: Place) -> None:
    place.engine.add(request())
    place.asked[0][1].set_result(())
    place.engine.step()
    with pytest.raises(AttributeError):
        place.side.step(object())
    jobs = place.side.step_failed()
    assert jobs.forget
    assert not jobs.complete
    assert not place.side.snapshot()


def test_a_source_that_failed_lately_is_not_offered(place: Place) -> None:
    asked = request()
    place.side.arrived(asked)
    place.asked[0][1].set_result((STORE,))
    place.side.failed_sources = frozenset((STORE.address,))
    assert place.side.matched(asked, 0) == (0, False)
