"""The parameters that a worker refuses; accepted ones fit into messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Internal, InvalidArgument
from pinyon.core.logprobs import PROMPT_LOGPROBS_MAX, LogprobRows
from pinyon.core.request import Role, SamplingParams
from pinyon.core.served import Served
from pinyon.messages.logprobs import SentLogprobs
from pinyon.messages.orders import parse_first_token, parse_prefill, parse_submission
from pinyon.messages.sampling import sampling_to_proto
from pinyon.model import load_card
from pinyon.model.config import VOCAB_MAX
from pinyon.runtime.channel import MAX_MESSAGE_BYTES
from pinyon.runtime.outgoing import in_messages
from services.worker.engines import create_engine


def served(unsupported: frozenset[str] = frozenset(), context: int = 40_960) -> Served:
    card = load_card()
    model = (card.name, card.fingerprint, card.config.vocab_size, context)
    return Served("w", Role.MIXED, *model, card.config.kv_layout(32), 1 << 20, unsupported=unsupported)


def order_of(sampling: SamplingParams, prompt: int = 5, generated: int = 0, instance: Served | None = None):
    tokens = np.zeros(prompt + generated, "<u4").tobytes()
    message = worker_pb2.Submission(
        request_id="r", prompt_tokens_le32=tokens, generated_tokens=generated, sampling=sampling_to_proto(sampling)
    )
    return parse_submission(message, instance or served(), 1.0).prompt


ASKING = SamplingParams(logprobs=3, prompt_logprobs=True)


@pytest.mark.parametrize("engine", ["instant", "paced"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 0),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("frequency_penalty", -1.0),
        ("presence_penalty", 0.5),
        ("logit_bias", ((5, 1.0),)),
    ],
)
def test_an_engine_without_logits_refuses_what_it_would_not_heed(engine, field, value):
    instance = served(create_engine(engine, load_card(), 4, 16).unsupported)
    sampling = replace(SamplingParams(), **{field: value})
    assert order_of(sampling).sampling == sampling
    assert order_of(SamplingParams(temperature=1.0, stop_token_ids=(3,), min_tokens=2), instance=instance)
    with pytest.raises(InvalidArgument, match="not supported") as caught:
        order_of(sampling, instance=instance)
    assert caught.value.field == field
    message = worker_pb2.PrefillStart(
        request_id="r", prompt_tokens_le32=bytes(20), sampling=sampling_to_proto(sampling)
    )
    with pytest.raises(InvalidArgument) as caught:
        parse_prefill(message, instance)
    assert caught.value.field == field


@pytest.mark.parametrize("top", [0, 3, 20])
def test_log_probabilities_of_a_prompt_are_bounded(top):
    wide, sampling = served(context=1 << 20), replace(ASKING, logprobs=top)
    most = PROMPT_LOGPROBS_MAX // (top + 1)
    assert order_of(sampling, most, instance=wide).tells_prompt
    assert not order_of(sampling, most, 9, instance=wide).tells_prompt
    with pytest.raises(InvalidArgument, match=f"{(top + 1) * (most + 1)}") as caught:
        order_of(sampling, most + 1, instance=wide)
    assert caught.value.field == "prompt_logprobs"


@pytest.mark.parametrize("top", [0, 1, 20])
def test_the_longest_log_probabilities_fit_into_a_message(top):
    """The message also holds 1 MiB of tokens and text."""
    count = PROMPT_LOGPROBS_MAX // (top + 1)
    message = worker_pb2.StreamUpdate(text="x" * (1 << 20))
    rows = LogprobRows(
        np.full(count, -1.5, np.float32),
        np.full((count, top), VOCAB_MAX - 1, np.uint32),
        np.full((count, top), -1.5, np.float32),
    )
    SentLogprobs(message.prompt_logprobs).add_rows(rows)
    assert len(message.prompt_logprobs.logprobs) == count
    assert message.ByteSize() + 1024 < MAX_MESSAGE_BYTES
    assert [len(parts) for parts in in_messages([message, message])] == [1, 1]


def result(**fields) -> worker_pb2.PrefillResult:
    return worker_pb2.PrefillResult(first_token=65, **fields)


def logprobs(count: int, top: int = 1) -> common_pb2.Logprobs:
    return common_pb2.Logprobs(
        logprobs=[-1.0] * count, top_count=top, top_tokens=[7] * count * top, top_logprobs=[-0.5] * count * top
    )


def test_a_first_token_brings_what_was_asked_for():
    order = order_of(ASKING)
    first = parse_first_token(result(logprobs=logprobs(1), prompt_logprobs=logprobs(4)), order, served())
    passed_on = common_pb2.Logprobs()
    first.prompt_logprobs.put(passed_on)
    assert (first.token, first.logprob, passed_on) == (65, (-1.0, ((7, -0.5),)), logprobs(4))
    resumed = parse_first_token(result(logprobs=logprobs(1)), order_of(ASKING, generated=2), served())
    assert resumed.prompt_logprobs is None
    assert parse_first_token(result(), order_of(SamplingParams()), served()).logprob is None


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"logprobs": logprobs(1)},
        {"prompt_logprobs": logprobs(4)},
        {"logprobs": logprobs(2), "prompt_logprobs": logprobs(4)},
        {"logprobs": logprobs(1), "prompt_logprobs": logprobs(5)},
        {"logprobs": common_pb2.Logprobs(logprobs=[-1.0], top_count=2), "prompt_logprobs": logprobs(4)},
    ],
)
def test_a_first_token_without_it_is_a_defect(told):
    with pytest.raises(Internal, match="log-probabilities are wrong"):
        parse_first_token(result(**told), order_of(ASKING), served())
