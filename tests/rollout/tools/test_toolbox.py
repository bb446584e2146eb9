"""Loading: every mistake in files and code of tools shows before a session begins, and prompts hold the schemas of all kinds of tools."""

import asyncio

import pytest

from streamrl.config.data import DataConfig
from streamrl.config.rollout import MultiTurnConfig, RolloutConfig
from streamrl.config.tools import row_tools
from streamrl.data import PromptStream, check_files
from streamrl.errors import ConfigError, DataError
from streamrl.protocol.clock import SystemClock
from streamrl.rollout.tools import AgentData, load_toolbox
from tests.data.worlds import CountingTokenizer, row, write_jsonl
from tests.rollout.tools.worlds import call, write

FUNCTIONS = '''
    from __future__ import annotations
    from streamrl.rollout.tools import tool
    from streamrl.rollout.tools.calculator import calculator

    @tool
    def shout(text: str) -> str:
        """Shouts."""
        return text.upper()

    loud = shout

    def helper():
        pass
'''
CLASSES = """
    from streamrl.rollout.tools import BaseTool, ToolResponse

    SCHEMA = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}}

    class Lookup(BaseTool):
        def schema(self):
            return SCHEMA
        async def execute(self, instance_id, parameters, *, agent_data):
            return self.config.get(parameters["key"], "nothing")

    class Clash(Lookup):
        def schema(self):
            return {"type": "function", "function": {"name": "shout"}}

    class Mute(BaseTool):
        pass

    class Foreign:
        def __init__(self, config, tool_schema):
            self.tool_schema = SCHEMA

    class Sync(Lookup):
        def execute(self, instance_id, parameters, *, agent_data):
            return "x"

    class BadSchema(Lookup):
        def schema(self):
            return {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {"key": {"type": "text"}}}}}

    class ListSchema(Lookup):
        def schema(self):
            return {"type": "function", "function": {"name": "lookup", "parameters": {"type": "array"}}}

    class NoSchema(Lookup):
        def schema(self):
            return {"name": "lookup"}

    class Requires(Lookup):
        def schema(self):
            return {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "required": ["key"]}}}

    class AnySchema(Lookup):
        def schema(self):
            return {"type": "function", "function": {"name": "lookup", "parameters": True}}

    class Exits(Lookup):
        def __init__(self, config, tool_schema):
            raise SystemExit(3)

    class Ends(BaseException):
        pass

    class EndsAll(Lookup):
        def __init__(self, config, tool_schema):
            raise Ends("all")

    class Broken(Lookup):
        def __init__(self, config, tool_schema):
            raise OSError("no database")

    number = 3
"""
ONE = 'from streamrl.rollout.tools import tool\n@tool\ndef f(a: int):\n    """F."""\n'


@pytest.fixture
def functions(tmp_path):
    return write(tmp_path / "functions.py", FUNCTIONS)


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """A tool file that names a class of a module of its own."""
    module = f"tools_of_{tmp_path.name}".replace("-", "_")
    write(tmp_path / f"{module}.py", CLASSES)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name, file=None, **entry):
        class_name = name if "." in name or entry.pop("bare", False) else f"{module}.{name}"
        lines = "".join(f", {key}: {value}" for key, value in entry.items())
        return write(tmp_path / f"{file or name}.yaml", f"tools: [{{class_name: {class_name}{lines}}}]")

    return make


def boxed(tools=None, functions=None):
    return load_toolbox(DataConfig(tool_config_path=tools), RolloutConfig(multi_turn=MultiTurnConfig(function_tool_path=functions)))


def answered(box, extra_info, *calls):
    async def run():
        a_session = box.session(extra_info, AgentData("r", [], {}), RolloutConfig(multi_turn=MultiTurnConfig(max_parallel_calls=5)), SystemClock())
        results = await a_session.call(calls)
        await a_session.close()
        return [result.text for result in results]

    return asyncio.run(run())


def test_classes_and_functions_are_one_toolbox_with_one_list_of_schemas(listed, functions):
    box = boxed(listed("Lookup", config="{type: native, a: found}"), functions)
    assert [schema["function"]["name"] for schema in box.schemas(None)] == ["lookup", "calculator", "shout"]
    calls = [call("lookup", '{"key": "a"}'), call("shout", '{"text": "x"}'), call("calculator", '{"expression": "6*7"}')]
    assert answered(box, None, *calls) == ["found", "X", "42"]
    assert boxed(listed("Lookup", config="{type: native, a: found}"), functions) is box  # loaded once


def test_a_row_can_call_only_the_tools_it_selects(functions):
    box = boxed(None, functions)
    shout = {"tool_selection": ["shout"]}
    assert [schema["function"]["name"] for schema in box.schemas(shout)] == ["shout"]
    assert answered(box, shout, call("calculator", '{"expression": "1"}')) == ["Error: there is no tool 'calculator'; known: shout"]
    assert box.schemas({"tool_selection": []}) is None
    with pytest.raises(DataError, match=r"\(calculator, shout\)"):
        box.schemas({"tool_selection": ["fly"]})


