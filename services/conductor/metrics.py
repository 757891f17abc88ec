"""The conductor's Prometheus metrics."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Gauge

from pinyon.core.request import Role
from pinyon.placement.decision_log import PredictionErrors
from pinyon.placement.fleet import Fleet
from pinyon.runtime.metrics import Figure, Figures
from pinyon.runtime.tally import Count, Tally
from services.conductor.membership import Membership

_LATENCY_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
_TTFT_ERROR_BUCKETS_S = tuple(
    sorted(sign * seconds for seconds in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0) for sign in (-1, 1))
)
_TTFT_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class ConductorMetrics:
    """Counters to increment, and gauges that read the state when they are scraped, so that they are exact."""

    def __init__(self, registry: CollectorRegistry, fleet: Fleet, membership: Membership) -> None:
        count, tally = partial(Count, registry=registry), partial(Tally, registry=registry)
        self.placements = count("pinyon_conductor_placements_total", "Requests by outcome", ("outcome",))
        self.placements.add(("placed",), 0)
        self.schedule_latency = tally(
            "pinyon_conductor_schedule_seconds", "Time to decide one placement", buckets=_LATENCY_BUCKETS_S
        )
        self.predicted_ttft = tally(
            "pinyon_conductor_predicted_ttft_seconds",
            "Predicted time to first token of placed requests",
            buckets=_TTFT_BUCKETS_S,
        )
        self.measured_ttft = tally(
            "pinyon_conductor_measured_ttft_seconds",
            "Time from acceptance to first token at the decode instance, of placed requests whose instance told it",
            buckets=_TTFT_BUCKETS_S,
        )
        self.ttft_error = tally(
            "pinyon_conductor_ttft_error_seconds",
            "Measured less predicted time to first token of these requests: above zero, it took longer than predicted",
            buckets=_TTFT_ERROR_BUCKETS_S,
        )
        self._ttft_error_ratio = Gauge(
            "pinyon_conductor_ttft_error_ratio",
            "Mean of |measured - predicted| / measured time to first token, of each model's last 256 placements",
            ("model",),
            registry=registry,
        )
        self._errors = PredictionErrors()
        self.shared_placements = count(
            "pinyon_conductor_shared_decode_placements_total",
            "Placed requests decoded on an instance that decodes others with the same prefix",
        )
        self.shared_tokens = count(
            "pinyon_conductor_shared_decode_tokens_total",
            "Prompt tokens in these shared prefixes: their KV need not be read once more in each step",
        )
        self.deltas = count("pinyon_conductor_deltas_total", "Cache changes applied")
        self.snapshots = count("pinyon_conductor_snapshots_total", "Cache snapshots completed")
        self.gaps = count("pinyon_conductor_resyncs_total", "Snapshots asked for because changes were missing")
        self.copy_orders = count(
            "pinyon_conductor_copy_orders_total", "Times that a store node was told to copy hot blocks"
        )
        self.moves_wanted = count(
            "pinyon_conductor_moves_wanted_total",
            "Requests that should wait elsewhere by the placement policy, sampled: once a second while there are any",
        )
        self.instances_wanted = Gauge(
            "pinyon_conductor_instances_wanted",
            "Instances that compute prompts: how many each model should have (--sizes)",
            ("model",),
            registry=registry,
        )
        self.lb_sessions = Gauge("pinyon_conductor_lb_sessions", "Load balancers connected", registry=registry)

        instances = Gauge("pinyon_conductor_instances", "Live instances", ("role",), registry=registry)
        for role in Role:
            instances.labels(role.value).set_function(partial(_count_role, fleet, role))
        index, inflight = fleet.index, fleet.inflight
        gauges: list[Figure] = [
            ("report_sessions", "Instances with a report session", lambda: membership.sessions),
            ("index_blocks", "Different blocks in the index", lambda: len(index)),
            ("index_entries", "(block, holder) pairs", lambda: index.entries),
            ("index_evicted", "Pairs forgotten: index full", lambda: index.evicted),
            ("index_refused", "Pairs not kept: too many different sets of holders", lambda: index.refused),
            ("settling", "1: instances may be unknown yet", lambda: fleet.settling),
            (
                "shared_prefixes",
                "Prefixes by which instances batch their decoding, each counted at its depth",
                lambda: len(fleet.loads.prefixes),
            ),
            ("inflight_prefills", "Placements not yet prefilled", lambda: inflight.prefills),
            ("inflight_placements", "Placements not ended", lambda: inflight.decodes),
            ("inflight_expired", "Parts of placements that got too old", lambda: inflight.expired),
        ]
        registry.register(Figures("pinyon_conductor", gauges))

    def first_token(self, model: str, predicted_s: float, measured_s: float) -> None:
        """Records the predicted and the measured time to first token of one placement."""
        self.measured_ttft.observe(measured_s)
        self.ttft_error.observe(measured_s - predicted_s)
        if self._errors.add(model, predicted_s, measured_s):
            self._ttft_error_ratio.labels(model).set_function(partial(self._errors.mean, model))


def _count_role(fleet: Fleet, role: Role) -> int:
    return sum(state.info.role is role for state in fleet.instances())
