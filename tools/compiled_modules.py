"""Which modules mypyc compiles: pure ones that decide often, the way of small transfers and the load balancer's, and
what stays Python of them with the reason.

Paths are below ``src/pinyon``, of the laboratory below ``src/pinyon_lab``, of services below ``services``. A module
that is not named here is not compiled, a new one in a room that is named is.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

COMPILED = (
    "core/*.py",
    "placement/*.py",
    "batching/*.py",
    "paging/*.py",
    "eviction/*.py",
    "routing/*.py",
    "decisions/*.py",
    *(f"messages/{name}.py" for name in ("checks", "error", "explanation", "finish_reason", "instance", "logprobs")),
    *(f"messages/{name}.py" for name in ("placement", "request_class", "sampling")),
    *(f"model/{name}.py" for name in ("detokenizer", "markers", "merges", "word_table", "word_tokens")),
    "store/objects.py",
    *(f"runtime/{name}.py" for name in ("log_lines", "outbox", "outgoing", "pace", "tally", "turn_end")),
    *(f"runtime/http2/{name}.py" for name in ("wire", "link", "stream", "connection")),
    *(f"transfer/{name}.py" for name in ("batch", "request", "slicing", "small", "spans", "stats", "submissions")),
    *(f"transfer/links/{name}.py" for name in ("endpoint", "endpoints", "spinner", "stream", "tls")),
    *(f"transfer/memory/{name}.py" for name in ("grant", "table")),
    "transfer/paths/short_way.py",
    "transfer/transports/tcp/*.py",
    *(f"transfer/transports/shm/{name}.py" for name in ("server", "transport", "wire")),
)

# Of the simulator, whatever holds parts that a journal may record stays Python: see decisions/front.py.
LAB = (
    "caches/*.py",
    "policies/*.py",
    *(f"simulator/{name}.py" for name in ("attempt", "host_store", "links", "prefill_reference", "virtual_time")),
)

LEFT_OUT = {
    "*/__init__.py": "a line of text",
    "*/policies.py": "read once: tables of names and lambdas",
    "*/interface.py": "protocols that Python derives from, or isinstance asks for: compiled they allow neither",
    "eviction/policy.py": "as */interface.py",
    "core/journal.py": "puts attributes into objects while it runs",
    "decisions/front.py": "puts a journal's recorder where another class stands, which only Python allows",
    "decisions/growth.py": "is handed what decisions/front.py records",
    "decisions/instance.py": "as decisions/front.py",
    "eviction/lru.py": "an OrderedDict does its work, and policies in Python derive from it",
    "eviction/hazard_table.py": "NumPy does its work",
    "policies/batching.py": "says by annotations what its settings are, which compiled classes do not have",
    "policies/names.py": "as */policies.py",
    "caches/pools.py": "mypyc 2.4 stops at a lambda within a lambda",
    "transfer/transports/shm/cma.py": "takes addresses of what a local variable keeps alive; libc does its work",
}

SERVICES = (
    *("lb/http_*.py", "lb/upstreams/*.py"),
    *(
        f"lb/{name}.py"
        for name in (
            *("admission", "ask", "budget", "clusters", "coalesced", "conductor_session", "dispatcher"),
            *("instances", "key_chains", "labels", "line", "metrics", "models", "openai_fields", "openai_format"),
            *("openai_parse", "prompts", "rate_limits", "request", "room", "seekers", "time_limit"),
            *("timer_wheel", "ways", "worker_session", "worker_sessions", "worker_stream"),
        )
    ),
    *(f"conductor/{name}.py" for name in ("intake", "membership", "metrics", "placing", "sessions", "turns")),
    *(
        f"worker/{name}.py"
        for name in (
            *("abort", "convert", "engine_loop", "ledger", "load", "metrics", "orders", "parts", "report", "served"),
            *("step_members", "step_observer", "decode/*", "engines/checks", "engines/instant", "engines/paced"),
            *("engines/uniform", "kv/cache", "prefill/job", "prefill/prefills"),
        )
    ),
)
"""Where each request is, of instances and of ``--upstream``: most of what one costs the load balancer. What messages to
the conductor do. And a request's way through a worker, up to the engine."""

SERVICES_LEFT_OUT = {
    "*/__init__.py": "a line of text",
    "*/app.py": "run once",
    "lb/http_gzip.py": "an asynchronous generator, of which mypyc knows nothing",
}


def compiled_services(services: Path, patterns: Sequence[str] = SERVICES) -> list[Path]:
    """The files, with the folder ``services``, in order of their names."""
    names = {path.relative_to(services).as_posix() for pattern in patterns for path in services.glob(pattern)}
    return [
        Path(services.name, name)
        for name in sorted(names)
        if not any(fnmatch(name, each) for each in SERVICES_LEFT_OUT)
    ]


def compiled_modules(src: Path, patterns: Sequence[str] = COMPILED) -> list[Path]:
    """The files, relative to ``src``, in order of their names. A test may ask for some rooms alone; the laboratory's
    are among all, where it is."""
    found = []
    for name, chosen in ("pinyon", patterns), ("pinyon_lab", LAB if patterns == COMPILED else ()):
        package = src / name
        names = {path.relative_to(package).as_posix() for pattern in chosen for path in package.glob(pattern)}
        found += [Path(name, each) for each in sorted(names) if not any(fnmatch(each, out) for out in LEFT_OUT)]
    return found
