"""What tells a person that nodes, capacity, disk or money need them."""

from __future__ import annotations

from aws_cdk import Duration, RemovalPolicy, Stack
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from constructs import Construct

_PUBLISHERS = ("cloudwatch.amazonaws.com", "budgets.amazonaws.com", "autoscaling.amazonaws.com")
_ONE_MINUTE = Duration.minutes(1)
# a tenth of a SCRATCH_2 file system is about one checkpoint of an 8B model at 1200 GiB
_FULL_SHARE = 0.1


class AlarmTopic(Construct):
    """The topic of all alarms, encrypted with a key that its publishers may use."""

    def __init__(self, scope: Construct, construct_id: str, *, email: str) -> None:
        super().__init__(scope, construct_id)
        key = kms.Key(
            self,
            "Key",
            description="Alarm topic",
            enable_key_rotation=True,
            removal_policy=RemovalPolicy.DESTROY,
        )
        self.topic = sns.Topic(self, "Topic", master_key=key, enforce_ssl=True)
        for service in _PUBLISHERS:
            principal = iam.ServicePrincipal(service)
            key.grant_encrypt_decrypt(principal)
            self.topic.grant_publish(principal)
        if email:
            sns.CfnSubscription(
                self, "Email", topic_arn=self.topic.topic_arn, protocol="email", endpoint=email
            )


class TrainingAlarms(Construct):
    """Node health, missing nodes, a file system that fills up."""

    def __init__(self, scope: Construct, construct_id: str, *, topic: sns.ITopic) -> None:
        super().__init__(scope, construct_id)
        self._topic = topic

    def watch_nodes(self, *, group_name: str) -> None:
        """Alarm when status checks fail, or fewer nodes are in service than the group should have."""
        dimensions = {"AutoScalingGroupName": group_name}
        self._alarm(
            "NodeHealth",
            cloudwatch.Metric(
                namespace="AWS/EC2",
                metric_name="StatusCheckFailed",
                dimensions_map=dimensions,
                statistic="Maximum",
                period=_ONE_MINUTE,
            ),
            threshold=1,
            operator=cloudwatch.ComparisonOperator.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            minutes=3,
            description="A GPU node fails EC2's status checks. Nothing replaces it by itself.",
        )
        # relative to what is wanted now: a parked group, or a block that has not begun, lacks nothing
        missing = cloudwatch.MathExpression(
            expression="desired - running",
            using_metrics={
                "desired": _group_metric("GroupDesiredCapacity", group_name),
                "running": _group_metric("GroupInServiceInstances", group_name),
            },
            period=_ONE_MINUTE,
            label="missing nodes",
        )
        self._alarm(
            "NodeCapacity",
            missing,
            threshold=1,
            operator=cloudwatch.ComparisonOperator.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            minutes=15,
            description="GPU nodes or spares are missing: EC2 has no capacity, or the quota is used up.",
        )

    def watch_file_system(self, *, file_system_id: str, capacity_gib: int) -> None:
        """Alarm when less than a tenth of the file system is free."""
        free = cloudwatch.Metric(
            namespace="AWS/FSx",
            metric_name="FreeDataStorageCapacity",
            dimensions_map={"FileSystemId": file_system_id},
            # one value per storage target: the sum is the file system
            statistic="Sum",
            period=_ONE_MINUTE,
        )
        self._alarm(
            "FileSystemFull",
            free,
            threshold=capacity_gib * 2**30 * _FULL_SHARE,
            operator=cloudwatch.ComparisonOperator.LESS_THAN_THRESHOLD,
            minutes=5,
            description="Less than a tenth of the Lustre file system is free: checkpoints will fail.",
        )

    def _alarm(
        self,
        construct_id: str,
        metric: cloudwatch.IMetric,
        *,
        threshold: float,
        operator: cloudwatch.ComparisonOperator,
        minutes: int,
        description: str,
    ) -> None:
        alarm = cloudwatch.Alarm(
            self,
            construct_id,
            metric=metric,
            threshold=threshold,
            comparison_operator=operator,
            evaluation_periods=minutes,
            alarm_description=description,
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
        )
        action = actions.SnsAction(self._topic)
        alarm.add_alarm_action(action)
        alarm.add_ok_action(action)


def _group_metric(name: str, group_name: str) -> cloudwatch.Metric:
    return cloudwatch.Metric(
        namespace="AWS/AutoScaling",
        metric_name=name,
        dimensions_map={"AutoScalingGroupName": group_name},
        statistic="Minimum",
        period=_ONE_MINUTE,
    )


def monthly_budget(
    scope: Construct, construct_id: str, *, name: str, usd: int, tag: tuple[str, str], topic: sns.ITopic
) -> budgets.CfnBudget:
    """Budget for all resources with `tag`: tell `topic` at 80% spent and at 100% forecast."""
    budget = budgets.CfnBudget
    subscriber = budget.SubscriberProperty(address=topic.topic_arn, subscription_type="SNS")

    def notify(kind: str, percent: int) -> budgets.CfnBudget.NotificationWithSubscribersProperty:
        notification = budget.NotificationProperty(
            comparison_operator="GREATER_THAN",
            notification_type=kind,
            threshold=percent,
            threshold_type="PERCENTAGE",
        )
        return budget.NotificationWithSubscribersProperty(notification=notification, subscribers=[subscriber])

    key, value = tag
    return budget(
        scope,
        construct_id,
        budget=budget.BudgetDataProperty(
            # names are unique in an account, clusters only in a region
            budget_name=f"{name}-{Stack.of(scope).region}",
            budget_type="COST",
            time_unit="MONTHLY",
            budget_limit=budget.SpendProperty(amount=usd, unit="USD"),
            cost_filters={"TagKeyValue": [f"user:{key}${value}"]},
        ),
        notifications_with_subscribers=[notify("ACTUAL", 80), notify("FORECASTED", 100)],
    )
