"""Work that is given out although the estimates say no, so that they are measured again.

An instance that is believed to be slow gets no requests, and without requests nobody learns that it is fast by now (or
that the first sample was a hiccup). The same holds for fetching that is believed to be slower than computing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import Pool

PROBE_AFTER_S: Final = 5.0
"""An idle instance that was measured this long ago takes one request whatever is predicted for it."""
TRANSFER_PROBE_AFTER_S: Final = 60.0
"""A fetch that would have been slower this long ago is doubted, and again by half after each time as long: it costs
requests that would have been served in time anyway."""


def probe_pool(pool: Pool, now_s: float, *, prefills: bool, decodes: bool) -> Pool:
    """The pool with only such ``prefills`` (or ``decodes``, or both) as are due to be measured; it may have none."""
    return replace(
        pool,
        prefills=tuple(each for each in pool.prefills if _prefill_due(each, now_s)) if prefills else pool.prefills,
        decodes=tuple(each for each in pool.decodes if decode_due(each, now_s)) if decodes else pool.decodes,
    )


def transfer_doubt(reader: InstanceState, now_s: float) -> float:
    """What share of the predicted time of a fetch is believed when it is compared with computing; at most 1."""
    age_s = now_s - reader.transfer_learned_s
    if age_s <= TRANSFER_PROBE_AFTER_S:
        return 1.0
    return float(0.5 ** (age_s / TRANSFER_PROBE_AFTER_S - 1))


def _prefill_due(state: InstanceState, now_s: float) -> bool:
    return state.prefill_idle and now_s - state.prefill_learned_s >= PROBE_AFTER_S


def decode_due(state: InstanceState, now_s: float) -> bool:
    """Idle, and not measured for long."""
    return not state.decoding_requests() and now_s - state.decode_learned_s >= PROBE_AFTER_S
