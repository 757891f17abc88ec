"""The events that wait for a worker's next report."""

from pinyon.runtime.ledger import KEPT, Ledger


def test_the_last_events_are_kept_while_nobody_takes_them() -> None:
    ledger = Ledger(lambda report: None)
    for number in range(KEPT + 2):
        ledger.decode_begun(f"request-{number}")
    ledger.prefill_begun("one")
    news = ledger.take()
    assert [len(news.begun_decode_request_ids), news.begun_decode_request_ids[0]] == [KEPT, "request-2"]
    assert list(news.begun_prefill_request_ids) == ["one"]
    assert not ledger.take().ListFields()
