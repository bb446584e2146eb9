"""What each format reads in answers that are plain, odd and broken: content, and calls or errors."""

import pytest

from streamrl.rollout.parsers import known
from tests.rollout.parsers.worlds import FORMATS, parse, read

ADD1 = ("add", {"a": 1})
HERMES = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
QWEN = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>'
GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
KIMI = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
V31 = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OSS = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'

CORPUS = [
    # name, answer, content, calls
    ("hermes", f"before {HERMES} after<|im_end|>", "before  after", [ADD1]),
    ("hermes", f"{HERMES}\n{HERMES}<|im_end|><|endoftext|><eos>", "", [ADD1, ADD1]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"s": "</tool_call> <tool_call>"}}</tool_call>', "", [("add", {"s": "</tool_call> <tool_call>"})]),
    ("hermes", f"<tool_call>{HERMES}</tool_call>", "</tool_call>", [("", "error")]),
    ("hermes", f"<tool_call>\n{HERMES}", "", [("", "error")]),
    ("hermes", '<tool_call>{"name":"rm","arguments":{"p":"no', '<tool_call>{"name":"rm","arguments":{"p":"no', []),
    ("hermes", f'{HERMES}<tool_call>{{"name": "rm"', '<tool_call>{"name": "rm"', [ADD1]),
    ("hermes", "</tool_call> odd", "</tool_call> odd", []),
    ("hermes", "<tool_call></tool_call>", "", [("", "error")]),
    ("hermes", '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', "", [ADD1]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD1]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}{\\"a\\": 1}"}</tool_call>', "", [("add", "error")]),
    ("hermes", '<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>', "", [("add", "error")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}, "parameters": {}}</tool_call>', "", [("add", "error")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', "", [("", "error")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "", [("", "error")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "", [("add", "error")]),
    ("hermes", "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>", "", [("", "error")]),
    ("hermes", "<think>x</think>A", "<think>x</think>A", []),
    ("hermes", f"<think>try {HERMES}</think>\n{HERMES}", f"<think>try {HERMES}</think>", [ADD1]),
    ("hermes", f"try {HERMES}</think>done", f"try {HERMES}</think>done", []),
    ("hermes", f"<think>so {HERMES}", "<think>so", [ADD1]),
    ("qwen3_coder", f"I add.\n{QWEN}<|im_end|>", "I add.", [ADD1]),
    ("qwen3_coder", f"{QWEN}\n{QWEN}", "", [ADD1, ADD1]),
    ("qwen3_coder", QWEN.removeprefix("<tool_call>\n"), "", [ADD1]),
    ("qwen3_coder", QWEN.removesuffix("\n</tool_call>") + "<|im_end|>", "", [ADD1]),
    ("qwen3_coder", QWEN.removesuffix("</function>\n</tool_call>"), QWEN.removesuffix("\n</function>\n</tool_call>"), []),
    ("qwen3_coder", QWEN[: QWEN.index("\n</parameter>")], QWEN[: QWEN.index("\n</parameter>")], []),
    ("qwen3_coder", "<function=now></function>", "", [("now", {})]),
    ("qwen3_coder", HERMES, "", [("", "error")]),
    ("qwen3_coder", "<tool_call>\n<tool_call>\n<function=now></function></tool_call>", "", [("", "error")]),
    ("qwen3_coder", "<function=add><parameter=s>x<parameter=a>1</parameter></function>", "", [("add", "error")]),
    ("qwen3_coder", "<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>", "", [("add", "error")]),
    ("qwen3_coder", "<function=add>a=1</function>", "", [("add", "error")]),
    ("qwen3_coder", "<function=></function>", "", [("", "error")]),
    ("qwen3_coder", "<function=add</function>", "", [("", "error")]),
    ("qwen3_coder", "<function=add><parameter=s>\n\n </function> \n</parameter></function>", "", [("add", {"s": "\n </function> "})]),
    ("qwen3_coder", f"<think>{QWEN}</think>{QWEN}", f"<think>{QWEN}</think>", [ADD1]),
    ("seed", QWEN.replace("tool_call>", "seed:tool_call>") + "<seed:eos>", "", [ADD1]),
    ("seed", f"<seed:think>{QWEN}</seed:think>ok", f"<seed:think>{QWEN}</seed:think>ok", []),
    ("minimax", f"ok\n{MINIMAX}[e~[", "ok", [ADD1]),
    ("minimax", MINIMAX.replace('"', "'"), "", [ADD1]),
    ("minimax", MINIMAX.replace('"', ""), "", [ADD1]),
    ("minimax", '<minimax:tool_call><invoke name="now"></invoke><invoke name="add"><parameter name="s"> x </parameter></invoke></minimax:tool_call>', "",
     [("now", {}), ("add", {"s": " x "})]),
    ("minimax", MINIMAX[:70], MINIMAX[:70], []),
    ("minimax", "<minimax:tool_call>\n{}\n</minimax:tool_call>", "", [("", "error")]),
    ("glm", f"<think></think>\n{GLM}<|observation|>", "<think></think>", [ADD1]),
    ("glm", GLM.replace("\n", ""), "", [ADD1]),
    ("glm", f"{GLM}\n{GLM}", "", [ADD1, ADD1]),
    ("glm", "<tool_call>now</tool_call>", "", [("now", {})]),
    ("glm", "<tool_call>add<arg_key>s</arg_key><arg_value></tool_call></arg_value></tool_call>", "", [("add", {"s": "</tool_call>"})]),
    ("glm", GLM.removesuffix("</tool_call>"), GLM.removesuffix("\n</tool_call>"), []),
    ("glm", GLM.replace("</arg_value>", ""), "", [("add", "error")]),
    ("glm", "<tool_call>add<arg_value>1</arg_value></tool_call>", "", [("", "error")]),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>more</tool_call>", "", [("add", "error")]),
    ("glm", "<tool_call></tool_call>", "", [("", "error")]),
    ("glm", f"<tool_call>{GLM}</tool_call>", "</tool_call>", [("", "error")]),
    ("kimi", f"ok{SECTION[0]}{KIMI}{KIMI}{SECTION[1]}<|im_end|>", "ok", [ADD1, ADD1]),
    ("kimi", KIMI.replace("functions.", "").replace(":0", ""), "", [ADD1]),
    ("kimi", f"{SECTION[0]}{KIMI}<|tool_call_begin|>functions.rm:1", "<|tool_call_begin|>functions.rm:1", [ADD1]),
    ("kimi", KIMI.removesuffix("<|tool_call_end|>"), KIMI.removesuffix("<|tool_call_end|>"), []),
    ("kimi", KIMI.replace('{"a": 1}', ""), "", [("add", {})]),
    ("kimi", KIMI.replace('{"a": 1}', "null"), "", [("add", "error")]),
    ("kimi", KIMI.replace('{"a": 1}', '{"n":3}{"n":3}'), "", [("add", "error")]),
    ("kimi", "<|tool_call_begin|>add<|tool_call_end|>", "", [("", "error")]),
    ("deepseek", f"ok{CALLS[0]}{V31}{V31}{CALLS[1]}<｜end▁of▁sentence｜>", "ok", [ADD1, ADD1]),
    ("deepseek", f"{CALLS[0]}{V3}\n{V3}{CALLS[1]}", "", [ADD1, ADD1]),
    ("deepseek", f"{CALLS[0]}{V31}", "", [ADD1]),
    ("deepseek", V31.removesuffix("<｜tool▁call▁end｜>"), V31.removesuffix("<｜tool▁call▁end｜>"), []),
    ("deepseek", V31.replace("1}", '"<｜tool▁call▁end｜>"}'), "", [("add", {"a": "<｜tool▁call▁end｜>"})]),
    ("deepseek", V31.replace('{"a": 1}', "{a: 1}"), "", [("add", "error")]),
    ("deepseek", V3.replace('{"a": 1}', "{a: 1}"), "", [("add", "error")]),
    ("deepseek", V3.replace("\n```<", "<"), "", [ADD1]),
    ("deepseek", V31.replace('{"a": 1}', '{"s": "```json"}'), "", [("add", {"s": "```json"})]),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>", "", [("", "error")]),
    ("mistral", 'ok[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "x1"}, {"name": "now"}]</s>', "ok", [ADD1, ("now", {})]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}</s>', "", [ADD1, ("now", {})]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}', "", [ADD1]),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', "", [ADD1]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1', '[TOOL_CALLS]add[ARGS]{"a": 1', []),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"s": "x', '[TOOL_CALLS]add[ARGS]{"s": "x', []),
    ("mistral", '[TOOL_CALLS][{"name": "add", ', '[TOOL_CALLS][{"name": "add",', []),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]no', "[TOOL_CALLS]no", [ADD1]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a: 1}[TOOL_CALLS]add[ARGS]{"a": 1}', "", [("add", "error"), ADD1]),
    ("mistral", "[TOOL_CALLS]add[ARGS]{'a': 1}</s>", "", [("add", "error")]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"n":3}{"n":3}</s>', "", [("add", "error")]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"s": "[TOOL_CALLS]"}', "", [("add", {"s": "[TOOL_CALLS]"})]),
    ("mistral", "[TOOL_CALLS]add[TOOL_CALLS]now[ARGS]{}", "", [("", "error"), ("now", {})]),
    ("mistral", "[TOOL_CALLS][]", "", [("", "error")]),
    ("mistral", "[THINK][TOOL_CALLS]add[ARGS]{}[/THINK]no", "[THINK][TOOL_CALLS]add[ARGS]{}[/THINK]no", []),
    ("llama3_json", f"{LLAMA}<|eot_id|>", "", [ADD1]),
    ("llama3_json", f"I add. <|python_tag|>{LLAMA}; {LLAMA}<|eom_id|>", "I add.", [ADD1, ADD1]),
    ("llama3_json", f"{LLAMA};{LLAMA};", "", [ADD1, ADD1]),
    ("llama3_json", f"{LLAMA}; {LLAMA[:20]}", f"; {LLAMA[:20]}", [ADD1]),
    ("llama3_json", f'{LLAMA}; {{"name": "x<|python_tag|>{LLAMA}', f'; {{"name": "x<|python_tag|>{LLAMA}', [ADD1]),
    ("llama3_json", LLAMA[:20], LLAMA[:20], []),
    ("llama3_json", '{"name": "now"}', "", [("now", {})]),
    ("llama3_json", '{"arguments": {}}', "", [("", "error")]),
    ("llama3_json", '{"city": "Rome"}', '{"city": "Rome"}', []),
    ("llama3_json", '{"name": "Rome", "age": 3}', '{"name": "Rome", "age": 3}', []),
    ("llama3_json", f"Sure: {LLAMA}", f"Sure: {LLAMA}", []),
    ("llama3_json", f"{LLAMA} there", "", [("", "error")]),
    ("llama3_json", LLAMA + LLAMA, "", [("", "error")]),
    ("llama3_json", "{\"name\": 'add'}", "", [("", "error")]),
    ("llama3_json", '<|python_tag|>search.call(query="x")<|eom_id|>', "", [("", "error")]),
    ("llama3_json", "<|python_tag|>", "<|python_tag|>", []),
    ("gpt-oss", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{OSS}", "", [ADD1]),
    ("gpt-oss", f"<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{OSS}", "I add.", [ADD1]),
    ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>", "3", []),
    ("gpt-oss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", [ADD1]),
    ("gpt-oss", OSS.replace("commentary", "analysis"), "", [ADD1]),
    ("gpt-oss", OSS.replace("<|call|>", "<|end|>"), "", [ADD1]),
    ("gpt-oss", OSS.removesuffix("<|call|>"), '{"a": 1}', []),
    ("gpt-oss", f"{OSS}<|start|>assistant{OSS}", "", [ADD1, ADD1]),
    ("gpt-oss", OSS.removesuffix("<|call|>") + f"<|start|>assistant{OSS}", '{"a": 1}', [ADD1]),
    ("gpt-oss", OSS.replace('{"a": 1}', ""), "", [("add", {})]),
    ("gpt-oss", OSS.replace('{"a": 1}', '{"n":3}{"n":3}'), "", [("add", "error")]),
    ("gpt-oss", "<|channel|>commentary to=python<|message|>print(1)<|call|>", "", [("python", "error")]),
    ("gpt-oss", "no markers", "no markers", []),
    ("gpt-oss", "no markers<|return|>", "no markers", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "content", "calls"), CORPUS)
