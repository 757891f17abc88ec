"""Figures of the papers, made again: what they say beside what comes out here."""

from pinyon.reproduction.elsewhere import ELSEWHERE, NOT_MADE
from pinyon.reproduction.figure import Basis, Claim, Column, Figure, Result
from pinyon.reproduction.figures import FIGURES
from pinyon.reproduction.workload import SOURCES, Workload

__all__ = ["ELSEWHERE", "FIGURES", "NOT_MADE", "SOURCES", "Basis", "Claim", "Column", "Figure", "Result", "Workload"]
