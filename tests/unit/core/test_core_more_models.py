from __future__ import annotations

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.core.served import MORE_MODELS_MAX, parse_more_models


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a=/models/one", {"a": "/models/one"}),
        ("/models/one", {"one": "/models/one"}),
        ("/models/one/ , b=two,", {"one": "/models/one/", "b": "two"}),
        ("a=/x=y", {"a": "/x=y"}),
    ],
)
def test_folders_by_name(text, expected):
    assert parse_more_models(text) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a=", "'a='"),
        ("=/models/one", "'=/models/one'"),
        ("a=/one,a=/two", "'a'"),
        ("/here/one,/there/one", "'one'"),
        (f"{'n' * 129}=/one", "is not"),
        (".", "'.'"),
        (",".join(f"m{number}=/x" for number in range(MORE_MODELS_MAX + 1)), str(MORE_MODELS_MAX)),
    ],
)
def test_what_is_refused_is_named(text, named):
    with pytest.raises(InvalidArgument, match=named) as error:
        parse_more_models(text)
    assert error.value.field == "more_models"
