"""Fits of a day by hour and category, from which the next day may start.

"KVCache cache in the wild" appendix A.1: the reuse probability of a category at one time of day is similar between
workdays, so yesterday's log predicts today's reuse. Fits are by hour as in its Fig. 29, since day and night differ
(Fig. 15)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pinyon.eviction.fit import UNKNOWN, Fit

HOURS = 24
HOUR_S = 3600.0
CATEGORIES_MAX = 64
"""The greatest number of categories in an hour; the paper has "in the range of tens" (§4.2)."""
_CATEGORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}/[0-9]{1,7}", re.ASCII)


@dataclass(frozen=True, slots=True)
class DayFits:
    """The fits of a day. As text: one line ``HOUR:CATEGORY@SHARE@SECONDS;...|HOUR:...``, for a policy's option."""

    hours: Mapping[int, Mapping[str, Fit]]
    """The fits by category of each known hour, 0 to 23; ``""`` is all categories together."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` if an hour, category or number is out of bounds."""
        for hour, fits in self.hours.items():
            if not 0 <= hour < HOURS:
                raise ValueError(f"fits are for hours from 0 to {HOURS - 1}, got {hour}")
            if len(fits) > CATEGORIES_MAX:
                raise ValueError(f"fits of hour {hour} have {len(fits)} categories; {CATEGORIES_MAX} are allowed")
            for category, fit in fits.items():
                where = f"hour {hour}, {category or 'all'!r:.60}"
                if category != UNKNOWN and not _CATEGORY.fullmatch(category):
                    raise ValueError(f"fits of {where}: a category is TYPE/TURN")
                if not (0 <= fit.share <= 1 and 1e-3 <= fit.mean_s <= 1e9):
                    raise ValueError(f"fits of {where}: a share from 0 to 1 and seconds from 0.001 to 1e9 are needed")

    def __bool__(self) -> bool:
        return bool(self.hours)

    def at(self, since_midnight_s: float) -> Mapping[str, Fit]:
        """Returns the fits of the hour, whatever the day; empty if the hour is not known."""
        return self.hours.get(int(since_midnight_s // HOUR_S) % HOURS, {})

    def __str__(self) -> str:
        return "|".join(
            f"{hour}:" + ";".join(f"{category}@{share:.4g}@{mean_s:.4g}" for category, (share, mean_s) in fits.items())
            for hour, fits in self.hours.items()
        )

    @classmethod
    def of_text(cls, text: str) -> DayFits:
        """Returns the fits that a text describes. Raises ``ValueError`` if it is malformed."""
        hours: dict[int, dict[str, Fit]] = {}
        for part in text.split("|") if text else ():
            hour, _, fits = part.partition(":")
            try:
                several = [each.split("@") for each in fits.split(";")]
                hours[int(hour)] = {category: Fit(float(share), float(mean_s)) for category, share, mean_s in several}
            except ValueError:
                raise ValueError(
                    f"fits are HOUR:CATEGORY@SHARE@SECONDS;...|HOUR:... or, for commands and services, a file; "
                    f"got {part!r:.60}"
                ) from None
        return cls(hours)

    def json(self) -> dict[str, Any]:
        """Returns the fits as a JSON value for a readable file, as :meth:`of_json` takes it."""
        return {
            "hours": {
                str(hour): {category: fit._asdict() for category, fit in fits.items()}
                for hour, fits in self.hours.items()
            }
        }

    @classmethod
    def of_json(cls, text: str) -> DayFits:
        """Returns the fits of a JSON object with ``hours`` and maybe more. Raises ``ValueError`` for other text."""
        try:
            found = json.loads(text)
        except RecursionError:
            raise ValueError("no JSON object with hours: nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"no JSON: {error}") from None
        hours = found.get("hours") if isinstance(found, dict) else None
        if not isinstance(hours, dict) or not hours:
            raise ValueError("no JSON object with hours")
        return cls({_hour(hour): _fits(hour, fits) for hour, fits in hours.items()})


NO_FITS = DayFits({})


def _hour(text: str) -> int:
    if text not in map(str, range(HOURS)):
        raise ValueError(f"fits are for hours from 0 to {HOURS - 1}, got {text!r:.60}")
    return int(text)


def _fits(hour: str, found: object) -> dict[str, Fit]:
    if not isinstance(found, dict) or not all(_is_fit(each) for each in found.values()):
        raise ValueError(f"fits of hour {hour} are no objects with share and mean_s, both numbers from 0 to 1e9")
    return {category: Fit(float(each["share"]), float(each["mean_s"])) for category, each in found.items()}


def _is_fit(found: object) -> bool:
    return (
        isinstance(found, dict)
        and found.keys() == {"share", "mean_s"}
        and all(type(value) in (int, float) and 0 <= value <= 1e9 for value in found.values())
    )
