"""What the operator runs: a recipe and a cluster to Kubernetes objects, and the commands around them."""

import sys
from pathlib import Path

# the instance table is shared with the infrastructure half; a checkout needs no installation
sys.path.insert(0, str(Path(__file__).parent.parent / "constructs"))
