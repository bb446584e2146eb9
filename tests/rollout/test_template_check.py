"""A template is refused at start-up unless it can be shown to append; every shipped family is let through."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import normalizers

from streamrl.errors import ConfigError
from streamrl.rollout.turns import TurnEncoder
from tests.rollout.conversations import SCHEMAS
from tests.rollout.families import FAMILIES, tokenizer_of


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shipped_family_passes_the_check_at_start_up(name):
    TurnEncoder(tokenizer_of(name), {}, SCHEMAS if FAMILIES[name].has_schemas else None).check()
    TurnEncoder(tokenizer_of(name), {}, None).check()


def with_template(template: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = template
    return tokenizer


TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
BAD = {
    "does not show the tools search": ("{% for m in messages %}" + TURN + "{% endfor %}", SCHEMAS),
    "cannot render a prompt": ("{{ raise_exception('no') }}", None),
    "rewrites turns before": ("{% for m in messages %}{{ messages | length }}" + TURN + "{% endfor %}", None),
    "does not show the assistant": ("{% for m in messages if m.role == 'user' %}" + TURN + "{% endfor %}", None),
    r"got none for \(tool\)": (
        "{{ tools }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TURN + "{% endfor %}",
        SCHEMAS,
    ),
    "shows its message once": ("{% for m in messages %}" + TURN + "{% if m.role == 'user' and loop.index > 2 %}" + TURN + "{% endif %}{% endfor %}", None),
    "depends on the system prompt": ("{% for m in messages %}" + TURN + "{% if loop.index > 2 %}{{ messages[0].role }}{% endif %}{% endfor %}", None),
    "longer conversation": ("{% for m in messages %}" + TURN + "{% if loop.index == 5 %}{{ 'new page' }}{% endif %}{% endfor %}", None),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_template_that_cannot_be_shown_to_append_is_refused_at_start_up(problem):
    template, schemas = BAD[problem]
    with pytest.raises(ConfigError, match=problem):
        TurnEncoder(with_template(template), {}, schemas).check()


def test_a_tokenizer_that_changes_text_is_refused_at_start_up():
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("7", "8")
    with pytest.raises(ConfigError, match="comes back"):
        TurnEncoder(tokenizer, {}, None).check()


def test_a_system_prompt_that_moves_to_the_last_user_turn_stays_in_the_prompt():
    tokenizer = copy.deepcopy(tokenizer_of("mistral"))
    tokenizer.chat_template = tokenizer.chat_template.replace("loop.first and system", "loop.last and system")
    encoder = TurnEncoder(tokenizer, {}, SCHEMAS)
    encoder.check()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert "be brief" in tokenizer.decode(encoder.prompt(messages))
    ids = encoder.observation([*messages, {"role": "assistant", "content": "ho"}], [{"role": "user", "content": "x"}], [])
    assert tokenizer.decode(ids) == "</s>[INST] x[/INST]"
