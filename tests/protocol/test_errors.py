import pickle

import pytest

from streamrl import errors
from streamrl.protocol.meta import UnknownKeys


def every_class(cls=errors.StreamrlError):
    return [cls, *(found for sub in cls.__subclasses__() for found in every_class(sub))]


@pytest.mark.parametrize("cls", every_class(), ids=lambda cls: cls.__name__)
def test_errors_survive_pickle_and_the_wire_as_their_class(cls):
    error = cls("rule, found, do")
    for back in (pickle.loads(pickle.dumps(error)), errors.from_wire(*errors.to_wire(error))):
        assert type(back) is cls
        assert str(back) == back.message == "rule, found, do"


def test_session_failure_keeps_its_reason():
    error = errors.SessionFailed("no", reason="empty_output", retryable=False)
    back = pickle.loads(pickle.dumps(error))
    assert (back.reason, back.retryable) == ("empty_output", False)
    assert errors.from_wire(*errors.to_wire(error)).reason == "empty_output"


@pytest.mark.parametrize(
    ("cls", "kinds"),
    [
        (errors.ProtocolError, (ValueError, AssertionError)),
        (errors.MissingKey, (KeyError, ValueError, AssertionError)),
        (errors.MissingField, (KeyError,)),
        (errors.DtypeClash, (TypeError,)),
        (errors.RowOutOfRange, (IndexError,)),
        (errors.WrongType, (TypeError,)),
        (UnknownKeys, (RuntimeError, KeyError)),
        (errors.WaitTimeout, (TimeoutError,)),
    ],
)
def test_errors_are_the_stdlib_errors_a_caller_expects(cls, kinds):
    assert all(issubclass(cls, kind) for kind in kinds)


def test_an_unknown_class_on_the_wire_is_named():
    error = errors.from_wire("ZeroDivisionError", "division by zero")
    assert type(error) is errors.StreamrlError and str(error) == "ZeroDivisionError: division by zero"
