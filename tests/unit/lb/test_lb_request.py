"""The state of a request over several attempts."""

from __future__ import annotations

from inspect import isgetsetdescriptor, ismemberdescriptor

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Internal
from pinyon.core.logprobs import TokenLogprob
from pinyon.core.request import FinishReason, RequestClass, SamplingParams
from pinyon.frontdoor.instances.request import QUICK_S, TRIES_MAX, Delta, Request, Terms
from pinyon.messages.logprobs import logprobs_from_proto
from pinyon.runtime.outgoing import MESSAGE_BYTES
from tests.sent_logprobs import logprobs_to_proto

NOTHING = common_pb2.Logprobs()
PLACEMENT = common_pb2.Placement(prefill_instance_id="p", decode_instance_id="d", decode_address="d:1")


def make(max_tokens: int = 5, whole: bool = False, **sampling) -> Request:
    asked = SamplingParams(max_tokens, **sampling)
    terms = Terms(0.0, 10.0, whole)
    request = Request("id", "m", RequestClass(tenant="t"), b"\1\0\0\0" * 8, b"k" * 16, asked, terms)
    begin(request, 1.0)
    return request


def begin(request: Request, now_s: float, fingerprint: str = "weights") -> worker_pb2.Submission:
    submission, attempt_id = worker_pb2.Submission(), request.attempt_id
    request.placement = PLACEMENT
    request.begin_attempt(now_s)
    request.fill(submission, attempt_id, True, fingerprint, now_s)
    return submission


def fail_and_resume(request: Request, field: str = "", fingerprint: str = "weights") -> worker_pb2.Submission:
    request.fold(lost(field), 3.0)
    assert request.retry(3, 10.0, 3.0)
    return begin(request, 4.0, fingerprint)


def update(text: str = "", tokens: tuple[int, ...] = (), **fields) -> worker_pb2.StreamUpdate:
    return worker_pb2.StreamUpdate(text=text, tokens=tokens, **fields)


def lost(field: str = "", code: str = "UNAVAILABLE") -> worker_pb2.StreamUpdate:
    error = common_pb2.Error(code=code, message="gone", field=field)
    return update(finish_reason=common_pb2.FINISH_REASON_ERROR, error=error)


def parts(delta: Delta) -> tuple[str, list[int], common_pb2.Logprobs]:
    return delta.text, list(delta.tokens), delta.logprobs


@pytest.mark.parametrize(("field", "excluded"), [("", {"d"}), ("prefill_instance", {"p"})])
def test_a_resumed_request_drops_what_was_sent(field, excluded):
    request = make()
    assert request.fold(update("ab", (1, 2)), 2.0).text == "ab"
    submission = fail_and_resume(request, field)
    assert request.exclude == excluded
    assert submission.request_id == "id~1"
    assert submission.generated_tokens == 2
    assert submission.prompt_tokens_le32 == b"\1\0\0\0" * 8 + b"\1\0\0\0\2\0\0\0"
    assert submission.block_keys == b""  # the keys belonged to the prompt alone
    assert submission.timeout_ms == 6000
    # The new instance replays in pieces of its own.
    assert request.fold(update("a"), 5.0).text == ""
    assert parts(request.fold(update("bc", (3,)), 5.0)) == ("c", [3], NOTHING)
    done = update("d", (4,), finish_reason=common_pb2.FINISH_REASON_STOP, usage=common_pb2.Usage(cached_tokens=99))
    assert request.fold(done, 6.0).text == "d"
    assert request.finish_reason is FinishReason.STOP
    usage = request.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (8, 4, 8)


def test_when_only_the_end_was_lost_the_last_token_is_made_again():
    request = make(max_tokens=2)
    request.fold(update("ab", (1, 2)), 2.0)
    assert fail_and_resume(request).generated_tokens == 1
    last = request.fold(update("ab", (2,), finish_reason=common_pb2.FINISH_REASON_LENGTH), 5.0)
    assert parts(last) == ("", [], NOTHING)
    assert request.tokens == [1, 2]


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "INTERNAL", "INVALID_ARGUMENT"])
def test_errors_that_another_instance_would_repeat_are_final(code):
    request = make()
    request.fold(lost(code=code), 1.0)
    assert not request.retry(3, 10.0, 1.0)


