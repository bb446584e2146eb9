"""Record files: what was appended comes back, a torn end is cut, damage is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ProtocolError
from streamrl.protocol.framing import MAGIC, RecordWriter, read_records

PAYLOADS = [b"", b"a", b"bc" * 100]


def written(path, payloads=PAYLOADS):
    writer = RecordWriter(path)
    for payload in payloads:
        writer.append(payload)
    writer.close()
    return path


def test_records_come_back_in_order(tmp_path):
    assert list(read_records(written(tmp_path / "j"))) == PAYLOADS


def test_a_second_writer_goes_on_behind_the_first(tmp_path):
    path = written(tmp_path / "j")
    written(path, [b"later"])
    assert list(read_records(path)) == [*PAYLOADS, b"later"]


@given(cut=st.integers(1, 300))
def test_a_torn_end_loses_whole_records_from_the_end_only(tmp_path_factory, cut):
    path = written(tmp_path_factory.mktemp("torn") / "j")
    data = path.read_bytes()
    path.write_bytes(data[:-cut] if cut < len(data) else b"")
    kept = list(read_records(path))
    assert kept == PAYLOADS[: len(kept)]
    written(path, [b"later"])
    assert list(read_records(path)) == [*kept, b"later"]


def test_damage_in_the_middle_is_named_with_its_place(tmp_path):
    path = written(tmp_path / "j", [b"first", b"second"])
    data = bytearray(path.read_bytes())
    data[len(MAGIC) + 8] ^= 1
    path.write_bytes(data)
    with pytest.raises(ProtocolError, match="damaged one at byte 8"):
        list(read_records(path))


def test_another_file_is_refused(tmp_path):
    (tmp_path / "j").write_bytes(b"something else")
    with pytest.raises(ProtocolError, match="another kind of file"):
        list(read_records(tmp_path / "j"))
