"""Everything that exists in an account, as far as our stacks could have made it."""

from __future__ import annotations

import jmespath  # type: ignore[import-untyped]

from tests.deploy.account import ACCOUNT, Account

# without network interfaces: moto keeps those of ended instances, and our stacks declare none
_LISTS = (
    ("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups[].AutoScalingGroupName"),
    ("cloudwatch", "describe_alarms", "MetricAlarms[].AlarmName"),
    ("codebuild", "list_projects", "projects"),
    ("ec2", "describe_addresses", "Addresses[].AllocationId"),
    ("ec2", "describe_flow_logs", "FlowLogs[].FlowLogId"),
    ("ec2", "describe_instances", "Reservations[].Instances[?State.Name!='terminated'][].InstanceId"),
    ("ec2", "describe_internet_gateways", "InternetGateways[].InternetGatewayId"),
    ("ec2", "describe_launch_templates", "LaunchTemplates[].LaunchTemplateId"),
    ("ec2", "describe_nat_gateways", "NatGateways[?State!='deleted'].NatGatewayId"),
    ("ec2", "describe_placement_groups", "PlacementGroups[].GroupName"),
    ("ec2", "describe_route_tables", "RouteTables[].RouteTableId"),
    ("ec2", "describe_security_groups", "SecurityGroups[].GroupId"),
    ("ec2", "describe_subnets", "Subnets[].SubnetId"),
    ("ec2", "describe_volumes", "Volumes[].VolumeId"),
    ("ec2", "describe_vpc_endpoints", "VpcEndpoints[?State!='deleted'].VpcEndpointId"),
    ("ec2", "describe_vpcs", "Vpcs[].VpcId"),
    ("ecr", "describe_repositories", "repositories[].repositoryName"),
    ("eks", "list_clusters", "clusters"),
    ("fsx", "describe_data_repository_associations", "Associations[].AssociationId"),
    ("fsx", "describe_file_systems", "FileSystems[].FileSystemId"),
    ("iam", "list_instance_profiles", "InstanceProfiles[].InstanceProfileName"),
    ("iam", "list_roles", "Roles[].RoleName"),
    ("lambda", "list_functions", "Functions[].FunctionName"),
    ("lambda", "list_layers", "Layers[].LayerName"),
    ("logs", "describe_log_groups", "logGroups[].logGroupName"),
    ("s3", "list_buckets", "Buckets[].Name"),
    ("sns", "list_topics", "Topics[].TopicArn"),
    ("ssm", "describe_parameters", "Parameters[].Name"),
)


def inventory(account: Account) -> set[str]:
    """Return `service operation name` of each resource. Keys that wait for their deletion do not count."""
    found = set()
    for service, operation, names in _LISTS:
        answer = getattr(account.client(service), operation)()
        found |= {f"{service} {operation} {name}" for name in jmespath.search(names, answer) or ()}
    budgets = account.client("budgets").describe_budgets(AccountId=ACCOUNT)["Budgets"]
    found |= {f"budgets describe_budgets {budget['BudgetName']}" for budget in budgets}
    return found | {f"kms key {key}" for key in keys(account, state="Enabled")}


def keys(account: Account, *, state: str) -> set[str]:
    """Return the ids of the account's own KMS keys in this state."""
    kms = account.client("kms")
    described = [kms.describe_key(KeyId=key["KeyId"])["KeyMetadata"] for key in kms.list_keys()["Keys"]]
    of_aws = {
        alias["TargetKeyId"]
        for alias in kms.list_aliases()["Aliases"]
        if alias["AliasName"].startswith("alias/aws/") and "TargetKeyId" in alias
    }
    return {key["KeyId"] for key in described if key["KeyState"] == state} - of_aws
