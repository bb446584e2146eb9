"""Small scripted stand-ins: a character tokenizer, an engine call, a scorer, a clock that jumps."""

import asyncio

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.errors import RewardError
from streamrl.protocol.generate import GenerateResult
from streamrl.protocol.groups import GroupLease
from streamrl.rollout import GroupSessionRunner

EOS = 0


class CharTokenizer:
    """One id per character; the template adds one marker in front of and behind the conversation."""

    chat_template = "x"

    def apply_chat_template(self, conversation, **kwargs):
        assert kwargs["add_generation_prompt"] and kwargs["tokenize"]
        return [ord("<"), *(ord(c) for message in conversation for c in message["content"]), ord(">")]

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(chr(i) for i in token_ids if i != EOS or not skip_special_tokens)


class ScriptedGenerate:
    """Answers calls with the given parts in order; an exception is raised, a string "hang" never answers."""

    def __init__(self, *parts):
        self.parts = list(parts)
        self.requests = []
        self.cancelled = 0

    async def __call__(self, request):
        self.requests.append(request)
        part = self.parts.pop(0)
        if isinstance(part, Exception):
            raise part
        if part == "hang":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return part


class EqualScorer:
    """1.0 when the text is the ground truth; remembers what it saw."""

    def __init__(self, error=None, later=False):
        self.error = error
        self.later = later
        self.seen = []

    def serves(self, row):
        return True

    def scores_later(self, row):
        return self.later

    async def score(self, answer):
        self.seen.append((answer.text, answer.extra_info))
        if self.error:
            raise RewardError(self.error)
        score = float(answer.text == answer.row["reward_model"]["ground_truth"])
        return score, {"score": score, "acc": score}


def part(text, stop_reason="eos", version=0, log_prob=-0.5):
    ids = [ord(c) for c in text] + ([EOS] if stop_reason == "eos" else [])
    return GenerateResult(ids, [log_prob] * len(ids), [version] * len(ids), stop_reason)


def row(prompt="2+3=", truth="5", **columns):
    return {
        "raw_prompt": [{"role": "user", "content": prompt}],
        "data_source": "s",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 4},
        **columns,
    }


def lease(the_row=None, attempt=1):
    return GroupLease("a1", attempt, 0, the_row or row(), 2, 1)


def runner_of(
    generate, *, scorer=None, max_prompt_length=8, max_response_length=6, clock=None, greedy_baseline=False, turn_level=False, vocab_size=None, **rollout
):
    return GroupSessionRunner(
        rollout=RolloutConfig(**rollout),
        data=DataConfig(max_prompt_length=max_prompt_length, max_response_length=max_response_length),
        tokenizer=CharTokenizer(),
        generate=generate,
        scorer=scorer or EqualScorer(),
        run_seed=7,
        greedy_baseline=greedy_baseline,
        turn_level=turn_level,
        vocab_size=vocab_size,
        clock=clock,
    )
