"""The papers' figures, made again: the papers' claims beside our results."""

from pinyon_lab.figures.figure import Basis, Claim, Column, Figure, Result
from pinyon_lab.figures.workload import SOURCES, Workload
from pinyon_lab.papers import dualmap, feather, mooncake, skywalker, wild
from pinyon_lab.papers.elsewhere import ELSEWHERE, NOT_MADE

__all__ = ["ELSEWHERE", "FIGURES", "NOT_MADE", "SOURCES", "Basis", "Claim", "Column", "Figure", "Result", "Workload"]

FIGURES = {each.name: each for paper in (mooncake, dualmap, wild, feather, skywalker) for each in paper.FIGURES}