def test_a_tool_file_may_name_a_function_and_write_another_schema(listed):
    name = "streamrl.rollout.tools.calculator.calculator"
    assert answered(boxed(listed(name)), None, call("calculator", '{"expression": "2*3"}')) == ["6"]
    own = "{type: function, function: {name: calc, parameters: {type: object, properties: {expression: {type: string, maxLength: 3}}}}}"
    box = boxed(listed(name, file="own", tool_schema=own))
    good, bad = answered(box, None, call("calc", '{"expression": "2*3"}'), call("calc", '{"expression": "2*33"}'))
    assert good == "6" and "wrong arguments: '2*33' is too long" in bad


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Absent", r"must exist, got a module .* without 'Absent'"),
        ("nowhere.Tool", "must be importable, got ModuleNotFoundError"),
        ("number", "a tool class or a function decorated by @tool, got int"),
        ("Mute", r"from \(config, tool_schema\), got ConfigError: a tool has a schema"),
        ("Broken", "got OSError: no database"),
        ("Exits", "Exits must be a class .*, got SystemExit: 3"),
        ("EndsAll", "got Ends: all"),
        ("Requires", "requires what is among its properties, got key,"),
        ("AnySchema", "have type object, got True"),
        ("Foreign", "must derive from streamrl.rollout.tools.BaseTool"),
        ("Sync", "execute of a tool class must be async"),
        ("BadSchema", r"JSON Schema, got parameters\.properties\.key\.type where 'text'"),
        ("ListSchema", "have type object, got 'array'"),
        ("NoSchema", r"reads \{type: function"),
    ],
)
def test_a_class_that_cannot_be_a_tool_is_refused_with_its_key(listed, name, said):
    with pytest.raises(ConfigError, match=said) as error:
        boxed(listed(name))
    assert str(error.value).startswith("$.data.tool_config_path: ")


def test_a_module_that_exits_is_refused_with_its_key(tmp_path, listed):
    write(tmp_path / "exits_at_once.py", "import sys\nsys.exit(1)")
    with pytest.raises(ConfigError, match=r"^\$\.data\.tool_config_path: .*exits_at_once\.Tool must be importable, got SystemExit: 1"):
        boxed(listed("exits_at_once.Tool", file="exits"))


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ("{expression: {type: string}, digits: {type: integer}}", r"are parameters of the function \(expression\), got digits;"),
        ("{}", "every parameter without a default, got none for expression;"),
        ("{formula: {type: string}}", r"are parameters of the function \(expression\), got formula;"),
    ],
)
def test_a_written_schema_that_does_not_fit_its_function_is_refused(listed, properties, said):
    own = f"{{type: function, function: {{name: calc, parameters: {{type: object, properties: {properties}}}}}}}"
    with pytest.raises(ConfigError, match=said) as error:
        boxed(listed("streamrl.rollout.tools.calculator.calculator", file="own", tool_schema=own))
    assert str(error.value).startswith("$.data.tool_config_path: ")


def test_a_name_without_a_module_is_an_entry_point(listed):
    with pytest.raises(ConfigError, match=r"an entry point of streamrl\.tools \(installed: none\)"):
        boxed(listed("Plugin", bare=True))


def test_a_class_and_a_function_of_one_name_are_refused(listed, functions):
    with pytest.raises(ConfigError, match=r"\$\.rollout\.multi_turn\.function_tool_path: .*different names, got shout more than once"):
        boxed(listed("Clash"), functions)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "at least one function decorated by @tool, got none"),
        ("def f(:", "must be loadable, got SyntaxError"),
        ("import nowhere_at_all", "must be loadable, got ModuleNotFoundError"),
        ("import sys\nsys.exit(7)", r"/bad\.py must be loadable, got SystemExit: 7"),
        ("class Ends(BaseException): pass\nraise Ends('now')", r"/bad\.py must be loadable, got Ends: now"),
        (ONE.replace("@tool", "@tool(name='f g')"), "the schema of f has a name of 1 to 64 .*, got 'f g'"),
        ('from streamrl.rollout.tools import tool\n@tool\ndef f(*a: int):\n    """F."""', "got ValueError: .*variadic"),
        (ONE + "class N:\n" + "".join(f"    {line}\n" for line in ONE.splitlines()[1:]) + "g = N.f", "different names, got f more than once"),
    ],
)
def test_a_file_of_functions_that_cannot_be_tools_is_refused_with_its_key(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said) as error:
        boxed(None, write(tmp_path / "bad.py", text))
    assert str(error.value).startswith("$.rollout.multi_turn.function_tool_path: ")


def test_the_filter_measures_the_schemas_that_code_declares(tmp_path, listed, functions):
    """Ten tokens a tool, three tools and one token for the generation prompt."""
    files = write_jsonl(tmp_path / "t.jsonl", [row(prompt=[{"role": "user", "content": "x" * size}]) for size in (20, 33, 34)])
    data = DataConfig(
        train_files=files,
        filter_overlong_prompts=True,
        max_prompt_length=64,
        tool_config_path=listed("Lookup"),
        function_tool_path=functions,
    )
    assert check_files(data).num_train_rows == 3
    assert len(row_tools(data, None)) == 3
    stream = PromptStream(data, run_seed=1, total_epochs=1, tokenizer=CountingTokenizer())
    assert asyncio.run(stream.num_prompts()) == 2


def test_a_selection_that_only_code_can_judge_is_judged_when_the_prompts_are_read(tmp_path, functions):
    files = write_jsonl(tmp_path / "t.jsonl", [row(), row(extra_info={"tool_selection": ["fly"]})])
    data = DataConfig(train_files=files, function_tool_path=functions)
    check_files(data)
    with pytest.raises(DataError, match=r"t\.jsonl, row 1 .*'extra_info\.tool_selection' .*\(calculator, shout\), got \['fly'\]"):
        PromptStream(data, run_seed=1, total_epochs=1)
