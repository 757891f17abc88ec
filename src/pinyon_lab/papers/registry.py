"""All figures by name."""

from __future__ import annotations

from pinyon_lab.figures.figure import Figure
from pinyon_lab.papers.dualmap import ablation as dualmap_ablation
from pinyon_lab.papers.dualmap import balance as dualmap_balance
from pinyon_lab.papers.dualmap import elastic as dualmap_elastic
from pinyon_lab.papers.dualmap import serving as dualmap_serving
from pinyon_lab.papers.dualmap import structure as dualmap_structure
from pinyon_lab.papers.feather.batches import FIG3_8, FIG3_9, FIG3_10, FIG3_11
from pinyon_lab.papers.feather.chunks import FIG5_11
from pinyon_lab.papers.feather.costs import FIG5_9, TABLE5_1
from pinyon_lab.papers.feather.kernels import FIG5_8
from pinyon_lab.papers.feather.learning import FIG5_12, FIG5_13, FIG5_14, FIG5_17
from pinyon_lab.papers.feather.load import FIG5_1, FIG5_2
from pinyon_lab.papers.feather.locality import FIG3_2, FIG3_4, FIG3_5, FIG3_6
from pinyon_lab.papers.feather.models import FIG5_6, FIG5_7
from pinyon_lab.papers.feather.offline import TABLE3_1
from pinyon_lab.papers.feather.requests import FIG5_3, FIG5_4, FIG5_5
from pinyon_lab.papers.feather.stalls import FIG5_10, FIG5_15, FIG5_16
from pinyon_lab.papers.mooncake.capacity import FIG1, FIG6, FIG7, FIG15
from pinyon_lab.papers.mooncake.figures import FIG9, FIG10
from pinyon_lab.papers.mooncake.scheduling import FIG5, FIG8, FIG11
from pinyon_lab.papers.mooncake.transfer import EQ2, FIG13, FIG14
from pinyon_lab.papers.mooncake.workloads import TABLE2
from pinyon_lab.papers.skywalker import day as skywalker_day
from pinyon_lab.papers.skywalker import pushing as skywalker_pushing
from pinyon_lab.papers.skywalker import serving as skywalker_serving
from pinyon_lab.papers.skywalker import sharing as skywalker_sharing
from pinyon_lab.papers.wild.ablation import ABLATION
from pinyon_lab.papers.wild.days import FIG29
from pinyon_lab.papers.wild.figures import BY_RATIO
from pinyon_lab.papers.wild.qttft import QTTFT

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
