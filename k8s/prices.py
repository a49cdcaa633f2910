"""List prices in US dollars. They age: every figure that is shown carries this date and region."""

from __future__ import annotations

AS_OF = "2026-07-20"
REGION = "us-east-1"
HOURS_PER_MONTH = 730

# EC2 on-demand, Linux, an hour; p5e is not listed
ON_DEMAND_HOUR = {
    "p4d.24xlarge": 21.957642,
    "p4de.24xlarge": 27.44705,
    "p5.4xlarge": 6.88,
    "p5.48xlarge": 55.04,
    "p5en.48xlarge": 63.296,
    "p6-b200.48xlarge": 113.9328,
    "p6-b300.48xlarge": 142.416,
    "g4dn.8xlarge": 2.176,
    "g5.8xlarge": 2.448,
    "g5.12xlarge": 5.672,
    "g5.48xlarge": 16.288,
    "g6.8xlarge": 2.0144,
    "g6.12xlarge": 4.6016,
    "g6.24xlarge": 6.6752,
    "g6.48xlarge": 13.3504,
    "g6e.8xlarge": 4.52856,
    "g6e.12xlarge": 10.49264,
    "g6e.24xlarge": 15.06559,
    "g6e.48xlarge": 30.13118,
    "g7e.8xlarge": 5.26824,
    "g7e.12xlarge": 8.28608,
    "m7i.xlarge": 0.2016,
    "m7i.2xlarge": 0.4032,
}
# EC2 capacity blocks, an hour, paid upfront for the whole block
BLOCK_HOUR = {"p4d.24xlarge": 14.75, "p5.48xlarge": 39.33, "p5e.48xlarge": 39.80, "p5en.48xlarge": 41.61}

EKS_HOUR = {"standard": 0.10, "extended": 0.60}
NAT_HOUR = 0.045
PUBLIC_ADDRESS_HOUR = 0.005
INTERFACE_ENDPOINT_HOUR = 0.01  # each, and in each zone
SCRATCH_2_GIB_MONTH = 0.140
GP3_GIB_MONTH = 0.08
