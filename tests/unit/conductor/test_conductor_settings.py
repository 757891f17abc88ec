"""The conductor's settings agree with the library, and nonsense is refused."""

import pytest

from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.runtime.setting_sources import load_settings
from services.conductor.settings import ConductorSettings


def test_every_policy_of_the_library_can_be_chosen():
    for name in PLACEMENT_POLICIES.names:
        assert load_settings(ConductorSettings, ["--placement", name], {}).placement == name


@pytest.mark.parametrize("arguments", [["--placement", "nonsense"], ["--lease-ms", "0"], ["--no-such", "1"]])
def test_nonsense_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        load_settings(ConductorSettings, arguments, {})
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err
