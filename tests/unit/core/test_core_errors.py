"""The error tree carries its codes and survives the wire."""

import grpc
import pytest

from pinyon.core import errors
from pinyon.messages.error import error_from_proto, error_to_proto

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.PinyonError)]
CLASSES.remove(errors.PinyonError)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_names_a_real_status(cls):
    assert hasattr(grpc.StatusCode, cls.grpc_code)
    assert 400 <= cls.http_status < 600


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not errors.Rejected])
def test_errors_survive_the_wire(cls):
    error = error_from_proto(error_to_proto(cls("why", field="max_tokens", retry_after_s=1.5)))
    assert type(error) is cls
    assert (error.message, error.field, error.retry_after_s) == ("why", "max_tokens", 1.5)


def test_an_unknown_code_is_internal():
    assert type(errors.error_from_code("NO_SUCH", "x")) is errors.Internal