def test_corpus(name, answer, content, calls):
    assert read(name, answer) == (content, calls)


@pytest.mark.parametrize("name", known())
@pytest.mark.parametrize("answer", ["", " ", "An answer.", "{", '"now"', "[1, 2]", "3 < 4 > 2", "Grüße, 世界 🙂"])
def test_an_answer_without_calls_is_content(name, answer):
    assert read(name, answer) == (answer.strip(), [])


@pytest.mark.parametrize("name", known())
def test_end_of_turn_tokens_are_no_content(name):
    assert read(name, f"Done.{FORMATS[name][1]}<eos>") == ("Done.", [])


ODD = [  # what stands between the tags of hermes -> (name, arguments or what the error says)
    ('{"name":"now"}', "now", "{}"),
    ('{"arguments":{}}', "", "a call has a name, got none"),
    ('"now"', "", "a call is a JSON object with name and arguments, got a string"),
    ('{"name":"now","arguments":null}', "now", "arguments are a JSON object, got null"),
    ('{"name":"now","arguments":[1]}', "now", "got an array"),
    ('{"name":"now","arguments":"x"}', "now", "valid JSON"),
    ('{"name":"now","arguments":"{}"}', "now", "{}"),
    ('{"name":7,"arguments":{}}', "", "a call has a name, got a number"),
    ('{"name":" ","arguments":{}}', "", "a call has a name, got a string"),
    ('{"n":3}{"n":3}', "", 'got more text after it: {"n":3}'),
    ('{"name":"f","arguments":{}}\n{"name":"g","arguments":{}}', "", "got more text after it"),
    ('{"name":"f","arguments":{"s":"a\nb"}}', "", "Invalid control character"),
    ('{"name":"f","arguments":{"s":"a\\ud800"}}', "f", '{"s": "a\\ud800"}'),
    ('{"name":"f","arguments":{"s":"ü"}}', "f", '{"s": "ü"}'),
    ("[" * 100_000, "", "nested too deeply"),
    ('{"name":"f","arguments":{"n":' + "9" * 5000 + "}}", "", "valid JSON"),
]


@pytest.mark.parametrize(("body", "name", "outcome"), ODD)
def test_odd_json_has_one_written_outcome(body, name, outcome):
    (call,) = parse("hermes", f"<tool_call>{body}</tool_call>").calls
    assert call.name == name
    assert outcome in (call.error or call.arguments)
    assert len(call.error or "") < 200
    assert call.error is None or call.arguments == "{}"
