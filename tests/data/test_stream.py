"""The prompt stream: each row once per epoch, names that two equal runs share, and a cursor that is exact at every boundary."""

import asyncio
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.config.data import DataConfig
from streamrl.data.order import epoch_order
from streamrl.data.stream import PromptStream
from streamrl.errors import CheckpointError, ConfigError, DataError


def make_files(folder, size):
    path = folder / f"{size}.jsonl"
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "data_source": "s", "extra_info": {"index": i}} for i in range(size)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {size: make_files(folder, size) for size in (1, 5, 10, 12)}


def stream_of(file, *, epochs=None, run_seed=7, **data):
    return PromptStream(DataConfig(train_files=file, **data), run_seed=run_seed, total_epochs=epochs)


def take(stream, count):
    return asyncio.run(stream.next_prompts(count))


def indices(prompts):
    return [prompt.row["index"] for prompt in prompts]


def test_every_epoch_holds_each_row_once_in_another_order(files):
    stream = stream_of(files[10])
    epochs = [indices(take(stream, 10)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_request_may_span_two_epochs(files):
    prompts = take(stream_of(files[5]), 8)
    assert [(p.epoch, p.position) for p in prompts] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2)]


def test_equal_runs_give_equal_uids_and_no_uid_comes_twice(files):
    one, two, other = (take(stream_of(files[5], run_seed=seed), 20) for seed in (7, 7, 8))
    assert [p.uid for p in one] == [p.uid for p in two] and len({p.uid for p in one}) == 20
    assert not {p.uid for p in one} & {p.uid for p in other}


def test_data_seed_alone_decides_the_order(files):
    one, two = (take(stream_of(files[10], run_seed=seed, seed=3), 10) for seed in (7, 8))
    assert indices(one) == indices(two)


def test_a_limited_stream_ends_and_stays_ended(files):
    stream = stream_of(files[5], epochs=2)
    assert len(take(stream, 7)) == 7 and len(take(stream, 7)) == 3 and take(stream, 7) == []


def test_without_shuffle_rows_come_in_file_order(files):
    assert indices(take(stream_of(files[5], shuffle=False), 7)) == [0, 1, 2, 3, 4, 0, 1]


@settings(deadline=None)  # a shared machine may pause for a moment
@given(size=st.sampled_from([1, 5, 10, 12]), before=st.integers(0, 40), chunk=st.integers(1, 7))
def test_a_restored_stream_continues_exactly_where_the_saved_one_stood(files, size, before, chunk):
    whole = stream_of(files[size])
    expected = take(whole, before + 20)
    saved = stream_of(files[size])
    while (left := before - saved._epoch * size - saved._position) > 0:
        take(saved, min(chunk, left))
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(asyncio.run(saved.state())))
    resumed = stream_of(files[size])
    asyncio.run(resumed.restore(state))
    assert take(resumed, 20) == expected[before:]


@settings(deadline=None)
@given(shuffle=st.booleans(), weights=st.sampled_from([None, [1, 1], [1, 4], [0.3, 0.1]]), before=st.integers(0, 40))
def test_a_restored_mixture_continues_exactly_where_the_saved_one_stood(files, shuffle, weights, before):
    def stream():
        return stream_of([files[10], files[5]], shuffle=shuffle, train_weights=weights)

    expected = take(stream(), before + 20)
    saved = stream()
    take(saved, before)
    resumed = stream()
    asyncio.run(resumed.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(asyncio.run(saved.state())))))
    assert take(resumed, 20) == expected[before:]


def test_a_mixture_keeps_its_shares_in_every_epoch_and_names_prompts_as_ever(files):
    prompts = take(stream_of([files[10], files[5]], train_weights=[1, 2]), 45)
    assert [(p.epoch, p.position) for p in prompts] == [(epoch, position) for epoch in range(3) for position in range(15)]
    assert len({p.uid for p in prompts}) == 45
    assert [indices(prompts)[i::15] for i in range(15)] != [[index] * 3 for index in indices(prompts[:15])]


def test_stream_and_loader_hand_out_a_mixture_in_the_same_order(files):
    from streamrl.data import PromptLoader, RLHFDataset

    names, weights = [files[10], files[5]], [1, 2]
    loader = PromptLoader(RLHFDataset(names, DataConfig(), seed=7), batch_size=5, shuffle=True, seed=7, weights=weights)
    read_by_loader = [int(index) for _ in range(2) for batch in loader for index in batch["index"]]
    assert read_by_loader == indices(take(stream_of(names, train_weights=weights), 30))


def test_a_mixture_is_restored_only_onto_the_same_files_and_weights(files):
    names = [files[10], files[5]]
    state = asyncio.run(stream_of(names, train_weights=[1, 2]).state())
    for other, said in ((stream_of(names, train_weights=[2, 1]), "weights"), (stream_of(names[::-1], train_weights=[1, 2]), "sizes")):
        with pytest.raises(CheckpointError, match=said):
            asyncio.run(other.restore(state))


def test_a_mixture_whose_file_is_filtered_away_is_refused(files):
    data = DataConfig(train_files=[files[10], files[1]], train_weights=[1, 1], filter_overlong_prompts=True, max_prompt_length=8, max_samples=2)
    with pytest.raises(DataError, match=r"none in train_files\[1\]"):
        PromptStream(replace(data, shuffle=False), run_seed=7, total_epochs=1, tokenizer=LengthTokenizer())


