"""Container images, built in the account: nobody pushes 20 GB from a laptop."""

from __future__ import annotations

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_codebuild as codebuild
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3_assets as assets
from aws_cdk import custom_resources as cr
from constructs import Construct

TARGETS = ("trainer", "control")
"""Targets of training/Dockerfile, one image each."""

_KEPT_IMAGES = 20

# push, pull the cache, and see what is there
_PUSH = (
    "ecr:BatchCheckLayerAvailability",
    "ecr:BatchGetImage",
    "ecr:CompleteLayerUpload",
    "ecr:DescribeImages",
    "ecr:GetDownloadUrlForLayer",
    "ecr:InitiateLayerUpload",
    "ecr:PutImage",
    "ecr:UploadLayerPart",
)

# Tags are immutable and name the sources, so what is there is right. All targets are tried: a trainer
# that does not build must not keep the control image back.
_BUILD = """\
set -u
failed=0
for target in $TARGETS; do
  image="$REGISTRY/$PREFIX/$target:$TAG"
  if aws ecr describe-images --repository-name "$PREFIX/$target" --image-ids imageTag="$TAG" >/dev/null 2>&1
  then
    echo "$image is there"
  else
    docker build --file training/Dockerfile --target "$target" --tag "$image" . &&
      docker push "$image" || failed=1
  fi
done
exit $failed
"""


class ImageRepositories(Construct):
    """One repository a target, with immutable tags, scanned on push."""

    def __init__(self, scope: Construct, construct_id: str, *, prefix: str, encryption_key: kms.IKey) -> None:
        super().__init__(scope, construct_id)
        self.prefix = prefix
        self.by_target = {target: self._repository(target, encryption_key) for target in TARGETS}

    def uri(self, target: str, tag: str) -> str:
        """Return the full name of an image."""
        return f"{self.by_target[target].repository_uri}:{tag}"

    def _repository(self, target: str, key: kms.IKey) -> ecr.Repository:
        return ecr.Repository(
            self,
            target,
            # generated names may hold upper case, which ECR refuses
            repository_name=f"{self.prefix}/{target}",
            image_scan_on_push=True,
            image_tag_mutability=ecr.TagMutability.IMMUTABLE,
            encryption=ecr.RepositoryEncryption.KMS,
            encryption_key=key,
            lifecycle_rules=[ecr.LifecycleRule(max_image_count=_KEPT_IMAGES)],
            removal_policy=RemovalPolicy.DESTROY,
            empty_on_delete=True,
        )


class ImageBuild(Construct):
    """A CodeBuild project for all targets. The deploy starts it and goes on: a build takes 20 minutes."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        repositories: ImageRepositories,
        source: assets.Asset,
        tag: str,
        encryption_key: kms.IKey,
        log_group: logs.ILogGroup,
    ) -> None:
        super().__init__(scope, construct_id)
        role = self._role(repositories, source, encryption_key, log_group)
        self.project = codebuild.Project(
            self,
            "Project",
            description="Builds the trainer and the control image",
            source=codebuild.Source.s3(bucket=source.bucket, path=source.s3_object_key),
            environment=_environment(),
            environment_variables=_variables(repositories, tag),
            build_spec=codebuild.BuildSpec.from_object(_build_spec()),
            # CDK would add s3:GetObject*, kms:ReEncrypt*, report groups and a log group that is not used
            role=role.without_policy_updates(),
            encryption_key=encryption_key,
            timeout=Duration.hours(2),
            logging=codebuild.LoggingOptions(
                cloud_watch=codebuild.CloudWatchLoggingOptions(log_group=log_group)
            ),
        )
        self._start(tag)

    def _role(
        self,
        repositories: ImageRepositories,
        source: assets.Asset,
        encryption_key: kms.IKey,
        log_group: logs.ILogGroup,
    ) -> iam.Role:
        role = iam.Role(self, "Role", assumed_by=iam.ServicePrincipal("codebuild.amazonaws.com"))
        archive = source.bucket.arn_for_objects(source.s3_object_key)
        statements = (
            (["s3:GetObject", "s3:GetObjectVersion"], [archive]),
            (["logs:CreateLogStream", "logs:PutLogEvents"], [log_group.log_group_arn]),
            (["kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey"], [encryption_key.key_arn]),
            (_PUSH, [repository.repository_arn for repository in repositories.by_target.values()]),
            # has no resource
            (["ecr:GetAuthorizationToken"], ["*"]),
        )
        for actions, resources in statements:
            role.add_to_policy(iam.PolicyStatement(actions=list(actions), resources=resources))
        return role

    def _start(self, tag: str) -> None:
        call = cr.AwsSdkCall(
            service="CodeBuild",
            action="startBuild",
            # the tag is a parameter so that new sources are a change that CloudFormation sees
            parameters={"projectName": self.project.project_name, "idempotencyToken": tag},
            physical_resource_id=cr.PhysicalResourceId.of("build"),
            # the answer holds the whole project, more than a custom resource may return
            output_paths=["build.id"],
        )
        started = cr.AwsCustomResource(
            self,
            "Start",
            resource_type="Custom::StartImageBuild",
            on_update=call,
            install_latest_aws_sdk=False,
            policy=cr.AwsCustomResourcePolicy.from_sdk_calls(resources=[self.project.project_arn]),
        )
        started.node.add_dependency(self.project)


def _environment() -> codebuild.BuildEnvironment:
    return codebuild.BuildEnvironment(
        build_image=codebuild.LinuxBuildImage.STANDARD_7_0,
        compute_type=codebuild.ComputeType.LARGE,
        privileged=True,
    )


def _variables(repositories: ImageRepositories, tag: str) -> dict[str, codebuild.BuildEnvironmentVariable]:
    registry = repositories.by_target[TARGETS[0]].registry_uri
    values = {"TARGETS": " ".join(TARGETS), "PREFIX": repositories.prefix, "REGISTRY": registry, "TAG": tag}
    return {name: codebuild.BuildEnvironmentVariable(value=value) for name, value in values.items()}


def _build_spec() -> dict[str, object]:
    login = "aws ecr get-login-password | docker login --username AWS --password-stdin $REGISTRY"
    return {
        "version": "0.2",
        "phases": {"pre_build": {"commands": [login]}, "build": {"commands": [_BUILD]}},
    }
