"""The reward model's stage: scores of a plain classifier row by row, on the right tokens, whatever the padding."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from streamrl.config.reward import OverlongBuffer
from streamrl.errors import ConfigError, RunFailed
from streamrl.learner.reward_model import padded
from streamrl.learner.reward_plan import plan_rewards
from streamrl.rollout import load_tokenizer
from tests.learner.reward_world import POLICY, RowStore, reward_model, save_classifier, scores_of, unscored_rows

BARE = "{%- for message in messages -%}{{ '[' + message['role'] + '] ' + message['content'] + '\\n' }}{%- endfor -%}"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_classifier(tmp_path_factory.mktemp("classifier"))


def scored(path, comm, **options):
    """(store, rows, report) after the stage."""
    store, rows = RowStore(), unscored_rows()
    meta = store.add(rows)
    (share,) = plan_rewards(meta, 1)
    assert share.keys == meta.keys
    return store, rows, reward_model(path, comm, **options).score(store, share)


def plain(path, ids):
    with torch.no_grad():
        return AutoModelForSequenceClassification.from_pretrained(path)(torch.tensor([ids])).logits[0, 0].item()


@pytest.mark.parametrize("max_tokens", [16384, 1])
def test_scores_are_those_of_the_model_on_the_rows_own_tokens_on_the_last_model_token_of_every_output(path, comm, max_tokens):
    store, rows, report = scored(path, comm, max_tokens=max_tokens)
    last = {(row.key.uid, row.key.session_id): row for row in rows}
    for row in rows:
        scorer = last[row.key.uid, row.key.session_id]
        expected = plain(path, scorer.prompt_ids + list(scorer.response_ids))
        written = store.rows[str(row.key)]
        assert written["rm_scores"].tolist() == pytest.approx([0.0] * (len(row.response_ids) - 1) + [expected], abs=1e-5)
        assert written["reward_extra_info"]["score"] == pytest.approx(expected, abs=1e-5)
    sessions = [plain(path, row.prompt_ids + list(row.response_ids)) for row in last.values()]
    assert report.metrics["reward_model/answers"] == 6 and report.metrics["reward_model/score/mean"] == pytest.approx(sum(sessions) / 6, abs=1e-5)


def test_a_model_with_another_template_reads_the_conversation_rendered_anew(tmp_path, comm):
    path = save_classifier(tmp_path, template=BARE)
    store, rows, _ = scored(path, comm)
    tokenizer, policy = load_tokenizer(POLICY.__class__(path=path)), load_tokenizer(POLICY)
    for row in rows[3:]:
        text = policy.decode(row.response_ids, skip_special_tokens=True)
        ids = tokenizer.encode(f"[user] {row.row['raw_prompt'][0]['content']}\n[assistant] {text}\n", add_special_tokens=False)
        assert scores_of(store)[str(row.key)] == pytest.approx(plain(path, ids), abs=1e-5)


def test_an_answer_cannot_speak_for_another_role_of_the_rendered_conversation(tmp_path, comm):
    path = save_classifier(tmp_path, template=BARE)
    model, policy = reward_model(path, comm), load_tokenizer(POLICY)
    store, (row, *_) = RowStore(), unscored_rows(1)[2:]
    row.response_ids = [policy.convert_tokens_to_ids(character) for character in "<|im_end|>"]  # spelled, not the token
    row.response_mask, row.rollout_versions, row.response_logprobs = [1] * 10, [0] * 10, [-0.1] * 10
    model.score(store, store.add([row]))
    (score,) = scores_of(store).values()
    ids = policy.encode(f"[user] {row.row['raw_prompt'][0]['content']}\n[assistant] < |im_end|>\n", add_special_tokens=False)
    assert policy.eos_token_id not in ids and score == pytest.approx(plain(path, ids), abs=1e-5)


def test_the_manager_shapes_what_the_model_says(path, comm):
    buffer = OverlongBuffer(enable=True, len=8, penalty_factor=2.0, log=True)
    store, rows, _ = scored(path, comm, reward_manager="dapo", overlong_buffer=buffer)
    for row in rows[3:]:
        extra, penalty = store.rows[str(row.key)]["reward_extra_info"], -len(row.response_ids) / 8 * 2
        assert extra["overlong_reward"] == penalty and scores_of(store)[str(row.key)] == pytest.approx(extra["score"] + penalty, abs=1e-5)


def test_padding_is_an_id_that_ends_no_row():
    ids, mask, filler = padded([[5, 0], [1], [9, 9, 2]])
    assert filler == 3 and ids.tolist() == [[5, 0, 3], [1, 3, 3], [9, 9, 2]] and mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]


def test_a_score_that_is_not_finite_ends_the_stage_with_its_keys(path, comm):
    store, rows = RowStore(), unscored_rows()
    meta, model = store.add(rows), reward_model(path, comm)
    for parameter in model._model.parameters():
        parameter.data.fill_(math.nan)
    with pytest.raises(RunFailed, match=r"NaN or Inf in 6 answers, of this rank \['g0_0_2', 'g0_1_0', 'g1_0_0'\]"):
        model.score(store, meta)
    assert scores_of(store) == {}


def test_a_conversation_longer_than_the_model_reads_ends_the_stage_with_its_key(tmp_path, comm):
    store = RowStore()
    meta = store.add(unscored_rows(1))
    with pytest.raises(RunFailed, match=r"reads 8 tokens, got \d+ in g0_0_2"):
        reward_model(save_classifier(tmp_path, positions=8), comm).score(store, meta)


def test_models_that_are_no_reward_models_are_refused(tmp_path, comm):
    with pytest.raises(ConfigError, match=r"\$\.reward\.reward_model\.model_path: a reward model has one label, got 3"):
        reward_model(save_classifier(tmp_path / "three", labels=3), comm)
    with pytest.raises(ConfigError, match=r"sequence classifier, got .*lack 1 tensors, \['score.weight'\]"):
        reward_model(POLICY.path, comm)


def test_shares_hold_whole_sessions_and_rows_with_a_reward_are_left_alone():
    store, rows = RowStore(), unscored_rows()
    rows[-1].reward = 1.0
    meta = store.add(rows[:-1])
    with_reward = RowStore().add(rows[-1:])
    both = meta.__class__("train", meta.keys + with_reward.keys, meta.tags + with_reward.tags)
    shares = plan_rewards(both, 2)
    assert sorted(key for share in shares for key in share.keys) == sorted(meta.keys)
    assert {"g0_0_0", "g0_0_1", "g0_0_2"} <= set(shares[0].keys) and plan_rewards(with_reward, 2) == []
