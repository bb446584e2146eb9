"""The file of tools: schemas exactly as written, broken ones refused, one row's selection in the file's order."""

import pytest

from streamrl.config.tools import read_tools, row_tools
from streamrl.errors import ConfigError, DataError

TOOLS = """
tools:
  - class_name: mine.Weather
    config: {type: native, units: [c, f]}
    tool_schema:
      type: function
      function:
        name: weather
        parameters: {type: object, properties: {city: {type: string}}, required: [city]}
  - class_name: mine.Clock
    tool_schema: {type: function, function: {name: clock}}
"""
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tools.yaml").write_text(TOOLS)
    return str(tmp_path / "tools.yaml")


def test_schemas_are_exactly_what_the_file_says(path):
    weather, clock = read_tools(path)
    assert (weather.tool_schema, weather.class_name, weather.config) == (WEATHER, "mine.Weather", {"type": "native", "units": ["c", "f"]})
    assert (clock.tool_schema, clock.name, clock.config) == (CLOCK, "clock", {})


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (None, [WEATHER, CLOCK]),
        ({"index": 1}, [WEATHER, CLOCK]),
        ({"tool_selection": None}, [WEATHER, CLOCK]),
        ({"tool_selection": ["clock"]}, [CLOCK]),
        ({"tool_selection": ["clock", "weather"]}, [WEATHER, CLOCK]),
        ({"tool_selection": []}, None),
    ],
)
def test_a_row_gets_all_tools_or_those_it_selects_in_the_order_of_the_file(path, extra, expected):
    assert row_tools(path, extra) == expected
    assert row_tools(None, extra) is None


@pytest.mark.parametrize("selection", [["fly"], ["clock", "fly"], "clock", [1], {"clock": 1}])
def test_a_selection_of_something_else_names_the_known_tools(path, selection):
    with pytest.raises(DataError, match=r"'extra_info\.tool_selection' .*\(clock, weather\)"):
        row_tools(path, {"tool_selection": selection})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tools: []", "non-empty list `tools:`"),
        ("- class_name: x", "non-empty list `tools:`"),
        ("tools: [", "must be YAML"),
        ("tools: [{class_name: x}]", r"tools\[0\] .*tool_schema"),
        ("tools: [{class_name: x, tool_schema: {type: function, function: {name: a}}, oops: 1}]", r"tools\[0\] .*oops"),
        ("tools: [{class_name: x, tool_schema: {type: function}}]", r"tools\[0\]\.tool_schema reads"),
        ("tools: [{class_name: x, tool_schema: {function: {name: a}}}]", r"tools\[0\]\.tool_schema reads"),
        (TOOLS + TOOLS.replace("\ntools:\n", ""), "different names, got clock, weather more than once"),
    ],
)
def test_a_broken_file_is_refused_with_its_key(tmp_path, text, said):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        read_tools(str(tmp_path / "bad.yaml"))
    assert "bad.yaml" in str(error.value)


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match=r"\$\.data\.tool_config_path"):
        read_tools("/nowhere/tools.yaml")
