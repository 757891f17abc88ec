"""A load balancer whose certificate does not name its region says so when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.security import NO_SECURITY, Security
from services.lb.balancer import check_region
from services.lb.settings import LbSettings
from tests.tls_files import TestAuthority


def test_a_certificate_that_does_not_name_the_region_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = TestAuthority(tmp_path)
    settings = LbSettings(region="eu")
    check_region(settings, Security(authority.tls("lb", "eu-0", region="eu")))
    check_region(settings, NO_SECURITY)
    assert not caplog.records
    check_region(settings, Security(authority.tls("lb", "eu-0")))
    (told,) = caplog.records
    assert "pinyon certs DIR lb/eu-0@eu" in told.getMessage()


@pytest.mark.parametrize("region", ["a" * 64, "a..b", "a."])
def test_a_region_that_no_certificate_names_needs_no_tls(tmp_path: Path, region: str) -> None:
    settings = LbSettings(region=region)
    check_region(settings, NO_SECURITY)
    with pytest.raises(InvalidArgument, match="cannot be in a certificate") as error:
        check_region(settings, Security(TestAuthority(tmp_path).tls("lb", "eu-0")))
    assert error.value.field == "region"
