"""One node's `ft_launcher`: NVRx's launcher main with Holdfast's changes, as a child of `launch`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from training import environment
from training.events import EventLog

EXIT_CONTROL_RETURNED = 75


def main() -> int:
    """Run NVRx's launcher on the arguments after the first, which is the run directory."""
    run_dir, arguments = Path(sys.argv[1]), sys.argv[2:]

    from nvidia_resiliency_ext.fault_tolerance import launcher

    from training import nvrx_changes

    with EventLog(run_dir, role="launcher", node=environment.node_name()) as events:
        nvrx_changes.apply_to_launcher(events, Path(os.environ[environment.ROUND_FILE]))
        try:
            launcher.main(arguments)
        except SystemExit as end:
            if nvrx_changes.ControlReturned.raised:
                return EXIT_CONTROL_RETURNED
            return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
