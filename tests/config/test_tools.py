"""The file of tools: schemas exactly as written, broken ones refused, a row's selection in the file's order. Tools that code declares: tests/rollout/tools."""

import pytest

from streamrl.config.checks import check
from streamrl.config.data import DataConfig
from streamrl.config.load import load, resolve
from streamrl.config.tools import check_selection, check_tool_files, read_tools, row_tools
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
    assert row_tools(DataConfig(tool_config_path=path), extra) == expected
    assert row_tools(DataConfig(), extra) is None


@pytest.mark.parametrize("selection", [["fly"], ["clock", "fly"], "clock", [1], {"clock": 1}])
def test_a_selection_of_something_else_names_the_known_tools(path, selection):
    with pytest.raises(DataError, match=r"'extra_info\.tool_selection' .*\(clock, weather\)"):
        row_tools(DataConfig(tool_config_path=path), {"tool_selection": selection})
    with pytest.raises(DataError, match=r"clock, weather"):
        check_selection(DataConfig(tool_config_path=path), {"tool_selection": selection})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tools: []", "non-empty list `tools:`"),
        ("- class_name: x", "non-empty list `tools:`"),
        ("tools: [", "must be YAML"),
        ("tools: [{tool_schema: {type: function, function: {name: a}}}]", r"tools\[0\] .*class_name"),
        ("tools: [{class_name: x, config: {type: mcp}}]", r"config\.type is native, got 'mcp'"),
        ("tools: [{class_name: x, tool_schema: {type: function, function: {name: a}}, oops: 1}]", r"tools\[0\] .*oops"),
        ("tools: [{class_name: x, tool_schema: {type: function}}]", r"tools\[0\]\.tool_schema reads"),
        ("tools: [{class_name: x, tool_schema: {function: {name: a}}}]", r"tools\[0\]\.tool_schema reads"),
        ("tools: [{class_name: x, tool_schema: {type: function, function: {name: 'a b'}}}]", r"tools\[0\]\.tool_schema has a name of 1 to 64 .*'a b'"),
        (f"tools: [{{class_name: x, tool_schema: {{type: function, function: {{name: {'a' * 65}}}}}}}]", "has a name of 1 to 64"),
        (TOOLS.replace("required: [city]", "required: [city, day]"), r"tools\[0\]\.tool_schema requires what is among its properties, got day,"),
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


GIVEN = ["model.path=m", "data.train_files=t.parquet"]


@pytest.mark.parametrize("name", ["tool_config_path", "function_tool_path"])
@pytest.mark.parametrize("keys", [("data",), ("rollout.multi_turn",), ("data", "rollout.multi_turn")])
def test_a_path_may_be_given_under_either_key_and_then_stands_under_both(tmp_path, monkeypatch, name, keys):
    monkeypatch.chdir(tmp_path)
    config = load([], [*GIVEN, *(f"{key}.{name}=tools.py" for key in keys)])
    check(config)
    found = resolve(config)
    assert getattr(found.data, name) == getattr(found.rollout.multi_turn, name) == str(tmp_path / "tools.py")
    assert resolve(found) == found


@pytest.mark.parametrize("name", ["tool_config_path", "function_tool_path"])
def test_two_different_paths_are_refused(name):
    with pytest.raises(ConfigError, match=rf"\$\.rollout\.multi_turn\.{name}: must be the same as data\.{name} \(a\.py\)"):
        check(load([], [*GIVEN, f"data.{name}=a.py", f"rollout.multi_turn.{name}=b.py"]))
    with pytest.raises(ConfigError, match=r"must not be empty"):
        check(load([], [*GIVEN, f"rollout.multi_turn.{name}=''"]))


def test_the_driver_imports_no_code_of_tools(tmp_path):
    """What only the code declares is checked by the actors; the driver still refuses what is no list of names."""
    (tmp_path / "f.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: nowhere.Tool}]")
    for data in (DataConfig(function_tool_path=str(tmp_path / "f.py")), DataConfig(tool_config_path=str(tmp_path / "tools.yaml"))):
        check_tool_files(data)
        check_selection(data, {"tool_selection": ["whatever"]})
        with pytest.raises(DataError, match="lists names of the run's tools, got 'a'"):
            check_selection(data, {"tool_selection": "a"})
        with pytest.raises(ConfigError, match=r"imported|nowhere"):
            row_tools(data, None)


@pytest.mark.parametrize("path", ["/nowhere/f.py", __file__.removesuffix(".py")])
def test_a_file_of_functions_that_is_none_is_refused(path):
    with pytest.raises(ConfigError, match=r"\$\.rollout\.multi_turn\.function_tool_path: an existing Python file"):
        check_tool_files(DataConfig(function_tool_path=path))
