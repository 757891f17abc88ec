"""The clients: what is installed, which command runs, and what its report must say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.process import ROOT
from tests.clients.environment import Environment, Step

HERE = Path(__file__).resolve().parent
CHECKPOINT = ROOT / "tests" / "data" / "golden_text" / "llama-bytes-bos"
MODEL = "tiny"
REQUESTS = 12
VLLM_REQUESTS = 20
INPUT_TOKENS = 64
OUTPUT_TOKENS = 8
LOG_PROBABILITIES = [-43.4, -42.61, -22.57, -24.82, -54.45, -28.8, -22.8, -31.72]
"""Log-probabilities of the choices in ``lm_eval/questions.jsonl``, in order, by transformers in float32."""


class Wrong(Exception):
    """The error of a client, in one line."""


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise Wrong(f"{what}: {found}, not {wanted}")


@dataclass(frozen=True)
class Target:
    """The server for a client, a scratch folder that is deleted afterwards, and the checkpoint that is served."""

    url: str
    scratch: Path
    checkpoint: Path = CHECKPOINT

    def json(self, pattern: str) -> Any:
        """Returns the one file below ``scratch`` with that name, as JSON."""
        return json.loads(self._text(pattern))

    def json_lines(self, pattern: str) -> list[Any]:
        """Returns the one file below ``scratch`` with that name, which has a JSON value on each line."""
        return [json.loads(line) for line in self._text(pattern).splitlines()]

    def _text(self, pattern: str) -> str:
        files = list(self.scratch.rglob(pattern))
        expect(f"files {pattern}", len(files), 1)
        return files[0].read_text()


@dataclass(frozen=True)
class Client:
    """One client: ``command`` is a program of the environment; ``report`` reads its results after exit status 0, or
    raises :class:`Wrong`, or what reading JSON raises."""

    environment: Environment
    command: Callable[[Target], Sequence[str]]
    report: Callable[[Target], str]
    quick: bool = False
    """True if it installs within a minute."""

    @property
    def package(self) -> str:
        """The client with its version: the first requirement of the environment with its name."""
        wanted = [requirement for step in self.environment.steps for requirement in step.requirements]
        return next(each for each in wanted if each.startswith(self.environment.name))


def _script(package: str, version: str) -> Client:
    name = f"ask_{package.partition('-')[0]}.py"
    environment = Environment(package, (Step((f"{package}=={version}",)),))
    return Client(
        environment, lambda target: ["python", str(HERE / name), target.url, MODEL], lambda _: name, quick=True
    )


def _lm_eval(target: Target) -> Sequence[str]:
    for task in (HERE / "lm_eval").glob("*.yaml"):
        where = f'dataset_kwargs:\n  data_files:\n    test: "{HERE / "lm_eval" / "questions.jsonl"}"\n'
        (target.scratch / task.name).write_text(task.read_text() + where)
    arguments = f"model={MODEL},base_url={target.url}/v1/completions,tokenizer={target.checkpoint},num_concurrent=4"
    return [
        *("lm_eval", "run", "--model", "local-completions", "--model_args", f"{arguments},max_length=512"),
        *("--tasks", "pinyon_choice,pinyon_text", "--include_path", str(target.scratch)),
        *("--output_path", str(target.scratch / "out"), "--log_samples"),
    ]


def _lm_eval_report(target: Target) -> str:
    choices = target.json_lines("samples_pinyon_choice_*.jsonl")
    found = [round(float(each[0][0]), 2) for sample in choices for each in sample["resps"]]
    if target.checkpoint == CHECKPOINT:
        expect("log-probabilities of the choices", found, LOG_PROBABILITIES)
    else:
        expect("log-probabilities of the choices", len(found), len(LOG_PROBABILITIES))
    texts = [sample["resps"][0][0] for sample in target.json_lines("samples_pinyon_text_*.jsonl")]
    expect("texts that are not empty", sum(map(bool, texts)), len(LOG_PROBABILITIES) // 2)
    accuracy = target.json("results_*.json")["results"]["pinyon_choice"]["acc,none"]
    return f"acc {accuracy} with the log-probabilities of {len(found)} choices, {len(texts)} texts"


def _guidellm(endpoint: str) -> Client:
    def command(target: Target) -> Sequence[str]:
        return [
            *("guidellm", "run", "--backend"),
            f"kind=openai_http,target={target.url},model={MODEL},request_format={endpoint}",
            *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={target.checkpoint}"),
            *("--output", f"kind=json,path={target.scratch / 'guidellm.json'}", "--disable-progress"),
        ]

    return Client(GUIDELLM, command, _guidellm_report)


def _guidellm_report(target: Target) -> str:
    benchmark = target.json("guidellm.json")["benchmarks"][0]
    made = benchmark["scheduler_metrics"]["requests_made"]
    expect("requests", made, {"successful": REQUESTS, "incomplete": 0, "errored": 0, "total": REQUESTS})
    # A benchmark may leave out a request at either end of its window.
    measured, metrics = benchmark["metrics"]["request_totals"]["successful"], benchmark["metrics"]
    expect("more than half of the requests measured", measured > REQUESTS // 2, True)
    read, generated = (metrics[f"{kind}_token_count"]["successful"]["total_sum"] for kind in ("prompt", "output"))
    return f"{REQUESTS} requests made; {_tokens(measured, read, INPUT_TOKENS, generated)}"


def _aiperf(kind: str) -> Client:
    def command(target: Target) -> Sequence[str]:
        return [
            *("aiperf", "profile", "--model", MODEL, "--url", target.url, "--endpoint-type", kind, "--streaming"),
            *("--request-count", str(REQUESTS), "--concurrency", "2", "--ui", "none"),
            *("--tokenizer", str(target.checkpoint)),
            *("--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--output-tokens-mean", str(OUTPUT_TOKENS)),
            *("--extra-inputs", "ignore_eos:true", "--artifact-dir", str(target.scratch / "aiperf")),
        ]

    return Client(AIPERF, command, _aiperf_report)


def _aiperf_report(target: Target) -> str:
    report = target.json("profile_export_aiperf.json")
    expect("errors", report["error_summary"], [])
    expect("requests", report["request_count"]["avg"], REQUESTS)
    expect("requests that failed, in percent", report["request_error_rate"]["avg"], 0)
    read, generated = (report[f"total_usage_{kind}_tokens"]["avg"] for kind in ("prompt", "completion"))
    return _tokens(REQUESTS, read, INPUT_TOKENS, generated)


def _tokens(requests: int, read: float, each: int, generated: float) -> str:
    """Checks the token counts; each prompt has at least ``each`` tokens, less one for an inexact random text."""
    expect("tokens generated", generated, requests * OUTPUT_TOKENS)
    expect("enough tokens read", read >= requests * (each - 1), True)
    return f"{requests} requests, {read:.0f} tokens read, {generated:.0f} generated"


def _vllm(backend: str, endpoint: str) -> Client:
    def command(target: Target) -> Sequence[str]:
        return [
            *("vllm", "bench", "serve", "--backend", backend, "--base-url", target.url, "--endpoint", endpoint),
            *("--model", MODEL, "--tokenizer", str(target.checkpoint), "--dataset-name", "random"),
            *(
                "--num-prompts",
                str(VLLM_REQUESTS),
                "--random-input-len",
                "64",
                "--random-output-len",
                str(OUTPUT_TOKENS),
            ),
            *("--save-result", "--result-dir", str(target.scratch), "--result-filename", "vllm.json"),
        ]

    return Client(VLLM, command, _vllm_report)


def _vllm_report(target: Target) -> str:
    report = target.json("vllm.json")
    expect("requests completed", report["completed"], VLLM_REQUESTS)
    expect("requests failed", report["failed"], 0)
    return _tokens(VLLM_REQUESTS, report["total_input_tokens"], INPUT_TOKENS, report["total_output_tokens"])


TORCH = Step(("torch==2.13.0",))
"""The first step, so that pip takes the build for CPUs, which then satisfies all later requirements."""
_GPU = (
    *("PyNvVideoCodec", "apache-tvm-ffi", "fastsafetensors", "flashinfer-python", "humming-kernels", "instanttensor"),
    *("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvtx", "quack-kernels", "tilelang", "tokenspeed-mla"),
)
VLLM = Environment(
    "vllm",
    (
        TORCH,
        Step(("vllm==0.32.0",), alone=True),
        # Gigabytes that a server needs, but its benchmark never imports.
        Step(needs_of="vllm", without=("torch", "torchaudio", "torchvision", "torchcodec", *_GPU)),
    ),
)
GUIDELLM = Environment("guidellm", (TORCH, Step(("guidellm==0.8.1",))))
AIPERF = Environment("aiperf", (Step(("aiperf==0.13.0",)),))
LM_EVAL = Environment("lm-eval", (Step(("lm-eval[api]==0.4.13", "transformers==5.23.0")),))
CLIENTS: dict[str, Client] = {
    "openai": _script("openai", "3.54.0"),
    "langchain-openai": _script("langchain-openai", "1.7.3"),
    "litellm": _script("litellm", "1.106.2"),
    "lm-eval": Client(LM_EVAL, _lm_eval, _lm_eval_report, quick=True),
    "guidellm-completions": _guidellm("/v1/completions"),
    "guidellm-chat": _guidellm("/v1/chat/completions"),
    "aiperf-completions": _aiperf("completions"),
    "aiperf-chat": _aiperf("chat"),
    "vllm-completions": _vllm("openai", "/v1/completions"),
    "vllm-chat": _vllm("openai-chat", "/v1/chat/completions"),
}
