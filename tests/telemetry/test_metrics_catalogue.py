"""What is declared is written, by the roles that it names: a real run of the pipeline is held against the catalogue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamrl.telemetry.catalogue import CATALOGUE, MetricSpec
from tests.telemetry.local_run import LocalRun, run  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[2]
QUIET = {  # what a run without tools, faults, other nodes and a driver has no count of
    "streamrl_run_info": "the driver's board",
    "streamrl_actor_restarts_total": "no actor was replaced",
    "streamrl_tool_calls_total": "no tools",
    "streamrl_tool_call_seconds": "no tools",
    "streamrl_tool_parse_errors_total": "no tools",
    "streamrl_rollout_dropped_observation_tokens_total": "no tools",
    "streamrl_rollout_context_resets_total": "no black-box agents",
    "streamrl_dataplane_bytes_total/store": "no other nodes ask the store",
    "streamrl_dataplane_transfer_seconds/store": "no other nodes ask the store",
    "streamrl_dataplane_rejected_writes_total": "nobody wrote late; see test_waste",
    "streamrl_staleness_violations_total": "a fault; see test_metrics_faults",
    "streamrl_learner_skipped_steps_total": "a fault",
    "streamrl_weight_sync_failures_total": "a fault; see test_metrics_faults",
    "streamrl_checkpoint_failures_total": "a fault; see tests/pipeline/test_upkeep.py",
    "streamrl_telemetry_errors_total": "a fault; see test_metrics",
}


def is_written(spec: MetricSpec, page: dict[str, float]) -> bool:
    """A gauge is there once it was set; all else exists at 0 before it is counted."""
    mine = {name: value for name, value in page.items() if name.partition("{")[0] in (spec.name, f"{spec.name}_count", f"{spec.name}_bucket")}
    return bool(mine) and (spec.kind == "gauge" or any(mine.values()))


@pytest.mark.parametrize("spec", CATALOGUE.values(), ids=lambda spec: spec.name)
def test_each_declared_metric_is_written_by_each_role_that_it_names(spec, run):  # noqa: F811
    for role in spec.roles:
        pages = [page for name, page in run.pages.items() if name.partition("-")[0] == role]
        if not QUIET.keys() & {spec.name, f"{spec.name}/{role}"}:
            assert any(is_written(spec, page) for page in pages), f"{role} never wrote {spec.name}"


def test_each_declared_name_stands_where_something_writes_it():
    sources = [path for top in ("streamrl", "actors") for path in (ROOT / top).rglob("*.py") if path.name != "catalogue.py"]
    text = "\n".join(path.read_text() for path in sources if not {"panels", "report"} & set(path.parts))
    written = {*re.findall(r"streamrl_\w+", text), *(f"streamrl_ledger_{unit}_total" for unit in ("groups", "trajectories", "tokens"))}
    missing = {spec.name for spec in CATALOGUE.values()} - written - {"streamrl_actor_time_seconds_total"}  # states write that one
    assert not missing


def test_no_page_has_a_series_that_is_not_declared(run: LocalRun):  # noqa: F811
    for page in run.pages.values():
        names = {re.sub(r"_(bucket|count|sum)$", "", name.partition("{")[0]) for name in page}
        assert names <= set(CATALOGUE)


def test_the_pages_of_a_whole_run_stay_within_the_series_budget(run: LocalRun):  # noqa: F811
    assert sum(len(page) for page in run.pages.values()) < 1_000
    assert all(len(page) < 220 for page in run.pages.values())


def test_evaluations_are_in_no_metric_of_training(run: LocalRun):  # noqa: F811
    """Two validations of 16 rows each: they have counts of their own, and the training counts are those of the ledger and of what was refused."""
    rollouts = [page for name, page in run.pages.items() if name.startswith("rollout")]

    def total(name: str) -> float:
        return sum(value for page in rollouts for sample, value in page.items() if sample.startswith(name))

    assert total("streamrl_eval_trajectories_total") == 32
    assert total("streamrl_eval_tokens_total") == run.totals.token_fates()["evaluation"] > 0
    stats = run.totals.stats
    rows = total('streamrl_rollout_trajectories_total{env="streamrl/tiny_add",outcome="completed"}') + total(
        'streamrl_rollout_trajectories_total{env="streamrl/tiny_add",outcome="truncated"}'
    )
    sessions = total("streamrl_rollout_session_seconds_count")
    assert rows == total("streamrl_reward_count") == stats.trajectories_generated
    assert rows <= sessions  # a session that came too late was run, too
    completion = sum(page['streamrl_rollout_tokens_total{kind="completion"}'] for page in rollouts)
    assert completion == stats.tokens_generated


def test_a_run_reports_what_its_batches_were(run: LocalRun):  # noqa: F811
    learner, trainer = run.pages["learner-0"], run.pages["trainer"]
    assert -1 < learner['streamrl_batch_reward_mean{env="streamrl/tiny_add"}'] < 1 and learner['streamrl_batch_reward_std{env="streamrl/tiny_add"}'] > 0
    assert 0 <= learner['streamrl_group_singleton_ratio{env="streamrl/tiny_add"}'] <= 1
    trained = learner["streamrl_token_version_lag_count"]
    assert trained == trainer["streamrl_learner_tokens_total"], "one epoch: each trained token once, and no other"
    assert learner['streamrl_token_version_lag_bucket{le="1.0"}'] == trained, "the bound is 1"
    assert trainer['streamrl_staleness_versions_bucket{le="1.0",stage="train"}'] == trainer["streamrl_learner_groups_total"]
    for phase in ("fetch", "pack", "logprobs", "advantages", "forward_backward", "optimizer"):
        assert learner[f'streamrl_learner_phase_seconds_count{{phase="{phase}"}}'] == len(run.steps), "one observation a step"
