"""What a chat template renders of an assistant's calls, the parser reads back: the shapes of the model families' templates, through transformers' own renderer.

The templates here hold the assistant turn alone. Two more checks ask the families' own libraries, which come with vLLM, where they are installed.
"""

import inspect
import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.rollout.parsers.worlds import parse, schema

ARGUMENTS = {"city": 'Zürich "HB"\n世 <b>&', "days": 3, "exact": True, "tags": ["a", "b"], "where": {"lat": 1.5, "note": None}}
CALLS = [("weather", ARGUMENTS), ("now", {}), ("weather", {"city": "7", "days": -1})]
SCHEMAS = [schema("weather", city="string", days="integer", exact="boolean", tags="array", where="object"), schema("now")]

EACH = "{%- set m = messages[-1] %}{{- m.content }}{%- for call in m.tool_calls %}{%- set f = call.function %}"
TEXT = "{{- v if v is string else v | tojson(ensure_ascii=False) }}"
TEMPLATES = {
    "hermes": EACH
    + """{{- '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}{{- f.arguments | tojson }}"""
    + """{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}""",
    "qwen3_coder": EACH
    + """{{- '\\n\\n<tool_call>\\n<function=' + f.name + '>\\n' }}{%- for k, v in f.arguments | items %}{{- '<parameter=' + k + '>\\n' }}"""
    + TEXT
    + """{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>' }}""",
    "glm": EACH
    + """{{- '\\n<tool_call>' + f.name + '\\n' }}{%- for k, v in f.arguments | items %}{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"""
    + TEXT
    + """{{- '</arg_value>\\n' }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}{{- '<|observation|>' }}""",
    "minimax": EACH
    + """{{- '\\n<minimax:tool_call>\\n' if loop.first else '' }}{{- '<invoke name="' + f.name + '">\\n' }}{%- for k, v in f.arguments | items %}"""
    + """{{- '<parameter name="' + k + '">' }}"""
    + TEXT
    + """{{- '</parameter>\\n' }}{%- endfor %}{{- '</invoke>\\n' }}{%- endfor %}{{- '</minimax:tool_call>[e~[\\n' }}""",
    "kimi": EACH
    + """{{- '<|tool_calls_section_begin|>' if loop.first else '' }}{{- '<|tool_call_begin|>functions.' + f.name + ':' + loop.index0 | string }}"""
    + """{{- '<|tool_call_argument_begin|>' }}{{- f.arguments | tojson }}{{- '<|tool_call_end|>' }}{%- endfor %}"""
    + """{{- '<|tool_calls_section_end|><|im_end|>' }}""",
    "deepseek": EACH
    + """{{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' }}"""
    + """{{- f.arguments | tojson }}{{- '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}""",
}


def as_message(content, calls):
    functions = [{"type": "function", "id": f"call{i:05}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    return {"role": "assistant", "content": content, "tool_calls": functions}


def check(name, answer, content, calls):
    parsed = parse(name, answer, SCHEMAS)
    assert [(call.name, call.error or json.loads(call.arguments)) for call in parsed.calls] == calls
    assert parsed.content == content


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["", "I look it up."])
def test_what_a_template_renders_is_read_back(name, content):
    rendered, _ = render_jinja_template(conversations=[[as_message(content, CALLS)]], chat_template=TEMPLATES[name])
    check(name, rendered[0].rstrip(), content, CALLS)


def test_a_single_call_of_llama_is_read_back():
    template = """{%- set f = messages[-1].tool_calls[0].function %}"""
    template += """{{- '{"name": "' + f.name + '", "parameters": ' }}{{- f.arguments | tojson }}{{- '}<|eot_id|>' }}"""
    rendered, _ = render_jinja_template(conversations=[[as_message("", CALLS[:1])]], chat_template=template)
    check("llama3_json", rendered[0], "", CALLS[:1])


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_mistrals_own_templates_are_read_back(version):
    templates = pytest.importorskip("mistral_common.integrations.chat_templates.chat_templates")
    versions = pytest.importorskip("mistral_common.tokens.tokenizers.base").TokenizerVersion
    config = inspect.signature(templates.generate_chat_template).parameters
    chosen = dict.fromkeys(config, None) | dict.fromkeys([key for key in config if key == "spm" or key.endswith(("support", "variables"))], False)
    template = templates.generate_chat_template(**chosen | {"tokenizer_version": versions(version)})
    messages = [{"role": "user", "content": "Weather?"}, as_message("", CALLS)]
    rendered, _ = render_jinja_template(conversations=[messages], chat_template=template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    check("mistral", rendered[0].partition("[/INST]")[2], "", CALLS)


def test_what_harmony_renders_is_read_back():
    harmony = pytest.importorskip("openai_harmony")
    try:
        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:  # its vocabulary is fetched once
        pytest.skip(f"no vocabulary: {error}")
    message = harmony.Message.from_role_and_content
    said = [message(harmony.Role.ASSISTANT, "hm").with_channel("analysis"), message(harmony.Role.ASSISTANT, "I look it up.").with_channel("commentary")]
    for name, arguments in CALLS:
        call = message(harmony.Role.ASSISTANT, json.dumps(arguments)).with_channel("commentary")
        said.append(call.with_recipient(f"functions.{name}").with_content_type("<|constrain|>json"))
    ids = [i for item in said for i in encoding.render(item)]
    text = encoding.decode(ids).removeprefix("<|start|>assistant")
    check("gpt-oss", text, "I look it up.", CALLS)