def test_attempts_are_bounded():
    request = make()
    for attempt in range(3):
        request.fold(lost(), 1.0)
        request.lost = True
        assert request.retry(3, 10.0, 1.0) is (attempt < 2)
        begin(request, 1.0)


@pytest.mark.parametrize("reached", [False, True])
def test_absent_and_refusing_instances_use_up_no_attempts(reached):
    """Dead instances listed beside healthy ones must not use up the attempts; the time is bounded instead."""
    request = make()
    for number in range(20):
        request.fold(lost(), 1.0 + number * 0.1)
        request.reached = reached
        assert request.retry(3, 10.0, 1.0 + number * 0.1)
        begin(request, 1.0 + number * 0.1)
    request.fold(lost(), 11.5)
    assert not request.retry(3, 10.0, 11.5)


def test_slow_failures_and_those_after_a_token_are_attempts():
    for kind in ("slow", "token"):
        request = make()
        now_s = 1.0
        for attempt in range(3):
            if kind == "slow":
                now_s += QUICK_S
            else:
                request.fold(update("a", (1,)), now_s)
            request.fold(lost(), now_s)
            request.reached = True
            assert request.retry(3, 10.0, now_s) is (attempt < 2)
            begin(request, now_s)


def test_instances_that_leave_in_good_order_are_no_attempts():
    """A rolling restart moves a long answer as often as there are instances."""
    request = make(max_tokens=50)
    for number in range(10):
        now_s = 8.0 * number
        request.fold(update("a", (1,)), now_s)
        request.fold(lost(), now_s)
        request.reached = True
        assert request.retry(3, 10.0, now_s, leaving=True)
        begin(request, now_s)
    for attempt in range(3):
        request.fold(lost(), 80.0)
        request.lost = True  # the instance died while it left: the request may be to blame
        assert request.retry(3, 10.0, 80.0, leaving=True) is (attempt < 2)
        begin(request, 80.0)


def test_patience_begins_anew_with_each_token():
    request = make(max_tokens=50)
    for number in range(5):
        now_s = 8.0 * number
        request.fold(lost(), now_s)
        assert request.retry(100, 10.0, now_s)
        begin(request, now_s)
        request.fold(update("a", (1,)), now_s)


def test_nobody_is_asked_for_ever():
    request = make()
    for _ in range(TRIES_MAX - 1):
        request.fold(lost(), 1.0)
        assert request.retry(3, 10.0, 1.0)
        begin(request, 1.0)
    request.fold(lost(), 1.0)
    assert not request.retry(3, 10.0, 1.0)


def test_what_was_generated_goes_on_with_its_weights_only():
    request = make()
    request.fold(update("ab", (1, 2)), 2.0)
    assert request.fingerprint == "weights"
    submission = fail_and_resume(request, fingerprint="other weights")
    assert (submission.generated_tokens, submission.model_fingerprint) == (2, "weights")


def test_what_nobody_has_seen_may_begin_again():
    request = make(whole=True)
    request.hold(request.fold(update("ab", (1, 2)), 2.0))
    request.fold(lost(), 3.0)
    assert request.retry(3, 10.0, 3.0)
    request.start_over()
    submission = begin(request, 4.0, "other weights")
    assert (submission.generated_tokens, submission.model_fingerprint) == (0, "other weights")
    assert submission.prompt_tokens_le32 == request.tokens_le32
    for number, last in ((7, 0), (8, common_pb2.FINISH_REASON_LENGTH)):
        request.hold(request.fold(update("x", (number,), finish_reason=last), 5.0))
    assert parts(request.held()) == ("xx", [7, 8], NOTHING)
    assert request.usage().completion_tokens == 2


def test_what_an_instance_gives_up_by_itself_goes_on_elsewhere():
    request = make()
    request.fold(update(finish_reason=common_pb2.FINISH_REASON_CANCELLED), 1.0)
    assert request.error is not None
    assert request.retry(3, 10.0, 1.0)


def told(*tokens: int) -> common_pb2.Logprobs:
    return logprobs_to_proto(logprobs(*tokens))


