"""What the profiles' traces have of what the papers print, and that the docs say it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.traces.published import STATISTICS, measured

DOCS = Path(__file__).resolve().parents[3] / "docs" / "notebook" / "traces-published.md"


@pytest.mark.parametrize("name", STATISTICS)  # one test each: its trace is made once
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
