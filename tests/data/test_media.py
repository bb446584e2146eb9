"""Placeholders and media lists match, or the row is refused; values travel inside the messages."""

import json

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.data import DataConfig
from streamrl.data import RLHFDataset, check_files, collate_fn
from streamrl.data.media import with_media
from streamrl.data.rows import wire_row
from streamrl.errors import DataError, ProtocolError
from tests.data.worlds import CountingTokenizer, row, write_jsonl


def asking(text, **columns):
    return row(prompt=[{"role": "user", "content": text}], **columns)


def content(the_row, data=None):
    return with_media(the_row, data or DataConfig())[0]["content"]


def test_values_fill_the_places_in_order_over_all_messages():
    messages = [{"role": "system", "content": "look"}, {"role": "user", "content": "<image>a<video>"}, {"role": "user", "content": "b <image>"}]
    got = with_media(row(prompt=messages, images=["1.png", {"bytes": b"2", "path": None}], videos=["v.mp4"]), DataConfig())
    assert got == [
        {"role": "system", "content": "look"},
        {"role": "user", "content": [{"type": "image", "image": "1.png"}, {"type": "text", "text": "a"}, {"type": "video", "video": "v.mp4"}]},
        {"role": "user", "content": [{"type": "text", "text": "b "}, {"type": "image", "bytes": b"2", "path": None}]},
    ]


def test_bare_parts_are_places_too_and_filled_parts_are_left_alone():
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image", "image": "own.png"}]
    assert content(row(prompt=[{"role": "user", "content": parts}], images=["1.png"])) == [{"type": "image", "image": "1.png"}, *parts[1:]]


def test_a_value_cannot_change_the_kind_of_its_part():
    assert content(asking("<image>", images=[{"bytes": b"1", "type": "evil"}])) == [{"type": "image", "bytes": b"1"}]


def test_a_row_without_the_column_keeps_the_word_as_text():
    for columns in ({}, {"videos": None}, {"images": []}):
        assert content(asking("what does <video> mean in HTML?", **columns)) == "what does <video> mean in HTML?"


def test_the_columns_are_named_by_the_configuration():
    data = DataConfig(image_key="pictures", audio_key="sounds")
    got = content(asking("<audio><image>", pictures=["p"], sounds=["s"], images=["unused"]), data)
    assert got == [{"type": "audio", "audio": "s"}, {"type": "image", "image": "p"}]


@pytest.mark.parametrize(("text", "images"), [("<image>", []), ("<image><image>", ["a"]), ("no place", ["a"]), ("<image>", ["a", "b"])])
def test_counts_that_differ_are_refused_with_file_row_field_and_both_counts(tmp_path, text, images):
    path = write_jsonl(tmp_path / "t.jsonl", [row(0), asking(text, images=images)])
    got = f"'images', got {text.count('<image>')} and {len(images)}"
    with pytest.raises(ProtocolError, match=rf"t\.jsonl, row 1 \(counting from 0\), line 2: .*{got}") as error:
        RLHFDataset(path, DataConfig())
    assert isinstance(error.value, DataError)


@pytest.mark.parametrize("images", ["a.png", [1], [None], [""], [[]]])
def test_values_that_are_no_media_are_refused(tmp_path, images):
    with pytest.raises(DataError, match=r"row 0 \(.*, line 1: field 'images'"):
        RLHFDataset(write_jsonl(tmp_path / "t.jsonl", [asking("<image>", images=images)]), DataConfig())


@given(st.lists(st.sampled_from(["<image>", "<video>", "text", " ", "<", "image>"]), max_size=12))
def test_no_text_is_lost_and_every_place_gets_its_own_value(pieces):
    text = "".join(pieces)
    images, videos = [f"i{i}" for i in range(text.count("<image>"))], [f"v{i}" for i in range(text.count("<video>"))]
    got = content(asking(text, images=images, videos=videos))
    parts = [{"type": "text", "text": got}] if isinstance(got, str) else got
    assert "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in parts) == text
    assert [part["image"] for part in parts if part["type"] == "image"] == images
    assert [part["video"] for part in parts if part["type"] == "video"] == videos


def test_rows_with_images_pass_dataset_collate_and_wire_beside_text_rows(tmp_path):
    rows = [asking("<image>what?", images=[{"bytes": b"\x89PNG", "path": "a.png"}]), row(1, images=None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    dataset = RLHFDataset(str(tmp_path / "t.parquet"), DataConfig())
    assert "images" not in dataset[0] and "images" not in dataset[1]
    batch = collate_fn([dataset[0], dataset[1]])
    assert batch["raw_prompt"][0][0]["content"][0] == {"type": "image", "bytes": b"\x89PNG", "path": "a.png"}
    assert batch["raw_prompt"][1] == rows[1]["prompt"]
    wired = wire_row(rows[0], DataConfig())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wired)) == wired and "images" not in wired


@pytest.mark.parametrize("bad", [asking("<image>", images=["a"]), row(prompt=[{"role": "user", "content": [{"type": "image", "image": "a"}]}])])
@pytest.mark.parametrize("where", ["train_files", "val_files"])
def test_a_run_whose_rows_have_media_is_refused_before_it_starts(tmp_path, bad, where):
    good, media = write_jsonl(tmp_path / "good.jsonl", [row()]), write_jsonl(tmp_path / "media.jsonl", [row(), row(), bad])
    with pytest.raises(DataError, match=r"media\.jsonl, row 2 \(counting from 0\), line 3: generation on images.* is not supported yet"):
        check_files(DataConfig(**{"train_files": good, where: media}))


def test_the_overlong_filter_does_not_measure_images_by_their_text(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([asking("<image>", images=["a"])]))
    with pytest.raises(DataError, match="measures text"):
        RLHFDataset(str(path), DataConfig(filter_overlong_prompts=True), tokenizer=CountingTokenizer())
