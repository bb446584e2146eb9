"""A package that a third party could have written: one loop, tool, parser, interaction and reward, brought to streamrl by entry points alone."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ENTRY_POINTS = {
    "agent_loops": {"plugin_loop": "PluginLoop"},
    "tools": {"plugin_double": "double"},
    "tool_parsers": {"plugin_format": "PluginParser"},
    "interactions": {"plugin_world": "PluginWorld"},
    "rewards": {"plugin/rows": "reward"},
}

FIRST_TOKENS = 4  # of each answer that the loop asks for
CODE = '''
from msgspec.structs import replace

from streamrl.protocol.generate import GenerateRequest
from streamrl.rollout import AgentLoopBase, parsers
from streamrl.rollout.interactions import BaseInteraction
from streamrl.rollout.parsers import Parsed, ToolCall
from streamrl.rollout.tools import AgentData, tool
from streamrl.rollout.transcript import Transcript
from streamrl.rollout.turns import TurnEncoder

FIRST_TOKENS = FIRST


@tool
def double(number: int):
    """Doubles a number.

    Args:
        number: Any whole number.
    """
    return str(2 * number), float(number), {}


class PluginParser:
    """Whatever the model wrote, it is a call."""

    stop_token_ids = ()

    def __init__(self, tokenizer):
        pass

    def parse(self, token_ids, schemas):
        return Parsed("", (ToolCall(schemas[0]["function"]["name"], '{"number": 21}'),))


class PluginWorld(BaseInteraction):
    async def generate_response(self, instance_id, messages, **interaction_kwargs):
        return True, "", float(messages[-1]["content"]) / 100, {}


class PluginLoop(AgentLoopBase):
    """A few tokens, a call of the tool, and an answer that the interaction judges."""

    async def run(self, sampling, **row):
        extra_info = row["extra_info"]
        schemas = self.tools.schemas(extra_info)
        messages = list(row["raw_prompt"])
        turns = TurnEncoder(self.tokenizer, self.data.apply_chat_template_kwargs, schemas)
        size = self.data.max_response_length
        script = Transcript(turns.prompt(messages), response_length=size, model_len=self.data.max_prompt_length + size, with_log_probs=True)
        tools = self.tools.session(extra_info, AgentData(self.request_id, messages, row), self.rollout, self.clock)
        world = self.interactions.session(extra_info, self.request_id, 10.0, self.clock)
        try:
            await world.start()
            ids = await self.say(script, sampling, FIRST_TOKENS)
            calls = parsers.get(self.rollout.multi_turn.format)(self.tokenizer).parse(ids, schemas).calls
            (result,) = await tools.call(calls)
            said = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": {
                "name": calls[0].name, "arguments": calls[0].arguments}}]}
            answer = {"role": "tool", "content": result.text, "tool_call_id": "call00000"}
            assert script.add_observation(turns.observation([*messages, said], [answer], script.ids))
            await self.say(script, sampling, FIRST_TOKENS)
            turn = await world.respond([*messages, said, answer])
        finally:
            await tools.close()
            await world.close()
        return script.output("interaction_end", 4, turn_scores=[turn.score], tool_rewards=[result.reward])

    async def say(self, script, sampling, room):
        result = await self.generate(GenerateRequest(self.request_id, script.ids, replace(sampling, max_tokens=script.room(room, None))))
        script.add_model(result)
        return result.token_ids


def reward(data_source, solution_str, ground_truth, extra_info):
    """Says what it was told, and differs within a group so that there is something to learn."""
    return {"score": 3.0 + len(solution_str) % 2, "told_reward": sum(extra_info["tool_rewards"]), "told_turn": sum(extra_info["turn_scores"])}
'''.replace("FIRST_TOKENS = FIRST", f"FIRST_TOKENS = {FIRST_TOKENS}")


def write_package(folder: Path, *, name: str = "streamrl-plugin", module: str = "streamrl_plugin", code: str = CODE) -> Path:
    """A source tree that pip can install; the module has all the names of ``ENTRY_POINTS``."""
    folder.mkdir(parents=True)
    groups = "".join(
        f'\n[project.entry-points."streamrl.{group}"]\n' + "".join(f'"{entry}" = "{module}:{target}"\n' for entry, target in entries.items())
        for group, entries in ENTRY_POINTS.items()
    )
    build = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    (folder / "pyproject.toml").write_text(f'{build}\n[project]\nname = "{name}"\nversion = "1.0"\n\n[tool.setuptools]\npy-modules = ["{module}"]\n{groups}')
    (folder / f"{module}.py").write_text(code)
    return folder


def make_venv(folder: Path) -> Path:
    """The interpreter of a fresh environment that sees all packages of this one. The tests may run in an environment themselves, whose packages
    ``--system-site-packages`` would not show: a .pth file adds them, their own .pth files included."""
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "packages_of_the_tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return python


def install(python: Path, *packages: Path) -> None:
    """Into the interpreter's own environment, without an index."""
    flags = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-build-isolation", "--no-deps"]
    subprocess.run([str(python), "-m", "pip", "install", *flags, *map(str, packages)], check=True)
