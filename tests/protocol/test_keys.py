import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ProtocolError
from streamrl.protocol import TrajectoryKey
from streamrl.protocol.keys import check_uid, prompt_uid, request_seed
from tests.protocol.batches import quick

UIDS = st.from_regex(r"[A-Za-z0-9.-]+", fullmatch=True)


@quick
@given(UIDS, st.integers(0, 10**9), st.integers(0, 10**6))
def test_key_round_trips(uid, session_id, index):
    key = TrajectoryKey(uid, session_id, index)
    assert TrajectoryKey.parse(str(key)) == key


@pytest.mark.parametrize("text", ["", "a", "a_1", "a_1_", "a_01_0", "a_1_00", "a_-1_0", "a_1_x", "_1_0", "a_b_1_0", "a_1_0 ", "a_１_0", None, 3])
def test_parse_refuses_what_no_key_is(text):
    with pytest.raises(ProtocolError):
        TrajectoryKey.parse(text)


@pytest.mark.parametrize("uid", ["", "a_b", "a b", "ä", "a\n", None, 7])
def test_uid_has_no_underscore_and_is_not_empty(uid):
    with pytest.raises(ProtocolError, match="uid consists of"):
        check_uid(uid)


def test_key_numbers_are_not_negative():
    for numbers in ((-1, 0), (0, -1)):
        with pytest.raises(ProtocolError, match="not negative"):
            TrajectoryKey("a", *numbers)


def test_keys_sort_by_number_and_not_as_text():
    assert TrajectoryKey("a", 2, 0) < TrajectoryKey("a", 10, 0)


def test_prompt_uid_is_equal_in_equal_runs_and_a_legal_uid():
    assert prompt_uid(1, 0, 5) == prompt_uid(1, 0, 5)
    uids = {prompt_uid(seed, epoch, position) for seed in range(3) for epoch in range(3) for position in range(20)}
    assert len(uids) == 180
    assert all(check_uid(uid) == uid for uid in uids)


def test_request_seed_changes_with_session_and_retry_and_fits_63_bits():
    seeds = {request_seed(1, "a", session, retry) for session in range(8) for retry in range(3)}
    assert len(seeds) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(1, "a", 2, 0) == request_seed(1, "a", 2, 0)
