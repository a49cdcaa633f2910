"""Types of single settings: text that AWS gives a fixed form."""

from __future__ import annotations

from typing import Annotated

from training.schema import Pattern

Name = Annotated[
    str,
    Pattern(regex=r"[a-z][a-z0-9-]{0,28}[a-z0-9]", description="2 to 30 of a-z, 0-9 and '-', a letter first"),
]
Region = Annotated[str, Pattern(regex=r"[a-z]{2}(-[a-z]+)+-\d", description="a region such as us-west-2")]
ZoneName = Annotated[
    str,
    Pattern(
        regex=r"[a-z]{2}(-[a-z]+)+-\d[a-z]",
        description="the name of an availability zone such as us-west-2b (not an id such as usw2-az2)",
    ),
]
ZoneId = Annotated[
    str, Pattern(regex=r"|[a-z]+\d-az\d", description="the id of an availability zone, usw2-az2, or empty")
]
Account = Annotated[str, Pattern(regex=r"|\d{12}", description="12 digits, or empty")]
Principal = Annotated[
    str,
    Pattern(
        regex=r"arn:aws[a-z-]*:iam::\d{12}:(role|user)/[\w+=,.@/-]+|(role|user)/[\w+=,.@/-]+",
        description="an IAM ARN, or role/NAME or user/NAME in the cluster's account",
    ),
]
Email = Annotated[str, Pattern(regex=r"|[^@\s]+@[^@\s]+\.[^@\s]+", description="an e-mail address, or empty")]
VpcId = Annotated[
    str, Pattern(regex=r"vpc-[0-9a-f]{8,17}", description="a VPC id such as vpc-0123456789abcdef0")
]
SubnetId = Annotated[str, Pattern(regex=r"subnet-[0-9a-f]{8,17}", description="a subnet id")]
ImageId = Annotated[str, Pattern(regex=r"|ami-[0-9a-f]{8,17}", description="an AMI id, or empty")]
ReservationId = Annotated[
    str, Pattern(regex=r"|cr-[0-9a-f]{8,17}", description="a capacity reservation id, cr-..., or empty")
]
Timestamp = Annotated[
    str,
    Pattern(regex=r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", description="UTC, 2026-12-01T11:30:00Z, or empty"),
]
BucketName = Annotated[
    str, Pattern(regex=r"|[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", description="a bucket name, or empty")
]
