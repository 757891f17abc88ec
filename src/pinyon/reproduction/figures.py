"""All figures by name."""

from __future__ import annotations

from pinyon.reproduction import (
    dualmap_ablation,
    dualmap_balance,
    dualmap_elastic,
    dualmap_serving,
    dualmap_structure,
    skywalker_day,
    skywalker_pushing,
    skywalker_serving,
    skywalker_sharing,
)
from pinyon.reproduction.feather_batches import FIG3_8, FIG3_9, FIG3_10, FIG3_11
from pinyon.reproduction.feather_chunks import FIG5_11
from pinyon.reproduction.feather_costs import FIG5_9, TABLE5_1
from pinyon.reproduction.feather_kernels import FIG5_8
from pinyon.reproduction.feather_learning import FIG5_12, FIG5_13, FIG5_14, FIG5_17
from pinyon.reproduction.feather_load import FIG5_1, FIG5_2
from pinyon.reproduction.feather_locality import FIG3_2, FIG3_4, FIG3_5, FIG3_6
from pinyon.reproduction.feather_models import FIG5_6, FIG5_7
from pinyon.reproduction.feather_offline import TABLE3_1
from pinyon.reproduction.feather_requests import FIG5_3, FIG5_4, FIG5_5
from pinyon.reproduction.feather_stalls import FIG5_10, FIG5_15, FIG5_16
from pinyon.reproduction.figure import Figure
from pinyon.reproduction.mooncake import FIG9, FIG10
from pinyon.reproduction.mooncake_capacity import FIG1, FIG6, FIG7, FIG15
from pinyon.reproduction.mooncake_scheduling import FIG5, FIG8, FIG11
from pinyon.reproduction.mooncake_transfer import EQ2, FIG13, FIG14
from pinyon.reproduction.mooncake_workloads import TABLE2
from pinyon.reproduction.wild import BY_RATIO
from pinyon.reproduction.wild_ablation import ABLATION
from pinyon.reproduction.wild_days import FIG29
from pinyon.reproduction.wild_qttft import QTTFT

__all__ = ["FIGURES"]

_MOONCAKE = FIG1, EQ2, FIG5, FIG6, FIG7, FIG8, FIG9, FIG10, FIG11, FIG13, FIG14, FIG15, TABLE2
_DUALMAP = (
    dualmap_balance.FIG1,
    dualmap_serving.FIG3,
    dualmap_serving.FIG4,
    dualmap_ablation.FIG5,
    dualmap_structure.FIG6,
    dualmap_balance.FIG8,
    dualmap_balance.FIG10,
    dualmap_balance.FIG11,
    dualmap_elastic.FIG12,
    dualmap_elastic.FIG13,
    dualmap_structure.FIG15,
    dualmap_structure.A4,
    dualmap_structure.TABLE1,
    dualmap_elastic.A6,
)
_WILD = *BY_RATIO, QTTFT, ABLATION, FIG29
_FEATHER = (
    *(FIG3_2, FIG3_4, FIG3_5, FIG3_6, FIG3_8, FIG3_9, FIG3_10, FIG3_11, TABLE3_1),
    *(FIG5_1, FIG5_2, FIG5_3, FIG5_4, FIG5_5, FIG5_6, FIG5_7),
    *(FIG5_8, FIG5_9, FIG5_10, FIG5_11, TABLE5_1),
    *(FIG5_12, FIG5_13, FIG5_14, FIG5_15, FIG5_16, FIG5_17),
)
_SKYWALKER = (
    skywalker_day.FIG3,
    skywalker_pushing.FIG4B,
    skywalker_sharing.FIG5,
    skywalker_sharing.FIG6,
    skywalker_serving.FIG8,
    skywalker_pushing.FIG9,
    skywalker_pushing.FIG10,
)

FIGURES: dict[str, Figure] = {figure.name: figure for figure in (*_MOONCAKE, *_DUALMAP, *_WILD, *_FEATHER, *_SKYWALKER)}