def logprobs(*tokens: int) -> list[TokenLogprob]:
    return [TokenLogprob(-float(token), ((token, -float(token)), (token + 1, -0.5))) for token in tokens]


def telling(text: str, tokens: tuple[int, ...], prompt: int = 0, **fields) -> worker_pb2.StreamUpdate:
    message = update(text, tokens, logprobs=logprobs_to_proto(logprobs(*tokens)), **fields)
    if prompt:
        message.prompt_logprobs.CopyFrom(logprobs_to_proto(logprobs(*range(1, prompt))))
    return message


def test_log_probabilities_stay_with_their_tokens_over_attempts():
    request = make(logprobs=2, prompt_logprobs=True)
    assert request.schedule_message().no_reuse
    assert not request.prompt_logprobs.logprobs
    assert parts(request.fold(telling("ab", (1, 2), prompt=8), 2.0)) == ("ab", [1, 2], told(1, 2))
    assert logprobs_from_proto(request.prompt_logprobs) == logprobs(*range(1, 8))
    submission = fail_and_resume(request)
    assert (submission.sampling.logprobs, submission.sampling.prompt_logprobs) == (2, False)
    assert not request.schedule_message().no_reuse
    assert parts(request.fold(update("ab"), 5.0)) == ("", [], NOTHING)
    assert parts(request.fold(telling("c", (3,)), 5.0)) == ("c", [3], told(3))
    assert logprobs_from_proto(request.prompt_logprobs) == logprobs(*range(1, 8))


def test_a_token_that_is_made_again_is_not_told_again():
    request = make(max_tokens=2, logprobs=2, prompt_logprobs=True)
    request.fold(telling("ab", (1, 2), prompt=8), 2.0)
    assert fail_and_resume(request).generated_tokens == 1
    last = request.fold(telling("ab", (2,), finish_reason=common_pb2.FINISH_REASON_LENGTH), 5.0)
    assert parts(last) == ("", [], NOTHING)
    one = make(max_tokens=1, logprobs=2, prompt_logprobs=True)
    one.fold(telling("a", (1,), prompt=8), 2.0)
    submission = fail_and_resume(one)
    assert (submission.generated_tokens, submission.sampling.prompt_logprobs) == (0, False)
    assert parts(one.fold(telling("a", (1,), finish_reason=common_pb2.FINISH_REASON_LENGTH), 5.0)) == ("", [], NOTHING)
    assert logprobs_from_proto(one.prompt_logprobs) == logprobs(*range(1, 8))


def test_held_text_has_its_log_probabilities_after_a_new_start():
    request = make(whole=True, logprobs=2, prompt_logprobs=True)
    request.hold(request.fold(telling("ab", (1, 2), prompt=8), 2.0))
    request.fold(lost(), 3.0)
    assert request.retry(3, 10.0, 3.0)
    request.start_over()
    assert not request.prompt_logprobs.logprobs
    assert begin(request, 4.0).sampling.prompt_logprobs
    request.hold(request.fold(telling("x", (7,), prompt=8), 5.0))
    request.hold(request.fold(telling("y", (8,), finish_reason=common_pb2.FINISH_REASON_LENGTH), 5.0))
    assert parts(request.held()) == ("xy", [7, 8], told(7, 8))
    assert logprobs_from_proto(request.prompt_logprobs) == logprobs(*range(1, 8))


@pytest.mark.parametrize(
    "wrong",
    [
        update("a", (1,)),
        update("a", (1,), logprobs=logprobs_to_proto(logprobs(1))),
        telling("a", (1,), prompt=7),
        update("a", (1, 2), logprobs=logprobs_to_proto(logprobs(1))),
    ],
)
def test_wrong_log_probabilities_of_an_instance_are_a_defect(wrong):
    with pytest.raises(Internal, match="log-probabilities are wrong"):
        make(logprobs=2, prompt_logprobs=True).fold(wrong, 2.0)


