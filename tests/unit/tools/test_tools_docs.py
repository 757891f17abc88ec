"""Tests that the options, files and links with anchors that the pages name exist."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import string
from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

from launch.__main__ import command_line, option_faults
from launch.__main__ import main as services
from launch.process import ROOT
from pinyon.cli import main as pinyon
from pinyon.cli.main import _parser
from pinyon.runtime.setting_sources import load_settings
from pinyon.runtime.settings import ServiceSettings
from tests.chaos.leaving import HOPS
from tests.idle import IDLE_GAUGES

PAGES = [
    *sorted((ROOT / "docs").glob("**/*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "ARCHITECTURE")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_FENCE = re.compile(r"^[ \t]*(?:```|~~~).*$", re.MULTILINE)
FENCES = {"```", *(f"```{language}" for language in ("sh", "python", "json", "toml", "yaml"))}
SET = re.compile(r"[A-Z_]+=.*", re.DOTALL)
"""A variable that is set for a command."""
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?:src|services|launch|tests|bench|tools|deploy|docs|protos|requirements)/[\w./-]+")
PATTERN = re.compile(r"[A-Z]{3,}")
"""A placeholder in a path, where the reader's own name stands."""
FOREIGN = {
    "--enable-metrics",
    "--revision",
    "--kv-events-config",
    "--page-size",
    "--max-model-len",
    "--max-num-seqs",
    "--metrics",
    "--pdb",
    "--durations",
    "--no-deps",
    "--tls-auth-clients",
    *("--kv-transfer-config", "--enable-prefix-caching", "--block-size", "--dtype", "--kv-cache-dtype"),
    *("--quantization", "--max-num-batched-tokens", "--enforce-eager", "--async-scheduling"),
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--decode-context-parallel-size"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser", "--enable-lora"),
    *("--scheduling-policy", "--stream-interval", "--speculative-config", "--generation-config"),
    *("--override-generation-config", "--ssl-certfile", "--enable-sleep-mode", "--skip-tokenizer-init"),
    "--enable-hierarchical-cache",
}
"""The options of other projects' programs."""
ELSEWHERE = {"curl", "docker", "docker-compose", "export", "grpcurl", "sglang", "vllm"}
"""The programs of readers' machines."""
TYPED = {"./dev", "cd", "git", "pinyon", "pip", "python", "python3", "sh"}
OWN = {"mine.yaml"}
"""The compose files of readers."""
MADE = {"deploy/.env", "tests/chaos/results"}
"""The files that users of a checkout make."""


