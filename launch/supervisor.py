"""A supervisor that restarts processes that died or hang, later each time and not for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from launch.process import START_S, ServiceProcess
from launch.redis_server import RedisServer
from launch.restarts import QUICK_DEATHS_MAX, Restarts, how_it_ended
from pinyon.core.errors import PinyonError

LOOK_S = 0.2
"""The time between two looks at the processes."""
LOG_TAIL_BYTES = 4096
SHOWN_CHARS = 200


class Supervised(Protocol):
    """A cluster, or another owner of services that are restarted."""

    @property
    def services(self) -> Mapping[str, ServiceProcess]: ...

    @property
    def redis(self) -> RedisServer | None: ...

    def restart(self, name: str, wait: bool = True) -> ServiceProcess: ...


@dataclass(slots=True)
class _Watched:
    restarts: Restarts
    due_s: float | None = None
    """The time of the restart of a dead process; None if no restart is planned."""
    ready_by_s: float | None = None
    """The time by which a started process must serve; None if it already does or is dead."""
    served: bool = True
    """True if the process has served since its last start."""
    given_up: bool = False


@dataclass(slots=True)
class Supervisor:
    """The supervisor of a cluster: call ``tick`` every ``LOOK_S``, from the thread that started the cluster.

    ``say`` receives a line about each event. ``stopped`` returns true when the cluster is to end; it cuts short a start
    of Redis, which blocks.
    """

    cluster: Supervised
    say: Callable[[str], None]
    stopped: Callable[[], bool]
    started_s: float
    start_s: float = START_S
    """The time within which a service must serve after its start."""
    quick_deaths_max: int = QUICK_DEATHS_MAX
    given_up: list[str] = field(default_factory=list)
    """The messages about processes that are not restarted any more."""
    _watched: dict[str, _Watched] = field(default_factory=dict)

    def tick(self, now_s: float) -> None:
        """Looks at every process once; never waits for a service."""
        self._tick_redis(now_s)
        for service in self.cluster.services.values():
            self._tick_service(service, now_s)

    def _of(self, name: str) -> _Watched:
        return self._watched.setdefault(name, _Watched(Restarts(self.started_s, self.quick_deaths_max)))

    def _tick_service(self, service: ServiceProcess, now_s: float) -> None:
        watched = self._of(service.name)
        if watched.given_up:
            return
        if watched.due_s is not None:
            if now_s >= watched.due_s:
                watched.due_s = None
                watched.served = False
                watched.restarts.started(now_s)
                try:
                    self.cluster.restart(service.name, wait=False)
                except OSError as error:
                    self._plan(str(service), watched, f"cannot be started: {error}", service.log, now_s)
                    return
                watched.ready_by_s = now_s + self.start_s
        elif not service.alive:
            watched.ready_by_s = None
            code = service.process.returncode if service.process is not None else None
            how = how_it_ended(code) + (_last_words(service.log) if code and code > 0 else "")
            self._plan(str(service), watched, how, service.log, now_s)
        elif watched.ready_by_s is not None:
            self._await_ready(service, watched, now_s)
        elif service.hangs(now_s):
            self.say(f"{service} hangs: killed")
            service.kill()

    def _await_ready(self, service: ServiceProcess, watched: _Watched, now_s: float) -> None:
        try:
            ready = service.announced(0)
        except PinyonError:  # the service has ended, or is about to
            watched.ready_by_s = None
            return
        if ready:
            watched.ready_by_s = None
            watched.served = True
            endpoints = " ".join(f"{key}={value}" for key, value in service.endpoints.items())
            self.say(f"{service.name} is back: pid {service.pid} {endpoints}")
        elif watched.ready_by_s is not None and now_s >= watched.ready_by_s:
            self.say(f"{service} was not ready within {self.start_s:g} s")
            service.kill()

    def _tick_redis(self, now_s: float) -> None:
        redis = self.cluster.redis
        if redis is None or redis.process is None:  # no Redis, or not our process
            return
        watched = self._of("redis")
        if watched.given_up or redis.process.poll() is None:
            return
        if watched.due_s is None:
            self._plan("redis", watched, how_it_ended(redis.process.returncode), redis.log_path, now_s)
        elif now_s >= watched.due_s:
            watched.due_s = None
            watched.restarts.started(now_s)
            try:
                redis.start(self.stopped)
            except OSError as error:
                self._plan("redis", watched, f"cannot be started: {error}", redis.log_path, now_s)
                return
            except PinyonError:
                return  # the next look finds it dead
            if not self.stopped():
                self.say(
                    f"redis is back: pid {redis.process.pid}, empty, for it keeps nothing on disk; "
                    "store nodes list what they hold again"
                )

    def _plan(self, who: str, watched: _Watched, how: str, log_path: Path | None, now_s: float) -> None:
        where = "" if log_path is None else f"; its log: {log_path}"
        pause_s = watched.restarts.died(now_s, watched.served)
        if pause_s is None:
            watched.given_up = True
            self.given_up.append(
                f"{who} {how}: given up after {self.quick_deaths_max + 1} quick deaths in a row{where}"
            )
            self.say(self.given_up[-1])
            return
        watched.due_s = now_s + pause_s
        self.say(f"{who} {how}: started again in {pause_s:g} s{where}")


def _last_words(path: Path | None) -> str:
    """Returns the last line of a log, in brackets; empty if there is none."""
    if path is None:
        return ""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - LOG_TAIL_BYTES))
            lines = deque((line for line in log.read().decode(errors="replace").splitlines() if line.strip()), 1)
    except OSError:
        return ""
    return f" ({lines[0].strip()[:SHOWN_CHARS]})" if lines else ""
