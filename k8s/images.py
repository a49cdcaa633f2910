"""Whether the images that a Job names are in their ECR repositories."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from k8s.findings import Finding, fail, ok, warn
from k8s.outputs import StackOutputs

if TYPE_CHECKING:
    import boto3

_ECR_IMAGE = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.[a-z.]+/([^:@]+)(?::([^@]+))?(?:@(sha256:\w+))?")
_BUILD = "wait for the CodeBuild project (the deploy starts it), or run `make image`"


def check_images(outputs: StackOutputs, session: boto3.Session) -> Iterator[Finding]:
    """Look for trainer and control image."""
    for image in (outputs.trainer_image, outputs.control_image):
        match = _ECR_IMAGE.fullmatch(image)
        if match is None:
            yield warn("image", f"{image} is not in ECR, so it was not looked for", "check it by hand")
            continue
        account, region, repository, tag, digest = match.groups()
        client = session.client("ecr", region_name=region)
        wanted = {"imageDigest": digest} if digest else {"imageTag": tag or "latest"}
        yield _look(client, image, registryId=account, repositoryName=repository, imageIds=[wanted])


def _look(client: Any, image: str, **where: Any) -> Finding:
    from botocore.exceptions import ClientError

    try:
        found = client.describe_images(**where)["imageDetails"][0]
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code not in ("ImageNotFoundException", "RepositoryNotFoundException"):
            raise
        return fail("image", f"{image} is not there yet", _BUILD)
    size = found.get("imageSizeInBytes", 0) / 1e9
    return ok("image", f"{image}: {size:.1f} GB, {found['imageDigest'][:19]}")
