"""Log-probabilities of tokens as messages."""

from __future__ import annotations

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.logprobs import LogprobRows, TokenLogprob
from pinyon.core.request import LOGPROBS_MAX


def append_logprob(message: common_pb2.Logprobs, one: TokenLogprob) -> None:
    """Appends one token's log-probabilities; all tokens of a message have the same number of likeliest tokens."""
    message.logprobs.append(one.logprob)
    message.top_count = len(one.top)
    for token, logprob in one.top:
        message.top_tokens.append(token)
        message.top_logprobs.append(logprob)


def check_logprobs(message: common_pb2.Logprobs, tokens: int) -> None:
    """Raises :class:`InvalidArgument` if the parts do not fit together or are not for ``tokens`` tokens."""
    count, each = len(message.logprobs), message.top_count
    if each > LOGPROBS_MAX or not len(message.top_tokens) == len(message.top_logprobs) == count * each:
        raise InvalidArgument(f"{count} log-probabilities do not have {each} likeliest tokens each", field="logprobs")
    if count != tokens:
        raise InvalidArgument(f"{tokens} tokens have {count} log-probabilities", field="logprobs")


def logprobs_from_proto(message: common_pb2.Logprobs) -> list[TokenLogprob]:
    """Returns all log-probabilities. Raises :class:`InvalidArgument` if the parts do not fit together."""
    check_logprobs(message, len(message.logprobs))
    return logprobs_between(message, 0, len(message.logprobs))


def logprobs_after(message: common_pb2.Logprobs, start: int) -> common_pb2.Logprobs:
    """Returns a checked message without the first ``start`` tokens."""
    first = start * message.top_count
    return common_pb2.Logprobs(
        logprobs=message.logprobs[start:],
        top_count=message.top_count,
        top_tokens=message.top_tokens[first:],
        top_logprobs=message.top_logprobs[first:],
    )


def logprobs_between(message: common_pb2.Logprobs, start: int, end: int) -> list[TokenLogprob]:
    """Returns the values of tokens ``[start, end)`` of a checked message; all at once may take a second and 0.5 GB."""
    each = message.top_count
    # Slices are used because a message's own iterators are slow.
    span = slice(start * each, end * each)
    top = list(zip(message.top_tokens[span], message.top_logprobs[span], strict=True))
    return [
        TokenLogprob(logprob, tuple(top[index * each : (index + 1) * each]))
        for index, logprob in enumerate(message.logprobs[start:end])
    ]


class SentLogprobs:
    """A :class:`pinyon.core.logprobs.Logprobs` of checked messages, converted to values only on request.

    Adding to an object that was made from a message changes that message."""

    __slots__ = ("_message",)

    def __init__(self, message: common_pb2.Logprobs | None = None) -> None:
        self._message = common_pb2.Logprobs() if message is None else message

    def __len__(self) -> int:
        return len(self._message.logprobs)

    def between(self, start: int, end: int) -> list[TokenLogprob]:
        return logprobs_between(self._message, start, end)

    def add(self, message: common_pb2.Logprobs) -> None:
        self._message.MergeFrom(message)

    def add_rows(self, rows: LogprobRows) -> None:
        """Appends several tokens' log-probabilities, all with the same number of likeliest tokens."""
        message = self._message
        message.logprobs.extend(rows.logprobs.tolist())
        message.top_count = rows.top_tokens.shape[1]
        message.top_tokens.extend(rows.top_tokens.ravel().tolist())
        message.top_logprobs.extend(rows.top_logprobs.ravel().tolist())

    def put(self, message: common_pb2.Logprobs) -> None:
        """Copies the log-probabilities into a message to send."""
        message.CopyFrom(self._message)
