from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.clean_machine import CleanMachine
from training.rehearsal.isolation import isolation


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where undisturbed runs are kept, one for each shape of recipe."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[CleanMachine]:
    """Fail a test whose command leaves a process, a socket, a file in /dev/shm or a temporary directory."""
    with isolation() as found:
        if not found.is_real:
            pytest.fail("no mount and pid namespaces here: run the tests as root, or allow them to users")
        clean = CleanMachine(isolation=found, lists=tmp_path)
        yield clean
        assert clean.leftovers() == set()
