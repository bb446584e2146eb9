"""Where actors go, from what nodes offer. No Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.places import NodeOffer, plan
from streamrl.errors import ClusterTooSmall
from tests.pipeline.tiny import tiny_config

HERE = NodeOffer("a" * 20, "10.0.0.1", 2)
FAR = [NodeOffer("b" * 20, "10.0.0.2", 4, {"gen": 8}), NodeOffer("c" * 20, "10.0.0.3", 4, {"gen": 8})]


def places(*overrides: str, offers=(HERE, *FAR)):
    return plan(tiny_config(*overrides), HERE.node, list(offers))


def test_without_resources_everything_is_on_the_drivers_node():
    here = places("rollout.num_actors=2")
    assert here.used() == {HERE.node} and here.stores == {HERE.node: "store"}
    assert here.weights_mark("rollout-0") == "" and here.ledger("store", Path("l")) == Path("l")


def test_rollout_actors_are_spread_and_each_of_their_nodes_has_a_store():
    far = places("cluster.rollout_resource=gen", "rollout.num_actors=3")
    assert [far.node_of(f"rollout-{i}")[0] for i in range(3)] == ["b", "c", "b"]
    assert far.stores == {FAR[0].node: "store", FAR[1].node: "store-1"}
    assert far.node_of("learner-0") == far.node_of("replay") == HERE.node and far.store_near("learner-0") is None
    assert far.store_near("rollout-1") == "store-1" and far.node_of("store-1") == FAR[1].node
    assert far.ledger("store-1", Path("l")) == Path("l/store-1") and far.weights_mark("rollout-1") == "-cccccccc"


def test_ranks_are_packed_and_gpus_are_counted_by_node():
    far = places("cluster.learner_resource=gen", "learner.ranks=6", "learner.num_gpus_per_rank=1", "data.train_batch_size=12", "actor.ppo_mini_batch_size=12")
    assert "".join(far.node_of(f"learner-{i}")[0] for i in range(6)) == "bbbbcc"
    assert far.stores == {HERE.node: "store"}
    shared = places("cluster.rollout_resource=gen", "cluster.learner_resource=gen", "learner.num_gpus_per_rank=3", "rollout.num_gpus_per_actor=2")
    assert (shared.node_of("learner-0")[0], shared.node_of("rollout-0")[0]) == ("b", "c")


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["cluster.rollout_resource=gne"], r"rollout-0 needs a unit of the resource 'gne'.*got 3 nodes: 10.0.0.1 with 0 units"),
        (["cluster.rollout_resource=gen", "rollout.num_actors=17"], r"rollout-16 needs.*10.0.0.2 with 0 units and 4 GPU free"),
        (["cluster.rollout_resource=gen", "rollout.num_gpus_per_actor=5"], r"5 GPU on one node.*10.0.0.3 with 8 units and 4 GPU"),
        (["rollout.num_actors=3", "rollout.num_gpus_per_actor=1"], r"needs 3 GPU on this node.*got 2"),
    ],
)
def test_what_finds_no_place_is_refused_with_what_exists(overrides, words):
    with pytest.raises(ClusterTooSmall, match=words):
        places(*overrides)
