"""Checks the prose that stands in code: ``python -m tools.plain_english [PATH ..]``.

A docstring of a function begins with what the function does ("Returns the instance that ..."). A docstring of anything
else begins with a noun phrase or is a whole sentence. No sentence has more than 30 words, no test's name more than 60
characters, and a docstring ends on its last line. Without paths, the tool checks what :data:`CHECKED` lists, as
``./dev check`` does."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKED = (
    "src",
    "services",
    "launch",
    "tests",
    "tools",
    "bench",
    "docs",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
"""Files and folders that are looked at, without what is generated."""
WORDS_MAX = 30
TEST_NAME_MAX = 60
LAST_CHARS = 117
"""The characters of a docstring's last line that leave room for its closing quotes."""
GENERATED = ROOT / "src" / "pinyon" / "api"


def words(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


OPENERS = words(
    """about above across after again against along also although always among and anybody anyone as at back because
    before behind being below beside besides between beyond but by during else even everybody everyone everything except
    few for from here how however if in into it its itself less like likewise many may meanwhile more most much neither
    never no nobody none nor not nothing of off on once ones only or others otherwise out over per rather same since so
    somebody someone something somewhere still such than that their theirs them themselves then there these they this
    those though through till to too toward under unless until unlike up upon very what whatever when whenever where
    wherever whether which whichever while who whoever whom whose why with within without yes yet"""
)
"""Words with which a fragment begins, not a noun phrase."""
DETERMINERS = words("all another any both each either every one other same several some the")
"""Words with which a noun phrase begins, and a fragment where no noun follows ("one that ...", "the same")."""
PRONOUNS = words("are is one ones other others rest same was were")
VERBS = words(
    """abandon abort accept account acknowledge acquire adapt add adjust admit adopt advance agree allocate allow
    announce answer append apply approve arrange ask assemble assert assign attach attempt attend authenticate avoid
    await balance become begin bind block book boot borrow bound break bring broadcast build bump bypass calculate
    call cancel capture carry catch cause change charge check choose claim clamp classify clean clear close collect
    combine come commit compare compile complete compose compress compute confirm connect consume contain continue
    convert cool copy correct count cover create credit cut debit decay decide declare decode decrease decrypt deduct
    default defer define delay delete deliver demand deregister derive describe deselect deserialize detach detect
    determine dial discard disconnect dispatch display divide do double download drain draw drive drop dump ease echo
    embed emit empty enable encode encrypt end enforce enqueue ensure enter enumerate erase estimate evaluate evict
    examine exchange exclude excuse execute expand expect expire explain export expose express extend extract fade
    fail fall fetch fill filter find finish fit fix flatten flip flush fold follow forbid force forget fork form
    format forward free freeze gather generate get give go grant greet group grow guard guess halve hand handle hash
    have hear help hide hint hold ignore implement import include increase index infer inform inherit initialize
    inject insert inspect install instantiate interpolate interrupt introduce invalidate invite invoke iterate join
    judge keep kill know label launch lay lead learn lease leave lend let lie limit line link list listen load lock
    log look loop lose lower maintain make manage map mark match mean measure merge migrate mix move multiply name
    narrow need normalize note notice notify number observe obtain occupy offer open order overlap own pack pad parse
    pass patch pause pay perform permit pick pin ping place plan play point poll pop post postpone predict preempt
    prefer prepare present preserve prevent print probe process produce project promise protect prove provide prune
    publish pull purge push put quantize query queue quote raise rank reach read reap rebuild recall receive reclaim
    recognize recompute reconnect record recover redial reduce refer refill refine refresh refund refuse register
    reject relay release reload remember remind remove rename render renew renumber reopen repeat replace replay
    reply report represent require reserve reset resize resolve respond restart restore restrict resume retain retire
    retry return reuse reverse revoke rewrite rise rotate round route run sample satisfy save say scale scan schedule
    score search seek select send separate serialize serve set settle shake shape share shift show shrink shut sign
    signal simulate skip sleep slice smooth solve sort spare speak split spread stamp stand start state stay steal
    stop store stream strike strip submit subscribe subtract sum supply suppose suspend swap sweep switch synchronize
    take teach tell terminate test throttle throw tick time tokenize touch trace track train transfer translate
    traverse treat trim trust try tune turn understand undo unload unlock unmap unpack unpin unregister update upload
    use validate verify visit vote wait wake walk want warm warn watch weigh widen wire withdraw work wrap write
    yield zero"""
)
"""Verbs with which a function's docstring may begin, as they stand in a dictionary."""
PROPERTIES = ("property", "cached_property", "setter", "fixture")
CODE = re.compile(r"``[^`]*``|`[^`]*`")
ROLE = re.compile(r":\w+:`[^`]*`")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[A-Z`\"'(])")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|Fig|Figs|Eq|Eqs|No|approx)\.")
ITEM = re.compile(r"\n\s*(?:[-*+]|\d+\.)\s+|\n\s*\n|\n\s*\|")


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where the prose is not plain."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def third_person(verb: str) -> str:
    """Returns the form of a verb that follows "it"."""
    if verb == "have":
        return "has"
    if re.search(r"(s|sh|ch|x|z|o)$", verb):
        return verb + "es"
    return re.sub(r"(?<=[^aeiou])y$", "ie", verb) + "s"


THIRD_PERSON = frozenset(map(third_person, VERBS))


def fragment(text: str, *, of_function: bool) -> str | None:
    """Returns what is wrong with a docstring's beginning, or None."""
    said = ROLE.sub("code", CODE.sub("code", text)).split()
    if not said:
        return "an empty docstring"
    first = said[0].strip("\"'(.,:;!?").lower()
    if of_function:
        return None if first in THIRD_PERSON else f"a function's docstring begins with a verb, not {said[0]!r}"
    second = said[1].strip(".,:;").lower() if len(said) > 1 else ""
    alone = first in DETERMINERS and (second in OPENERS | PRONOUNS or said[0].endswith((".", ",", ":")))
    named_only = first == "code" and said[0].endswith(":")
    if first in OPENERS or alone or named_only or first[:1].isdigit():
        return f"a fragment: it begins with {' '.join(said[:2])!r}"
    return None


def long_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yields the number of words and the beginning of each sentence that is too long."""
    plain = ABBREVIATIONS.sub(r"\1", ROLE.sub("Code", CODE.sub("Code", text)))
    for part in ITEM.split(plain):
        for sentence in SENTENCE_END.split(part):
            said = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(said) > WORDS_MAX:
                yield len(said), " ".join(said[:6])


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yields line, text and whether a function has it, for each docstring; a string below an assignment is one."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for before, each in zip([None, *body], body, strict=False):
            if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)):
                continue
            text = each.value.value
            if isinstance(text, str) and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                acts = before is None and function and not is_value(node)
                yield each.lineno, ast.literal_eval(ast.unparse(each.value)), acts


def is_value(node: ast.AST) -> bool:
    """Returns whether a function is read as a value, or is a test: its docstring may be a noun phrase."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return node.name.startswith("test_") or any(
        name in ast.unparse(decorator) for decorator in node.decorator_list for name in PROPERTIES
    )


def findings(path: Path) -> Iterator[Finding]:
    """Yields what is not plain in a Python file or a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        prose = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
        prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
        for paragraph in re.finditer(r"(?:^(?![#|]| {4}).*\S.*\n?)+", prose, re.MULTILINE):
            for count, beginning in long_sentences(paragraph[0]):
                yield Finding(path, prose.count("\n", 0, paragraph.start()) + 1, f"{count} words: {beginning} ...")
        return
    tree = ast.parse(text)
    for line, doc, of_function in docstrings(tree):
        if (wrong := fragment(doc, of_function=of_function)) is not None:
            yield Finding(path, line, wrong)
        for count, beginning in long_sentences(doc):
            yield Finding(path, line, f"{count} words: {beginning} ...")
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and lines[(node.end_lineno or 1) - 1].strip() == '"""':
            last = lines[(node.end_lineno or 1) - 2].rstrip()
            if len(last) <= LAST_CHARS and not last.endswith(('"', "\\")):
                yield Finding(path, node.end_lineno or 1, "the closing quotes have a line of their own")
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        if name.startswith("test_") and len(name) > TEST_NAME_MAX:
            yield Finding(path, getattr(node, "lineno", 0), f"a test's name of {len(name)} characters")


def files(paths: Sequence[str]) -> Iterator[Path]:
    """Yields each Python file and page of these paths, without generated code."""
    for name in paths:
        path = (ROOT / name).resolve()
        found = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        yield from (each for each in found if GENERATED not in each.parents)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.plain_english", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files and folders (default: those that are ready)")
    parser.add_argument("--count", action="store_true", help="print a number per path, not each finding")
    options = parser.parse_args(argv)
    total = 0
    for name in options.paths or CHECKED:
        found = [finding for path in files([name]) for finding in findings(path)]
        total += len(found)
        for finding in () if options.count else found:
            print(Finding(finding.path.relative_to(ROOT), finding.line, finding.what))
        if options.count:
            print(f"{len(found):6d}  {name}")
    print(f"{total} places where the prose is not plain")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
