"""Command lines: hyphens, and similar words for unknown ones."""

from __future__ import annotations

import pytest

from pinyon.runtime.arguments import Parser, module_as_typed


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="p")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("simulate")
    run.add_argument("trace")
    run.add_argument("texts", nargs="*")
    run.add_argument("--service-order", default="")
    run.add_argument("--instances", type=int, required=True)
    run.add_argument("--pool", choices=("none", "dram"))
    commands.add_parser("plan", allow_abbrev=False).add_argument("--policy")
    return parser


@pytest.mark.parametrize("option", ["--service_order", "--service-order"])
@pytest.mark.parametrize("value", [["=a_b"], ["", "a_b"]])
def test_underscore_in_option_is_a_hyphen(parser, option, value):
    given = [option + value[0], *value[1:]]
    found = parser.parse_args(["simulate", "t_t", "--instances", "2", *given])
    assert (found.service_order, found.trace) == ("a_b", "t_t")


def test_words_after_two_hyphens_stay_as_they_are(parser):
    found = parser.parse_args(["simulate", "--instances", "2", "t", "--", "--service_order", "--x"])
    assert found.texts == ["--service_order", "--x"]


def test_option_may_be_abbreviated(parser):
    assert parser.parse_args(["simulate", "t", "--inst", "2"]).instances == 2


@pytest.mark.parametrize(
    "given",
    [
        ["t", "a", "b", "--instances", "2"],
        ["--instances", "2", "t", "a", "b"],
        ["t", "--instances", "2", "a", "b"],
        ["t", "--instances=2", "a", "--pool", "none", "b"],
    ],
)
def test_options_may_stand_between_arguments(parser, given):
    found = parser.parse_args(["simulate", *given])
    assert (found.trace, found.texts, found.instances) == ("t", ["a", "b"], 2)


def test_optional_argument_may_stand_behind_an_option(capsys):
    parser = Parser(prog="p")
    parser.add_argument("profile", nargs="?", choices=("small", "large"))
    parser.add_argument("out", nargs="?")
    parser.add_argument("--seed", type=int)
    found = parser.parse_args(["small", "--seed", "3", "o"])
    assert (found.profile, found.out, found.seed) == ("small", "o", 3)
    for given, said in (
        (["small", "--seed", "3", "o", "more"], "unrecognized arguments: more\n"),
        (["--seed", "3", "smal"], "invalid choice: 'smal' (did you mean 'small'?)"),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(given)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["simulat"], "invalid choice: 'simulat' (did you mean 'simulate'?), choose from simulate, plan"),
        (["simulate", "t", "--instances", "2", "--pool", "drma"], "'drma' (did you mean 'dram'?)"),
        (["simulate", "t", "--instnces", "2"], "unrecognized option: --instnces (did you mean '--instances'?)"),
        (
            ["simulate", "--servce_order=x", "t"],
            "unrecognized option: --servce-order (did you mean '--service-order'?)",
        ),
        (["simulate", "t", "--instances", "2", "--qqq"], "unrecognized option: --qqq\n"),
        (["plan", "--polic", "x"], "unrecognized option: --polic (did you mean '--policy'?)"),
        (["plan", "x"], "unrecognized arguments: x\n"),
        (["--verson", "plan"], "unrecognized option: --verson"),
    ],
)
def test_unknown_word_is_answered_with_the_near_one(parser, capsys, given, said):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["python3", "-m", "services.lb", "--help"], "python3 -m services.lb"),
        ([".venv/bin/python", "-m", "services.lb"], ".venv/bin/python -m services.lb"),
        (["/my folder/python", "-m", "services.lb"], "'/my folder/python' -m services.lb"),
        (["python3", "-m", "pytest"], "python -m services.lb"),
        ([".venv/bin/pytest"], "python -m services.lb"),
    ],
)
def test_module_is_shown_as_it_was_typed(typed, shown, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", typed)
    assert module_as_typed("services.lb") == shown
