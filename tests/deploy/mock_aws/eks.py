"""EKS: cluster, node group, add-on, access entry."""

from __future__ import annotations

from typing import Any

from tests.deploy.mock_aws.resource import Properties, Resource, ResourceError, camel, tag_table

# have Deployments: without a node their add-on never becomes ACTIVE, and CloudFormation gives up
_ADDONS_THAT_NEED_NODES = {"coredns", "aws-fsx-csi-driver"}
_ADDONS_THAT_NODES_NEED = {"vpc-cni", "kube-proxy", "eks-pod-identity-agent"}


class Cluster(Resource):
    """Makes the cluster security group too, as EKS does."""

    TYPE = "AWS::EKS::Cluster"

    def create(self) -> None:
        logging = self.properties["Logging"]["ClusterLogging"]["EnabledTypes"]
        parameters = {
            **camel(self.properties),
            "logging": {"clusterLogging": [{"types": [entry["Type"] for entry in logging], "enabled": True}]},
            "tags": tag_table(self.properties["Tags"]),
        }
        cluster = self.client("eks").create_cluster(**parameters)["cluster"]
        self.physical_id = cluster["name"]
        self.attributes = {
            "Arn": cluster["arn"],
            "Endpoint": cluster["endpoint"],
            "CertificateAuthorityData": cluster["certificateAuthority"]["data"],
            "OpenIdConnectIssuerUrl": cluster["identity"]["oidc"]["issuer"],
            "ClusterSecurityGroupId": self._make_security_group(),
        }

    def delete(self) -> None:
        self.client("eks").delete_cluster(name=self.physical_id)
        self.client("ec2").delete_security_group(GroupId=self.attributes["ClusterSecurityGroupId"])

    def _make_security_group(self) -> str:
        ec2 = self.client("ec2")
        subnet_ids = self.properties["ResourcesVpcConfig"]["SubnetIds"]
        vpc_id = ec2.describe_subnets(SubnetIds=subnet_ids)["Subnets"][0]["VpcId"]
        group = ec2.create_security_group(
            GroupName=f"eks-cluster-sg-{self.physical_id}-1", Description="made by EKS", VpcId=vpc_id
        )
        return str(group["GroupId"])


class Nodegroup(Resource):
    TYPE = "AWS::EKS::Nodegroup"

    def create(self) -> None:
        cluster = self.properties["ClusterName"]
        missing = _ADDONS_THAT_NODES_NEED - set(self.client("eks").list_addons(clusterName=cluster)["addons"])
        if missing:
            raise ResourceError(f"NodeCreationFailure: nodes never get Ready without {sorted(missing)}")
        self.physical_id = f"{cluster}/{self.generated_name}"
        # a flag of CloudFormation alone
        properties = {key: value for key, value in self.properties.items() if key != "ForceUpdateEnabled"}
        self.client("eks").create_nodegroup(
            nodegroupName=self.generated_name,
            **camel({**properties, "Labels": {}, "Tags": {}}),
        )
        self.client("eks").update_nodegroup_config(
            clusterName=cluster,
            nodegroupName=self.generated_name,
            labels={"addOrUpdateLabels": properties["Labels"]},
        )

    def delete(self) -> None:
        self.client("eks").delete_nodegroup(
            clusterName=self.properties["ClusterName"], nodegroupName=self.generated_name
        )


class Addon(Resource):
    TYPE = "AWS::EKS::Addon"

    def create(self) -> None:
        cluster, name = self.properties["ClusterName"], self.properties["AddonName"]
        eks = self.client("eks")
        if name in _ADDONS_THAT_NEED_NODES and not eks.list_nodegroups(clusterName=cluster)["nodegroups"]:
            raise ResourceError(f"{name}: DEGRADED, InsufficientNumberOfReplicas: the cluster has no node")
        eks.create_addon(**_api_parameters(self.properties))
        self.physical_id = f"{cluster}|{name}"

    def delete(self) -> None:
        self.client("eks").delete_addon(
            clusterName=self.properties["ClusterName"], addonName=self.properties["AddonName"]
        )


class AccessEntry(Resource):
    TYPE = "AWS::EKS::AccessEntry"

    def create(self) -> None:
        properties = {key: value for key, value in self.properties.items() if key != "AccessPolicies"}
        self.client("eks").create_access_entry(**_api_parameters(properties))
        self.physical_id = f"{self.properties['PrincipalArn']}|{self.properties['ClusterName']}"
        self.attributes = {"AccessEntryArn": self.physical_id}
        for policy in self.properties["AccessPolicies"]:
            self.client("eks").associate_access_policy(**self._key, **camel(policy))

    def delete(self) -> None:
        self.client("eks").delete_access_entry(**self._key)

    @property
    def _key(self) -> dict[str, str]:
        return {
            "clusterName": self.properties["ClusterName"],
            "principalArn": self.properties["PrincipalArn"],
        }


def _api_parameters(properties: Properties) -> dict[str, Any]:
    return {**camel(properties), "tags": tag_table(properties["Tags"])}
