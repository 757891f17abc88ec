from __future__ import annotations

import pytest

from launch.__main__ import main


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["up", "--service_ordr", "fifo"], "--service-ordr (did you mean '--service-order'?)"),
        (["up", "--engine", "numpi"], "'numpi' (did you mean 'numpy'?)"),
        (["u"], "invalid choice: 'u'"),
    ],
)
def test_unknown_option_of_up_names_the_near_one(capsys, given, said):
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_options_of_up_have_no_underscores(capsys):
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    shown = capsys.readouterr().out
    options = [word for word in shown.replace("[", " ").split() if word.startswith("--")]
    assert "--service-order" in options
    assert not [option for option in options if "_" in option]