def test_validation_files_need_no_weights(files):
    stream = stream_of([files[10], files[5]], train_weights=[1, 1], val_files=files[12])
    assert len(asyncio.run(stream.validation_rows())) == 12


def test_a_stream_resumed_in_its_second_epoch_sees_that_epochs_rows_once(files):
    whole = take(stream_of(files[10]), 20)
    saved = stream_of(files[10])
    take(saved, 13)
    resumed = stream_of(files[10])
    asyncio.run(resumed.restore(asyncio.run(saved.state())))
    rest = take(resumed, 7)
    assert rest == whole[13:] and sorted(indices(whole[10:13] + rest)) == list(range(10))


def test_resume_at_the_end_of_an_epoch_yields_the_whole_next_one(files):
    saved = stream_of(files[12], epochs=2)
    take(saved, 12)
    resumed = stream_of(files[12], epochs=2)
    asyncio.run(resumed.restore(asyncio.run(saved.state())))
    prompts = take(resumed, 100)
    assert sorted(indices(prompts)) == list(range(12)) and {p.epoch for p in prompts} == {1}


def test_a_cursor_of_other_data_is_refused(files):
    state = asyncio.run(stream_of(files[12]).state())
    with pytest.raises(CheckpointError, match="num_rows: saved 12, now 10"):
        asyncio.run(stream_of(files[10]).restore(state))


def test_a_cursor_of_other_rows_of_equal_number_is_refused(files, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(open(files[12]).read().replace('"11"', '"eleven"'))
    with pytest.raises(CheckpointError, match="fingerprint: saved"):
        asyncio.run(stream_of(str(other)).restore(asyncio.run(stream_of(files[12]).state())))


@pytest.mark.parametrize("change", [{"position": -1}, {"position": 13}, {"epoch": None}, {"epoch": -1}])
def test_a_cursor_outside_of_the_data_is_refused(files, change):
    stream = stream_of(files[12])
    with pytest.raises(CheckpointError, match="position of 0 to 12"):
        asyncio.run(stream.restore(asyncio.run(stream.state()) | change))


def test_rows_survive_msgpack_and_carry_what_agent_loops_need(files):
    (prompt,) = take(stream_of(files[5], shuffle=False), 1)
    row = msgspec.msgpack.decode(msgspec.msgpack.encode(prompt.row))
    assert row == prompt.row
    assert row["raw_prompt"] == [{"role": "user", "content": "0"}] and row["tools_kwargs"] == {} and "prompt" not in row


def test_changing_a_handed_out_row_changes_no_later_one(files):
    stream = stream_of(files[1])
    take(stream, 1)[0].row["raw_prompt"][0]["content"] = "changed"
    assert take(stream, 1)[0].row["raw_prompt"][0]["content"] == "0"


def test_max_samples_is_a_seeded_choice_or_the_first_rows(files):
    chosen = [indices(take(stream_of(files[12], max_samples=4, epochs=1), 100)) for _ in range(2)]
    assert chosen[0] == chosen[1] and len(set(chosen[0])) == 4
    assert indices(take(stream_of(files[12], max_samples=4, epochs=1, shuffle=False), 100)) == [0, 1, 2, 3]


def test_validation_rows_are_all_rows_in_file_order(files):
    stream = stream_of(files[5], val_files=files[12])
    assert [row["index"] for row in asyncio.run(stream.validation_rows())] == list(range(12))
    assert asyncio.run(stream_of(files[5]).validation_rows()) == []


class LengthTokenizer:
    """One token per message of the generation prompt plus the number that the message holds."""

    def __init__(self, broken=()):
        self.broken = broken

    def apply_chat_template(self, conversation, **kwargs):
        assert kwargs["add_generation_prompt"]
        number = int(conversation[0]["content"])
        if number in self.broken:
            raise ValueError("bad template")
        return [0] * number


def test_the_overlong_filter_keeps_equal_length_and_drops_longer(files):
    data = DataConfig(train_files=files[12], max_prompt_length=3, filter_overlong_prompts=True, shuffle=False)
    stream = PromptStream(data, run_seed=7, total_epochs=1, tokenizer=LengthTokenizer())
    assert indices(take(stream, 100)) == [0, 1, 2, 3]


def test_a_broken_template_does_not_quietly_empty_the_data(files):
    data = DataConfig(train_files=files[12], filter_overlong_prompts=True)
    with pytest.raises(DataError, match=r"got 1 of 12 .*bad template"):
        PromptStream(data, run_seed=7, total_epochs=1, tokenizer=LengthTokenizer(broken=[4]))


def test_filtering_without_a_tokenizer_is_refused(files):
    with pytest.raises(ConfigError, match="filter_overlong_prompts"):
        stream_of(files[5], filter_overlong_prompts=True)


def test_epoch_order_depends_on_nothing_but_its_arguments():
    first = epoch_order(10, shuffle=True, seed=1, epoch=1)
    epoch_order(10, shuffle=True, seed=1, epoch=0)
    assert epoch_order(10, shuffle=True, seed=1, epoch=1) == first
