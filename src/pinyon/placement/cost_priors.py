"""The priors of an instance's cost models: general ones, or those of the profiles of an engine and a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pinyon.core.errors import InvalidArgument
from pinyon.placement.cost_model import DecodeCostModel, PrefillCostModel
from pinyon.placement.transfer_cost import PATH_KINDS, PathKind, TransferCostModel, TransferPriors
from pinyon.profiles.engine_profile import EngineProfile, built_in_profiles, load_profile
from pinyon.profiles.machine_profile import MachineProfile, built_in_machines, load_machine

MODELS_MAX = 32
START_S = {PathKind.HOST: 2e-4, PathKind.NETWORK: 1e-3, PathKind.STORE: 2e-4, PathKind.SSD: 1e-3}
"""The fixed seconds of a read (a request, a lease and the first bytes), by kind of path; no profile has them."""
STEP_MIN_S = 1e-4
"""The least seconds of a step: no profile counts what a service does around it."""
PAIRS_MIN = 1 / 4_500_000
"""The least seconds per pair of tokens, as a share of those per token. Attention is then as heavy as the linear layers
at a hundred times the general prior's length. A prior of zero could never be corrected."""
REQUEST_MIN, KV_TOKEN_MIN = 1e-3, 1e-7
"""The least seconds per request and per token of KV, as shares of those of a decode step, for the same reason."""


@dataclass(frozen=True, slots=True)
class CostPriors:
    """The coefficients that the cost models start from; all are positive."""

    prefill: tuple[float, float, float] = PrefillCostModel.PRIOR
    decode: tuple[float, float, float] = DecodeCostModel.PRIOR
    transfer: TransferPriors = (TransferCostModel.PRIOR,) * PATH_KINDS


def priors_of(engine: EngineProfile, machine: MachineProfile | None = None) -> CostPriors:
    """Returns the profiles' coefficients, each at least so large that measurements can correct it."""
    token_s = max(engine.prefill_token_s, 1e-9)
    prefill = (max(engine.step_s, STEP_MIN_S), token_s, max(engine.prefill_pair_s, PAIRS_MIN * token_s))
    step_s = max(engine.step_s + engine.decode_step_s, STEP_MIN_S)
    decode = (
        step_s,
        max(engine.decode_request_s, REQUEST_MIN * step_s),
        max(engine.decode_kv_token_s, KV_TOKEN_MIN * step_s),
    )
    if machine is None:
        return CostPriors(prefill, decode)
    speeds = {
        PathKind.HOST: machine.dram_bytes_s,
        PathKind.NETWORK: machine.nic_bytes_s,
        PathKind.STORE: machine.dram_bytes_s,
        PathKind.SSD: min(machine.ssd_bytes_s, machine.nic_bytes_s),
    }
    return CostPriors(prefill, decode, tuple((START_S[kind], 1 / speeds[kind]) for kind in PathKind))


def parse_priors(text: str) -> Mapping[str, CostPriors]:
    """Parses ``PROFILE`` and ``MODEL=PROFILE``, separated by ``;``. Returns priors by model, ``""`` for all other
    models.

    A profile is that of a machine with its engine, or of an engine alone: a built-in one, or a file. Raises
    :class:`InvalidArgument`."""
    priors: dict[str, CostPriors] = {}
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if len(parts) > MODELS_MAX:
        raise InvalidArgument(f"at most {MODELS_MAX} profiles, got {len(parts)}", field="profile")
    for part in parts:
        model, _, name = part.rpartition("=")
        if model.strip() in priors:
            raise InvalidArgument(f"PROFILE or MODEL=PROFILE, once for each, got {part!r}", field="profile")
        priors[model.strip()] = _loaded(name.strip())
    return priors


def _loaded(name: str) -> CostPriors:
    if name in built_in_machines() or name not in built_in_profiles():
        try:
            machine = load_machine(name)
        except InvalidArgument:
            pass  # it may be the name of an engine's profile
        else:
            return priors_of(load_profile(machine.engine), machine)
    return priors_of(load_profile(name))
