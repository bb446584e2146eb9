"""@tool: schemas from hints and docstrings, what has none, and what functions may return."""

import asyncio
import dataclasses
import enum
import re
from typing import Any, Literal

import pytest

from streamrl.rollout.tools import ToolResponse, tool
from tests.rollout.tools.worlds import call, results, session


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


@dataclasses.dataclass
class Place:
    """Where."""

    city: str
    title: str = ""


def parameters(function):
    return function.__tool_schema__["function"]["parameters"]


def test_the_schema_is_made_of_hints_defaults_and_docstring():
    @tool
    def weather(city: str, days: int = 3, unit: Literal["c", "f"] = "c", tags: list[str] = [], limit: float | None = None) -> str:  # noqa: B006
        """Says the weather,
        roughly.

        Args:
            city (str): Name of the city,
                with its country.
            days: How many.

        Returns:
            Text.
        """

    assert weather.__tool_schema__ == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says the weather, roughly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city, with its country."},
                    "days": {"type": "integer", "default": 3, "description": "How many."},
                    "unit": {"enum": ["c", "f"], "default": "c"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "limit": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
                },
                "required": ["city"],
            },
        },
    }


def test_nested_types_are_written_out_and_a_property_named_title_stays():
    @tool
    def visit(where: Place, unit: Unit, notes: dict[str, Any]):
        """Goes there."""

    found = parameters(visit)
    assert found["properties"]["where"]["properties"]["title"] == {"type": "string", "default": ""}
    assert (found["properties"]["unit"], found["properties"]["notes"]) == ({"enum": ["c", "f"]}, {"type": "object"})
    assert "$ref" not in str(found)


def test_a_decorated_function_stays_a_function_and_may_get_another_name():
    @tool(name="plus", description="Sums.")
    def add(a: int, b: int = 1):
        return a + b

    assert add(1) == 2
    assert (add.__tool_schema__["function"]["name"], add.__tool_schema__["function"]["description"]) == ("plus", "Sums.")


def test_what_has_no_schema_is_refused():
    def variadic(*numbers: int):
        """Sums."""

    def keywords(**numbers: int):
        """Sums."""

    def untyped(a):
        """Sums."""

    def silent(a: int):
        pass

    def odd(a: asyncio.Event):
        """Waits."""

    def misdescribed(a: int):
        """Sums.

        Args:
            b: Not there.
        """

    said = {variadic: r"\*numbers.*variadic", keywords: "variadic", untyped: "type hint", silent: "docstring", odd: "JSON Schema", misdescribed: "got b for"}
    for function, text in said.items():
        with pytest.raises(ValueError, match=text):
            tool(function)
    with pytest.raises(ValueError, match="derives from BaseTool"):
        tool(Place)


def test_a_second_function_of_the_same_name_is_refused():
    @tool
    def add(a: int):
        """Adds."""

    with pytest.raises(ValueError, match="one function, got a second one for 'add'"):

        @tool
        def add(a: str):
            """Adds."""


@pytest.mark.parametrize(
    ("returned", "text", "reward", "metrics"),
    [
        ("text", "text", None, {}),
        ({"a": [1, "ü"]}, '{"a": [1, "ü"]}', None, {}),
        (ToolResponse(text="x"), "x", None, {}),
        (7, "7", None, {}),
        (None, "None", None, {}),
        (("x",), "x", None, {}),
        (("x", 1), "x", 1.0, {}),
        (({"a": 1}, None, {"n": 1}), '{"a": 1}', None, {"n": 1}),
        ("bad \ud800 half", "bad ? half", None, {}),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_function_returns_becomes_a_result(returned, text, reward, metrics, is_async):
    @tool
    def sync_tool():
        """Returns."""
        return returned

    @tool
    async def async_tool():
        """Returns."""
        return returned

    function = async_tool if is_async else sync_tool
    (result,) = results(session(function), call(function.__name__))
    assert (result.outcome, result.text, result.reward, result.metrics) == ("ok", text, reward, metrics)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ((), "TypeError: .*tuple of 0"),
        ((1, 2, 3, 4), "TypeError: .*tuple of 4"),
        (("x", float("nan")), "ValueError: .*finite"),
        (("x", float("-inf")), "ValueError: .*finite"),
        (("x", "1.0"), "TypeError: .*number"),
        (("x", None, [1]), "TypeError: .*metrics"),
        (ToolResponse(video=[1]), "NotImplementedError: "),
    ],
)
def test_a_wrong_return_is_an_error_without_reward(returned, said):
    @tool
    def wrong():
        """Returns."""
        return returned

    (result,) = results(session(wrong), call("wrong"))
    assert (result.outcome, result.reward) == ("error", 0.0)
    assert re.search(said, result.text)


def test_arguments_are_converted_to_their_hints():
    seen = []

    @tool
    def visit(where: Place, unit: Unit = Unit.CELSIUS):
        """Goes there."""
        seen.append((where, unit))

    results(session(visit), call("visit", '{"where": {"city": "Bern"}}'), call("visit", '{"where": {"city": "Bern"}, "unit": "f"}'))
    assert sorted(seen, key=str) == sorted([(Place("Bern"), Unit.CELSIUS), (Place("Bern"), Unit.FAHRENHEIT)], key=str)
