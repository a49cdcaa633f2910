from __future__ import annotations

from typing import Any

import aws_cdk as cdk
import pytest

from eks_training.training_alarms import AlarmTopic, TrainingAlarms, monthly_budget
from tests.eks_training.template import Synthesised


@pytest.fixture
def template(stack: cdk.Stack) -> Synthesised:
    topic = AlarmTopic(stack, "Topic", email="oncall@example.com").topic
    alarms = TrainingAlarms(stack, "Alarms", topic=topic)
    alarms.watch_nodes(group_name="gpu-nodes")
    alarms.watch_file_system(file_system_id="fs-1", capacity_gib=1200)
    monthly_budget(
        stack, "Budget", name="holdfast", usd=5000, tag=("holdfast:cluster", "holdfast"), topic=topic
    )
    return Synthesised.of(stack)


def alarm(template: Synthesised, metric: str) -> dict[str, Any]:
    [found] = [a for a in template.all("AWS::CloudWatch::Alarm") if a.get("MetricName") == metric]
    return found


def test_failed_status_check_alarms(template: Synthesised) -> None:
    # WHEN
    found = alarm(template, "StatusCheckFailed")

    # THEN
    assert found["Dimensions"] == [{"Name": "AutoScalingGroupName", "Value": "gpu-nodes"}]
    assert (found["ComparisonOperator"], found["Threshold"]) == ("GreaterThanOrEqualToThreshold", 1)


def test_missing_nodes_alarm_against_what_is_wanted_now(template: Synthesised) -> None:
    # WHEN
    [found] = [a for a in template.all("AWS::CloudWatch::Alarm") if "Metrics" in a]

    # THEN
    metrics = {m["Id"]: m for m in found["Metrics"]}
    [expression] = [m["Expression"] for m in found["Metrics"] if "Expression" in m]
    assert expression == "desired - running"
    assert metrics["desired"]["MetricStat"]["Metric"]["MetricName"] == "GroupDesiredCapacity"
    assert metrics["running"]["MetricStat"]["Metric"]["MetricName"] == "GroupInServiceInstances"
    assert (found["Threshold"], found["EvaluationPeriods"]) == (1, 15)


def test_full_file_system_alarms_at_a_tenth_free(template: Synthesised) -> None:
    # WHEN
    found = alarm(template, "FreeDataStorageCapacity")

    # THEN
    assert found["Statistic"] == "Sum"
    assert found["Threshold"] == 120 * 2**30


def test_every_alarm_tells_the_topic_when_it_begins_and_ends(template: Synthesised) -> None:
    # GIVEN
    topic, _ = template.only("AWS::SNS::Topic")

    # THEN
    for found in template.all("AWS::CloudWatch::Alarm"):
        assert found["AlarmActions"] == found["OKActions"] == [{"Ref": topic}]


@pytest.mark.parametrize("service", ["cloudwatch", "budgets", "autoscaling"])
def test_publishers_may_use_topic_and_key(template: Synthesised, service: str) -> None:
    # GIVEN an encrypted topic drops messages of a service that cannot use its key, in silence
    principal = f"{service}.amazonaws.com"

    # THEN
    assert principal in str(template.one("AWS::SNS::TopicPolicy"))
    assert principal in str(template.one("AWS::KMS::Key")["KeyPolicy"])


def test_topic_is_encrypted_and_subscribed(template: Synthesised) -> None:
    assert "KmsMasterKeyId" in template.one("AWS::SNS::Topic")
    assert template.one("AWS::SNS::Subscription")["Endpoint"] == "oncall@example.com"


def test_budget_counts_this_cluster_and_warns_twice(template: Synthesised) -> None:
    # WHEN
    budget = template.one("AWS::Budgets::Budget")

    # THEN
    assert budget["Budget"]["BudgetLimit"] == {"Amount": 5000, "Unit": "USD"}
    assert budget["Budget"]["CostFilters"] == {"TagKeyValue": ["user:holdfast:cluster$holdfast"]}
    warnings = [n["Notification"] for n in budget["NotificationsWithSubscribers"]]
    assert {(w["NotificationType"], w["Threshold"]) for w in warnings} == {
        ("ACTUAL", 80),
        ("FORECASTED", 100),
    }