@pytest.mark.parametrize("generated", [0, 4000])
def test_a_submission_is_no_larger_than_was_said(generated):
    """The submission holds everything that a client may say, at its longest, in characters of four bytes."""
    long = "\U0001f332" * 256
    places = ("g" * 64,) * 16
    asked = RequestClass("k" * 32, 1 << 20, long, long, -1000, 1e9, long[:128], places, long, no_store=True)
    sampling = SamplingParams(
        5000, 1.9, 1 << 30, 0.9, 2**64 - 1, ("\U0001f332" * 64,) * 16, True, 0.9, 5000, (2**32 - 1,) * 64, 9.9, -1.9,
        1.9, tuple((2**32 - 1 - token, -99.9) for token in range(1024))[::-1], 20, True,
    )  # fmt: skip
    terms = Terms(0.0, 1e6, False, True, 1 << 30, "t" * 55)
    request = Request(long[:64], long[:128], asked, b"\xff" * 4000, b"k" * 1600, sampling, terms)
    begin(request, 1.0, long[:128])
    if generated:
        logprobs = logprobs_to_proto([TokenLogprob(-1.0)] * generated)
        prompt = logprobs_to_proto([TokenLogprob(-1.0)] * (request.prompt_tokens - 1))
        request.fold(update("x", (7,) * generated, logprobs=logprobs, prompt_logprobs=prompt), 2.0)
        request.fold(lost(), 3.0)
    request.exclude = {f"{long[:60]}{number}" for number in range(40)}
    for keys, without in ((None, 0), (b"", len(request.block_keys))):
        said = request.schedule_bytes({*request.exclude, "cd"})
        assert 0.7 * said < request.schedule_message(("cd",), keys).ByteSize() + without <= said
    submission = begin(request, 4.0, long[:128])
    said = request.size_bytes + 4 * len(request.tokens) + PLACEMENT.ByteSize()
    assert submission.ByteSize() <= said
    assert submission.ByteSize() > 0.7 * said


def test_block_keys_do_not_outgrow_a_message() -> None:
    """The prompt has one key per token: the conductor gets the first keys, the instance computes them all."""
    terms = Terms(0.0, 1e6)
    request = Request("r", "m", RequestClass(), bytes(4 * 700_000), bytes(16 * 700_000), SamplingParams(1000), terms)
    schedule = request.schedule_message()
    assert schedule.ByteSize() < MESSAGE_BYTES
    assert 0 < len(schedule.block_keys) < len(request.block_keys)
    submission = begin(request, 0.0)
    assert not submission.block_keys
    assert submission.ByteSize() < 4 << 20


@pytest.mark.parametrize("first", [{}, {"model_fingerprint": "weights", "prefill": worker_pb2.PrefillReport()}])
def test_what_is_passed_on_counts_as_what_is_folded(first):
    """The counts agree even if an update is the first to report something of the instance."""
    pieces = [update("ab", (1, 2), **first), update("", (3,)), update("c", (4, 5)), update("d")]
    folded, passed, heard = make(), make(), list[str]()
    passed.listener = lambda text: heard.append(text) or True
    texts = [folded.fold(each, 2.0).text for each in pieces]
    assert passed.pass_on(lambda: 2.0, pieces[:1])
    assert passed.pass_on(lambda: 3.0, pieces[1:2])
    assert passed.pass_on(lambda: 3.0, pieces[2:])
    assert "".join(heard) == "".join(texts)
    state = {name for name, each in vars(Request).items() if ismemberdescriptor(each) or isgetsetdescriptor(each)}
    state -= {"listener", "_class", "_held_logprobs"}
    assert len(state) > 20
    assert [getattr(passed, name) for name in state] == [getattr(folded, name) for name in state]


def test_what_nobody_takes_is_not_passed_on():
    request, piece = make(), update("ab", (1,))
    assert not request.pass_on(lambda: 2.0, [piece])
    request.listener = lambda text: False
    assert not request.pass_on(lambda: 2.0, [piece])
    assert (request.tokens, request.first_token_s) == ([], 0.0)
    request.listener = lambda text: True
    request.fold(piece, 2.0)
    request.fold(lost(), 3.0)
    request.retry(3, 10.0, 3.0)
    begin(request, 4.0)
    assert not request.pass_on(lambda: 5.0, [update("a")]), "what the client has already is to be left out"
    assert request.fold(update("abc", (2,)), 5.0).text == "c"
    assert request.pass_on(lambda: 6.0, [update("d", (3,))])
    assert request.tokens == [1, 2, 3]