def commands(page: str) -> Iterator[list[str]]:
    """Yields the words of each command in the text, without environment variables and comments."""
    blocks = [block for language, block in BLOCK.findall(page) if language in ("", "sh")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for text in [*lines, *SPAN.findall(BLOCK.sub("", page))]:
        words = re.sub(r"(?:^|\s)#.*", "", text).split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
        if words:
            yield words


def told(main: Callable[[list[str]], int], words: list[str]) -> str:
    """Returns the help of a command; empty if there is no such command."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit):
        main([*words, "--help"])
    return output.getvalue()


def sources(*patterns: str) -> str:
    return "".join(path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern)))


@cache
def options(program: str, *words: str) -> frozenset[str] | None:
    """Returns the options of a command, or None if it is no command of this repository."""
    if program in ("pinyon", ".venv/bin/pinyon"):
        text = told(pinyon, [*words])
    elif program == "./dev" and words[0] == "bench":
        text = sources("bench/__main__.py", "bench/report.py", *(f"bench/{name}*.py" for name in words[1:]))
    elif program == "./dev" and words[0] not in ("up", "demo"):
        text = sources("dev", "tests/chaos/*.py", "tests/clients/*.py", "tests/vopr/runner.py")
    elif program == "./dev":
        text = told(services, [*words[:1]])
    else:
        return None
    return frozenset(re.findall(r"--[a-z][a-z0-9-]+", text)) | {"--help"}


def settings_of(service: str) -> type[ServiceSettings]:
    module = importlib.import_module(f"services.{service}.settings")
    (found,) = (
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, ServiceSettings) and each.__module__ == module.__name__
    )
    return found


@cache
def settings(service: str) -> frozenset[str]:
    names = [name.replace("_", "-") for name in settings_of(service).model_fields]
    commands = ["--help", "--help-all", "--version", "--config"]
    return frozenset([f"--{name}" for name in names] + [f"--no-{name}" for name in names] + commands)


def has(words: list[str]) -> frozenset[str] | None:
    python = words[0].removeprefix(".venv/bin/") == "python" and words[1:2] == ["-m"]
    if python and len(words) > 2 and re.fullmatch(r"services(\.[a-z]+)?", words[2]):
        if "." in words[2]:
            return settings(words[2].partition(".")[2])
        return options("./dev", *words[3:4])
    plain = []
    for word in words[1:3]:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", word):
            break
        plain.append(word)
    return options(words[0], *plain) if plain else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_show_options_that_commands_have(page: Path) -> None:
    wrong = []
    for words in commands(page.read_text()):
        known = has(words)
        if known is not None:
            given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
            wrong += [f"{' '.join(words)}: {option}" for option in sorted(given - known)]
    assert not wrong


@cache
def anybodys() -> frozenset[str]:
    """Returns the options of all commands: those of services and their launchers, and all that sources name."""
    services_ = [path.parent.name for path in ROOT.glob("services/*/settings.py")]
    texts = sources(
        "src/pinyon*/cli/*.py", "bench/*.py", "dev", "tests/c*/*.py", "tests/repeat.py", "tools/*.sh"
    ) + told(services, ["up"])
    return frozenset(re.findall(r"--[a-z][a-z0-9-]+", texts)).union(*map(settings, services_))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_that_pages_explain_are_somebodys(page: Path) -> None:
    named = {words[0].partition("=")[0] for words in commands(page.read_text()) if re.match(r"--[a-z]", words[0])}
    assert not named - anybodys() - FOREIGN


def test_an_option_that_is_not_there_is_found() -> None:
    assert "--instances" in (has(["pinyon", "simulate", "TRACE", "--instances", "8"]) or ())
    assert "--no-such" not in (has(["pinyon", "simulate", "TRACE", "--no-such", "8"]) or ())
    for python in ("python", ".venv/bin/python"):
        known = has([python, "-m", "services.lb", "--place-by", "routing"]) or ()
        assert "--place-by" in known
        assert "--no-such" not in known
    assert "--no-such" not in anybodys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_name_files_that_are_there(page: Path) -> None:
    named = {path for span in SPAN.findall(page.read_text()) for path in FILE.findall(span) if span.startswith(path)}
    assert not [path for path in sorted(named - MADE) if not PATTERN.search(path) and not (ROOT / path).exists()]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the anchors of the page's headings, as GitHub makes them, and its named anchors."""
    text = page.read_text()
    unlike = string.punctuation.replace("-", "").replace("_", "") + "“”’–—→·≥§"
    heads = [head.lower().replace("`", "") for head in re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)]
    made = [head.translate({ord(each): None for each in unlike}).replace(" ", "-") for head in heads]
    return frozenset(made) | frozenset(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_pages_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall(page.read_text()):
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = page if not name else (page.parent / name).resolve()
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


def test_the_table_of_callers_has_every_method() -> None:
    page = (ROOT / "docs" / "use" / "security.md").read_text()
    table = page.partition("## Who may call what")[2].partition("\n## ")[0]
    protos = sources("protos/**/*.proto")
    known = set(re.findall(r"`(?:(\w+)\.)?(\w+)`", table))
    for service, body in re.findall(r"^service (\w+) {(.*?)^}", protos, re.MULTILINE | re.DOTALL):
        whole = service in ("PeerService", "AdminService")
        lacking = [m for m in re.findall(r"rpc (\w+)", body) if (service if whole else "", m) not in known]
        assert not lacking, service


def test_the_gauges_of_an_idle_suite_are_those_of_the_tests() -> None:
    page = (ROOT / "docs" / "use" / "operations.md").read_text()
    listed = page.partition("**Nothing may be left on an idle suite.**")[2].partition("\n## ")[0]
    named = []
    for before, choices, after in re.findall(r"`(pinyon_\w+)(?:{([\w,]+)})?(\w*)`", listed):
        named += [f"{before}{choice}{after}" for choice in choices.split(",")]
    assert sorted(named) == sorted(IDLE_GAUGES)
    assert {gauge for gauges in HOPS.values() for gauge in gauges} <= set(IDLE_GAUGES)


def shells(page: Path) -> Iterator[str]:
    """Yields the text to type: blocks for a shell, and the words behind ``$`` in blocks that show answers."""
    for language, block in BLOCK.findall(page.read_text()):
        if language == "sh":
            yield block
        elif not language:
            yield "".join(f"{line[2:]}\n" for line in block.splitlines() if line.startswith("$ "))


def whole_lines(page: Path) -> Iterator[list[str]]:
    """Yields the words of each line to copy; a quotation or a backslash continues the line."""
    for block in shells(page):
        text = ""
        for line in block.replace("\\\n", " ").splitlines():
            text += line + "\n"
            try:
                words = shlex.split(text, comments=True)
            except ValueError:  # a quotation goes on
                continue
            text = ""
            if words:
                yield words
        assert not text, f"{page}: a quotation without an end: {text}"


def lines_to_copy(page: Path) -> Iterator[list[str]]:
    """Yields each line up to its first pipe or the like, without variables that are set for it."""
    for words in whole_lines(page):
        while words and SET.fullmatch(words[0]):
            words.pop(0)
        if words:
            yield list(takewhile(lambda word: word not in ("|", ">", "<", "&", "&&"), words))


def of_reader(words: list[str]) -> bool:
    """Returns whether the words name a module or a file that the reader made before."""
    return any(name in word for word in words for name in ("my_lab.", "fits.json", "pinyon.toml"))


def is_command(line: str) -> bool:
    word, _, more = line.partition(" ")
    return bool(more) and (word in ELSEWHERE | TYPED or word.startswith((".venv/bin/", "tools/")))


def unread(page: str) -> list[str]:
    """Returns the fences of a kind that no test reads, and the commands in blocks that are not for a shell."""
    wrong = [fence for fence in ANY_FENCE.findall(page) if fence not in FENCES]
    for language, block in BLOCK.findall(page):
        if language != "sh":
            wrong += [line for line in block.splitlines() if is_command(line.strip())]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_stand_where_these_tests_read_them(page: Path) -> None:
    assert not unread(page.read_text()), "commands are in ```sh; with their answers in ```, behind $"


@pytest.mark.parametrize(
    "page",
    [
        "```bash\n./dev up\n```\n",
        "```console\n$ ./dev up\n```\n",
        "- a list\n\n  ```sh\n  ./dev up\n  ```\n",
        "~~~\n./dev up\n~~~\n",
        "```\n./dev up --lbs 2\n```\n",
        "```\n.venv/bin/pinyon top\n```\n",
        "```yaml\ndocker-compose up -d\n```\n",
    ],
)
def test_command_that_no_test_reads_is_found(page: str) -> None:
    assert unread(page)


def test_transcript_is_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\n$ A_B=1 ./dev up --lbs 2\nall is up\n```\n\n```sh\n./dev \\\n    check | tail\n```\n")
    assert not unread(page.read_text())
    assert [*lines_to_copy(page)] == [["./dev", "up", "--lbs", "2"], ["./dev", "check"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_to_copy_begin_with_what_is_there(page: Path) -> None:
    for words in lines_to_copy(page):
        assert words[0] in ELSEWHERE or (ROOT / words[0]).exists() or words[0].startswith(".venv/bin/"), words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_to_copy_parse(page: Path) -> None:
    for words in lines_to_copy(page):
        if words[:2] == ["./dev", "up"]:
            assert not option_faults(command_line().parse_args(words[1:])), words
        elif words[0] == ".venv/bin/pinyon":
            _parser().parse_args(words[1:])
        elif words[:2] == [".venv/bin/python", "-m"] and words[2].startswith("services.") and not of_reader(words):
            load_settings(settings_of(words[2].removeprefix("services.")), words[3:], {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_of_compose_are_whole(page: Path) -> None:
    """The lines name the project and existing files, and set the variables that these files require."""
    for words in whole_lines(page):
        command = [word for word in words if not SET.fullmatch(word)]
        if command[:1] != ["docker-compose"]:
            continue
        assert command[1:5] == ["-p", "pinyon", "-f", "deploy/compose.yaml"], words
        options = takewhile(lambda pair: pair[0] == "-f", zip(command[3::2], command[4::2], strict=False))
        files = [ROOT / file for _, file in options if file not in OWN]
        wanted = {name for file in files for name in re.findall(r"\$\{(\w+):\?", file.read_text())}
        assert wanted <= {word.partition("=")[0] for word in words}, words
