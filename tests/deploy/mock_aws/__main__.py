"""moto's server with the missing parts of AWS: `python -m tests.deploy.mock_aws PORT FAILURES`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moto import server
from moto.cloudformation import parsing, responses, utils

from tests.deploy.mock_aws import change_sets, custom_resources, ec2, eks, eks_api, fsx, operations
from tests.deploy.mock_aws.resource import Resource, ResourceError

_MODULES = (custom_resources, ec2, eks, fsx, operations)


def _types() -> dict[str, type[Resource]]:
    found = (value for module in _MODULES for value in vars(module).values())
    classes = [value for value in found if isinstance(value, type) and issubclass(value, Resource)]
    return {each.TYPE: each for each in classes if each.TYPE}


def _install_types() -> None:
    ours, theirs = _types(), parsing.get_model_map()

    def resource_class_from_type(resource_type: str) -> Any:
        found = ours.get(resource_type) or theirs.get(resource_type)
        if not found:
            raise ResourceError(f"{resource_type}: the rehearsal does not know this type")
        return found

    parsing.resource_class_from_type = resource_class_from_type


def _install_template_url() -> None:
    original = utils.get_stack_from_s3_url

    def get_stack_from_s3_url(template_url: str, account_id: str, partition: str) -> Any:
        # moto takes an address for a bucket's name; the CLI cannot resolve bucket.localhost
        url = template_url.replace("127.0.0.1", "localhost")
        return original(url, account_id=account_id, partition=partition)

    responses.get_stack_from_s3_url = get_stack_from_s3_url


def main(port: str, failures: str) -> None:
    """Serve on loopback until killed."""
    _install_types()
    _install_template_url()
    change_sets.install(Path(failures))
    for module in (ec2, eks_api, fsx):
        module.install()
    server.main(["-H", "127.0.0.1", "-p", port])


if __name__ == "__main__":
    main(*sys.argv[1:])
