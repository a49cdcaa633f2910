"""Which NVRx this tree works with: `training/nvrx_changes.py` replaces parts of it.

Apart from there, so that `launch` can look before it starts anything and without importing torch.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from training.errors import ConfigError

# The first is the one that requirements-training.txt pins.
KNOWN_VERSIONS = ("0.6.0", "0.7.0")
_PACKAGE = "nvidia-resiliency-ext"


def check_version() -> None:
    """Refuse an NVRx whose internals were not read.

    Raises:
        ConfigError: The installed version is not in KNOWN_VERSIONS, or none is installed.
    """
    fix = f"pip install {_PACKAGE}=={KNOWN_VERSIONS[0]}"
    try:
        installed = version(_PACKAGE)
    except PackageNotFoundError as error:
        raise ConfigError.of(_PACKAGE, None, "is not installed", fix) from error
    if installed not in KNOWN_VERSIONS:
        rule = f"must be {' or '.join(KNOWN_VERSIONS)}: training/nvrx_changes.py replaces parts of it"
        raise ConfigError.of(_PACKAGE, installed, rule, fix)
