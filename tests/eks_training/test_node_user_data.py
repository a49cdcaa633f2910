from __future__ import annotations

import email
from pathlib import Path

import yaml

from eks_training.node_user_data import NodeUserData

GOLDEN = Path(__file__).parent / "golden" / "gpu_node_user_data.txt"
USER_DATA = NodeUserData(
    cluster_name="holdfast",
    api_server_endpoint="https://EXAMPLE.gr7.us-west-2.eks.amazonaws.com",
    certificate_authority="Q0VSVA==",
    service_cidr="172.20.0.0/16",
)


def test_user_data_is_the_golden_file() -> None:
    assert USER_DATA.render() == GOLDEN.read_text()


def test_node_config_is_what_nodeadm_reads() -> None:
    # WHEN
    message = email.message_from_string(USER_DATA.render())
    parts = {part.get_content_type(): str(part.get_payload()) for part in message.walk()}

    # THEN
    spec = yaml.safe_load(parts["application/node.eks.aws"])["spec"]
    assert spec["cluster"]["cidr"] == "172.20.0.0/16"
    assert spec["instance"] == {"localStorage": {"strategy": "RAID0"}}
    assert spec["kubelet"]["maxPodsExpression"] == "((default_enis - 1) * (ips_per_eni - 1)) + 2"
    assert parts["text/x-shellscript"].startswith("#!/bin/bash\n")


def test_labels_land_device_plugins_and_keep_extra_ones() -> None:
    # GIVEN
    user_data = NodeUserData(
        cluster_name="c",
        api_server_endpoint="e",
        certificate_authority="a",
        service_cidr="s",
        labels={"team": "nlp"},
    )

    # WHEN
    text = user_data.render()

    # THEN
    assert "--node-labels=nvidia.com/gpu.present=true,holdfast.dev/pool=training,team=nlp" in text
    assert "--register-with-taints=nvidia.com/gpu=true:NoSchedule" in text


def test_a_long_value_stays_on_one_line() -> None:
    # GIVEN a CDK token or a certificate is longer than any line YAML would write
    certificate = "QUJD" * 400

    # WHEN
    text = NodeUserData(
        cluster_name="c", api_server_endpoint="e", certificate_authority=certificate, service_cidr="s"
    ).render()

    # THEN
    assert f"certificateAuthority: {certificate}\n" in text
