"""What ``take`` sends to a trainer stays small: keys and tags, never columns."""

from __future__ import annotations

import msgspec
import pytest

from streamrl.protocol.fields import trajectory_tag
from streamrl.protocol.groups import SessionPush, TakenBatch
from streamrl.protocol.keys import TrajectoryKey, prompt_uid
from streamrl.protocol.trajectory import Prompt
from streamrl.testing.rows import make_trajectory
from tests.replay.replay_world import make_buffer

SESSIONS = 8


@pytest.mark.parametrize("num_keys", [64, 256, 1000])
def test_the_reply_of_take_is_below_1500_bytes_a_key(num_keys):
    groups = num_keys // SESSIONS
    buffer, _ = make_buffer(per_step=groups, n=SESSIONS)
    row = {"raw_prompt": [{"role": "user", "content": "a long question " * 200}], "reward_model": {"ground_truth": "42"}}
    buffer.admit([Prompt(prompt_uid(7, 0, i), row, 0, i) for i in range(groups)])
    for lease in buffer.lease("rollout-0", groups).leases:
        for session_id in range(SESSIONS):
            answer = make_trajectory(lease.uid, session_id, response_ids=tuple(range(2000)))
            tag = trajectory_tag(answer, lease.attempt, lease.seq_no, lease.global_steps)
            buffer.push(SessionPush(lease.uid, lease.attempt, session_id, [str(TrajectoryKey(lease.uid, session_id, 0))], [tag]))
    batch = buffer.take(groups)
    assert batch is not None and len(batch.meta) == num_keys and {"seq_len", "min_global_steps", "status"} <= batch.meta.tags[0].keys()
    reply = msgspec.msgpack.encode(batch)
    assert len(reply) < 1500 * num_keys
    assert msgspec.msgpack.decode(reply, type=TakenBatch) == batch
