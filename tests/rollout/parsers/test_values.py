"""Text of XML-style parameters becomes what the schema declares, or an error; nothing is evaluated."""

import json

import pytest

from streamrl.rollout.parsers.typed_values import MAX_LITERAL_CHARS
from tests.rollout.parsers.worlds import ADD, parse, schema


def given(text, declared):
    (call,) = parse("qwen3_coder", f"<function=f><parameter=p>\n{text}\n</parameter></function>", [ADD, schema("f", p=declared)]).calls
    return call.error or json.loads(call.arguments)["p"]


@pytest.mark.parametrize(
    ("text", "declared", "value"),
    [
        ("7", "integer", 7),
        (" 7 ", "integer", 7),
        ("7", "string", "7"),
        ("7", {}, "7"),
        ("7", {"type": "no such type"}, "7"),
        ("7", "number", 7),
        ("7.5", "number", 7.5),
        ("true", "boolean", True),
        ("True", "boolean", True),
        ("[1, 2]", "array", [1, 2]),
        ("(1, 'a')", "array", [1, "a"]),
        ('{"a": null}', "object", {"a": None}),
        ("{'a': None}", "object", {"a": None}),
        ("null", ["integer", "null"], None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("five", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "five"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ('"quoted"', "string", '"quoted"'),
        ("", "string", ""),
        ("ü\n世", "string", "ü\n世"),
    ],
)
def test_a_value_is_converted_by_its_declared_type(text, declared, value):
    assert given(text, declared) == value


@pytest.mark.parametrize(
    ("text", "declared"),
    [
        ("seven", "integer"),
        ("7.5", "integer"),
        ("true", "integer"),
        ("1", "boolean"),
        ("null", "integer"),
        ("", "integer"),
        ("{1, 2}", "array"),
        ("[{1}]", "array"),
        ("{b'a': 1}", "object"),
        ("1+2j", "number"),
        ("inf", "number"),
        ("1e999", "number"),
        ("NaN", "number"),
        ("__import__('os').getcwd()", "object"),
        ("[x for x in [1]]", "array"),
        ("(" * 3000, "array"),
        ("[" + "-" * 4000 + "1]", "array"),
        ("0x" + "f" * 4090, "integer"),
        ("{'a': 1," + " " * MAX_LITERAL_CHARS + "}", "object"),
    ],
)
def test_a_value_of_another_type_is_an_error(text, declared):
    error = given(text, declared)
    assert isinstance(error, str) and ("is wanted" in error or "plain JSON" in error) and len(error) < 250


def test_long_values_are_read_as_json():
    assert given(json.dumps(list(range(5000))), "array") == list(range(5000))


def test_without_schemas_every_value_is_text():
    (call,) = parse("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", []).calls
    assert json.loads(call.arguments) == {"a": "1"}
