"""The profiles' traces against the papers' statistics, and against the docs' account of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.traces.published import STATISTICS, measured

DOCS = Path(__file__).resolve().parents[3] / "docs" / "notebook" / "traces-published.md"


@pytest.mark.parametrize("name", STATISTICS)  # one test each, so that its trace is made once
def test_published_statistics(name: str) -> None:
    trace = measured(name)
    told = DOCS.read_text()
    wrong = []
    for statistic in STATISTICS[name]:
        seen = statistic.of(trace)
        line = statistic.line(seen)
        print(line)
        if statistic.met(seen) == bool(statistic.because):
            wrong.append(f"{'met' if statistic.because else 'not met'}: {line}")
        if line not in told:
            wrong.append(f"not so in {DOCS.name}: {line}")
    assert not wrong, "\n".join(wrong)
