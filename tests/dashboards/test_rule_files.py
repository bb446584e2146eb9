"""Prometheus takes the committed files, every alert has a case that fires and one that does not, and a page that says what to do."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import yaml

from tests.dashboards.checker import ROOT
from tests.dashboards.live import RULES, alerts, recording_rules
from tests.dashboards.prometheus import needs_prometheus, promtool

FOLDER = ROOT / "dashboards" / "prometheus"
TESTS = sorted((FOLDER / "tests").glob("*.yml"))
WANTED = {
    "StalenessAboveBound": ("critical", 0),
    "LearnerStarved": ("warning", 5),
    "RolloutStarved": ("warning", 5),
    "WeightSyncStalled": ("critical", 0),
    "RewardCollapse": ("warning", 10),
    "BufferNearCapacity": ("warning", 2),
    "ActorDown": ("warning", 1),
    "CheckpointOld": ("warning", 0),
    "NothingTrained": ("critical", 0),
    "LedgerImbalance": ("critical", 5),
}


def alert_rules() -> list[dict]:
    (group,) = yaml.safe_load((RULES / "streamrl.alerts.yml").read_text())["groups"]
    return group["rules"]


@needs_prometheus
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", str(FOLDER / "prometheus.yml")),
        ("check", "rules", *map(str, sorted(RULES.glob("*.yml")))),
        ("test", "rules", *map(str, TESTS)),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_passes(arguments):
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alerts_have_the_severities_and_patience_of_the_specification():
    found = {rule["alert"]: (rule["labels"]["severity"], int(rule.get("for", "0m").removesuffix("m"))) for rule in alert_rules()}
    assert found == WANTED


def test_every_alert_is_of_one_run_and_has_a_case_that_fires_and_one_that_does_not():
    firing, silent = defaultdict(list), defaultdict(list)
    for path in TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            runs = set(re.findall(r'run="(\w+)"', str(case["input_series"])))
            for check in case.get("alert_rule_test", []):
                fired = {alert["exp_labels"]["run"] for alert in check.get("exp_alerts", [])}
                firing[check["alertname"]] += fired
                silent[check["alertname"]] += runs - fired if fired else []
    assert set(firing) == set(alerts())
    assert all(firing[name] and silent[name] for name in alerts())


def test_every_recording_rule_is_tested():
    text = "".join(path.read_text() for path in TESTS)
    assert [name for name in recording_rules() if name not in text] == []


def test_every_alert_says_what_it_means_how_much_it_is_and_where_to_read_on():
    headings = {line.removeprefix("## ").strip().lower() for line in (ROOT / "docs" / "alerts.md").read_text().splitlines() if line.startswith("## ")}
    for rule in alert_rules():
        notes = rule["annotations"]
        assert "$labels.run" in notes["summary"] and "$value" in notes["description"]
        page, _, anchor = notes["runbook"].partition("#")
        assert page == "docs/alerts.md" and anchor == rule["alert"].lower() and anchor in headings
