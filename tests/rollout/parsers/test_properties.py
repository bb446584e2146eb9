"""Any text is read without an exception and in bounded time; calls that were written in a format are read back."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.rollout.parsers import get, known
from streamrl.rollout.parsers.answer import MAX_CALLS
from tests.rollout.parsers.worlds import ADD, FORMATS, SPECIAL, TEXT_VALUES, TOKENIZER, parse, plain

PIECES = [
    *SPECIAL, "<tool_call>", "</tool_call>", "<function=add>", "<function=", "</function>", "<parameter=a>", "<parameter=", "</parameter>", "<invoke name=",
    ">",
    '<invoke name="add">', "</invoke>", '<parameter name="a">', "<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>",
    "</seed:think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "add", "a", "1", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.add:0", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "\n```json", "```", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[/THINK]", "<|python_tag|>",
    ";",
    "to=functions.add", '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {}}', "{", "}", "[", "]", '"', "\\", ":", ",", " ",
    "\n", "null",
]  # fmt: skip


@given(name=st.sampled_from(known()), text=st.text() | st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=40).map("".join))
@settings(max_examples=600, deadline=None)
def test_no_text_raises(name, text):
    parsed = parse(name, text)
    assert isinstance(parsed.content, str)
    for call in parsed.calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name or call.error
        call.arguments.encode()


@given(name=st.sampled_from(known()), ids=st.lists(st.integers(0, 0x110000 + len(SPECIAL))))
def test_no_ids_raise(name, ids):
    get(name)(TOKENIZER).parse(ids, None)


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT | st.sampled_from(PIECES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
JSON_CALLS = st.lists(st.tuples(NAMES, st.dictionaries(TEXT, VALUES, max_size=3)), min_size=1, max_size=4)

TYPED = {
    "a": st.integers(-(2**70), 2**70),
    "b": st.floats(allow_nan=False, allow_infinity=False),
    "s": TEXT,
    "flag": st.booleans(),
    "xs": st.lists(VALUES, max_size=3),
    "o": st.dictionaries(TEXT, VALUES, max_size=3),
    "maybe": st.none() | st.integers(),
}
NOT_IN_TEXT = ("</parameter>", "<parameter", "</arg_value>", "<arg_key>", "</think>", "</seed:think>")  # what these formats have no way to write in a value
TYPED_CALLS = st.lists(st.tuples(st.just("add"), st.fixed_dictionaries({}, optional=TYPED)), min_size=1, max_size=4).filter(
    lambda calls: not any(tag in plain(value) for _, arguments in calls for value in arguments.values() for tag in NOT_IN_TEXT)
)


def _says_a_marker(name, calls):
    """Whether arguments hold what ends the reasoning, or a harmony token: as tokens of their own these mean what they say, even inside a string."""
    arguments = json.dumps([arguments for _, arguments in calls])
    return any(tag in arguments for tag in ("</think>", "[/THINK]", *(HARMONY if name == "gpt-oss" else ())))


@pytest.mark.parametrize("name", [name for name in known() if name not in TEXT_VALUES])
@given(calls=JSON_CALLS, content=st.sampled_from(["", "I look it up."]))
@settings(deadline=None)
def test_json_calls_come_back_as_they_were_written(name, calls, content):
    render, end = FORMATS[name]
    if _says_a_marker(name, calls):
        calls = [(call, {}) for call, _ in calls]
    written = render(calls)
    before = f"<|channel|>commentary<|message|>{content}<|end|>" if name == "gpt-oss" else content
    parsed = parse(name, before + written + end)
    assert (parsed.content, [(call.name, json.loads(call.arguments), call.error) for call in parsed.calls]) == (content, [(n, a, None) for n, a in calls])


@pytest.mark.parametrize("name", TEXT_VALUES)
@given(calls=TYPED_CALLS, content=st.sampled_from(["", "I look it up."]))
@settings(deadline=None)
def test_typed_calls_come_back_as_they_were_written(name, calls, content):
    render, end = FORMATS[name]
    parsed = parse(name, f"{content}\n{render(calls)}{end}", [ADD])
    assert (parsed.content, [(call.name, json.loads(call.arguments), call.error) for call in parsed.calls]) == (content, [(n, a, None) for n, a in calls])


@pytest.mark.parametrize("name", [name for name in known() if name not in TEXT_VALUES])
@given(calls=JSON_CALLS, data=st.data())
@settings(deadline=None, max_examples=50)
def test_a_cut_answer_never_gives_a_call_that_was_not_written(name, calls, data):
    written = FORMATS[name][0](calls)
    parsed = parse(name, written[: data.draw(st.integers(0, len(written)))])
    done = [call for call in parsed.calls if not call.error]
    assert len(done) <= len(calls)
    if not _says_a_marker(name, calls):
        assert [(call.name, json.loads(call.arguments)) for call in done] == calls[: len(done)]


LARGE_CHARS = 125_000
UNITS = [
    *PIECES, "<tool_call>{", '<tool_call>"</tool_call>', '<tool_call>["</tool_call>', "<tool_call></tool_call>", "<function=add></function>", "<function=add>",
    "<function=add><parameter=a>", "<parameter=a>1</parameter>", "<tool_call>add<arg_key>a</arg_key>", "<arg_key>a</arg_key><arg_value>1</arg_value>",
    "[TOOL_CALLS]add[ARGS]{}", "[TOOL_CALLS]add[ARGS]{", '[TOOL_CALLS]add{"', "[TOOL_CALLS]add", "<|python_tag|>{", '{"name": "add"};',
    "<|channel|>final<|message|>",
    '<|message|>{"a": 1}<|call|>', "<|channel|>commentary to=functions.add<|message|>{}<|call|>", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>\n```json\n{", "<|tool_call_begin|>add:0<|tool_call_argument_begin|>{", "\\\"", "{\"a\":", "[1,", " to=", "x",
]  # fmt: skip
STARTS = ["", "<tool_call>", "<tool_call>{", "<function=add>", "[TOOL_CALLS]add[ARGS]{\"", "<|python_tag|>", "[TOOL_CALLS][{"]  # fmt: skip


@pytest.mark.parametrize("name", known())
def test_a_long_run_of_any_tag_is_read_in_bounded_time(name):
    parser = get(name)(TOKENIZER)
    slowest = 0.0
    for unit in dict.fromkeys(UNITS):
        for start in STARTS:
            text = start + unit * (LARGE_CHARS // len(unit))
            begin = time.process_time()
            parsed = parser.parse_text(text, [ADD])
            slowest = max(slowest, time.process_time() - begin)
            assert len(parsed.calls) <= MAX_CALLS + 1
    assert slowest < 0.5  # a quadratic walk over this takes many seconds


def test_an_answer_with_too_many_calls_says_so():
    parsed = parse("hermes", '<tool_call>{"name": "now"}</tool_call>' * (MAX_CALLS + 3))
    assert [call.error is None for call in parsed.calls] == [True] * MAX_CALLS + [False]
    assert parsed.content.count("<tool_call>") == 3
