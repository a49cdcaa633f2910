"""`training prepare` as a person runs it: real processes, killed and started again."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from training.errors import ConfigError, RunError
from training.preparation.output import OutputDirectory
from training.prepare import main
from training.shards import TokenStore


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 MB of text, enough for several parts."""
    root = tmp_path_factory.mktemp("source")
    write_texts(root, 60)
    lines = [json.dumps({"text": f"record {number} " * 60}) for number in range(12_000)]
    (root / "records.jsonl").write_text("\n".join(lines))
    (root / "broken.md").write_bytes(b"\xff\xfe")
    (root / "empty.py").touch()
    return root


@pytest.fixture(scope="module")
def trained_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 MB of text, enough to train a tokenizer for a while."""
    root = tmp_path_factory.mktemp("trained")
    write_texts(root, 4)
    return root


def write_texts(root: Path, count: int) -> None:
    for number in range(count):
        text = f"Text {number}: naïve words, numbers {number * 7919} and lines.\n" * 4000
        (root / f"{number:02d}.txt").write_text(text)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    root = tmp_path / "small"
    root.mkdir()
    for number in range(30):
        (root / f"{number}.txt").write_text(f"document {number}")
    return root


def command(source: Path, output: Path, more: Sequence[str] = ()) -> list[str]:
    settings = ["--source", str(source), "--output", str(output), "--validation-fraction", "0.2"]
    return [sys.executable, "-m", "training", "prepare", *settings, *more]


def content(output: Path) -> dict[str, str]:
    files = [path for path in output.rglob("*") if path.is_file()]
    return {str(p.relative_to(output)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one process makes of the source without a kill."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    subprocess.run(command(source, output, ["--workers", "1"]), check=True, capture_output=True)
    return content(output)


def test_report_and_shards(source: Path, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """GIVEN three processes instead of one THEN the same bytes, and a report of what was left out."""
    output = tmp_path / "out"
    result = subprocess.run(
        command(source, output, ["--workers", "3", "--json"]),
        check=True,
        capture_output=True,
        text=True,
    )
    assert content(output) == undisturbed
    report = json.loads(result.stdout)
    assert report["skipped"] == {"empty": 1, "undecodable": 1}
    assert report["skipped_examples"] == ["broken.md"]
    assert sum(report["documents"].values()) == 12_060
    assert "tokenise: done in" in result.stderr
    for split in ("train", "validation"):
        store = TokenStore(output / split)
        store.verify()
        assert store.tokens == report["tokens"][split] > 0
        assert int(store.sample(0, store.tokens - 1)[-1]) == store.eos_id


def kill_once(
    arguments: Callable[[Path], list[str]], outputs: Iterator[Path], reached: Callable[[Path], bool]
) -> Path:
    """SIGKILL the command's first process once `reached`; try again if it was over before that."""
    for output in itertools.islice(outputs, 5):
        process = subprocess.Popen(arguments(output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not reached(output):
            time.sleep(0.001)
        process.kill()
        if process.wait() == -signal.SIGKILL and not (output / "report.json").exists():
            return output
    raise AssertionError("it was over before the kill, five times")


@pytest.fixture
def outputs(tmp_path: Path) -> Iterator[Path]:
    return (tmp_path / f"out-{number}" for number in itertools.count())


@pytest.mark.parametrize(
    "pattern", ["parts/*.tmp", "parts/00*.json", "parts/shard-train-*.json", "../validation/*"]
)
def test_killed_and_started_again(
    source: Path, outputs: Iterator[Path], undisturbed: dict[str, str], pattern: str
) -> None:
    """GIVEN a SIGKILL in any stage THEN the next run ends in the bytes of an undisturbed one."""
    arguments = partial(command, source, more=["--workers", "2"])
    output = kill_once(arguments, outputs, lambda output: any((output / ".work").glob(pattern)))
    subprocess.run(arguments(output), check=True, capture_output=True)
    assert content(output) == undisturbed


@pytest.mark.parametrize("pattern", ["tokenizer.tmp", "tokenizer/tokenizer.json"])
def test_killed_around_the_training_of_the_tokenizer(
    trained_source: Path, outputs: Iterator[Path], pattern: str
) -> None:
    arguments = partial(command, trained_source, more=["--tokenizer", "bpe", "--vocabulary-tokens", "400"])
    killed = kill_once(arguments, outputs, lambda output: any(output.glob(pattern)))
    undisturbed = next(outputs)
    for output in (killed, undisturbed):
        subprocess.run(arguments(output), check=True, capture_output=True)
    assert content(killed) == content(undisturbed)


def test_processes_of_a_killed_run_end(source: Path, outputs: Iterator[Path]) -> None:
    """GIVEN only the parent is killed THEN its pool does not stay behind."""
    arguments = partial(command, source)
    output = kill_once(arguments, outputs, lambda output: any(output.glob(".work/parts/*.tmp")))
    deadline = time.monotonic() + 30
    while processes_with(str(output)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(str(output)) == []


def processes_with(path: str) -> list[int]:
    """Return the processes that hold a file open below `path`."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(path):
                found.append(int(link.parts[2]))
        except OSError:
            continue
    return found


def run(small: Path, output: Path, *more: str) -> int:
    return main(["--source", str(small), "--output", str(output), "--workers", "1", *more])


def test_second_run_changes_nothing(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small, tmp_path / "out") == 0
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.bin")}
    first = capsys.readouterr()
    assert "documents in 1 shards" in first.out
    assert run(small, tmp_path / "out") == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert second.err == ""
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_other_settings_are_refused_and_forced(small: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(small, output)
    before = content(output)
    with pytest.raises(
        ConfigError, match=r"prepare\.tokenizer='bpe': .*made with 'byte'; .*--force"
    ) as error:
        run(small, output, "--tokenizer", "bpe", "--validation-fraction", "0.5")
    assert len(error.value.problems) == 2
    assert content(output) == before
    assert run(small, output, "--tokenizer", "bpe", "--force") == 0
    assert TokenStore(output / "train").index.tokenizer == "bpe"


def test_changed_source_is_refused(small: Path, tmp_path: Path) -> None:
    run(small, tmp_path / "out")
    (small / "new.txt").write_text("more")
    with pytest.raises(
        ConfigError, match=r"prepare\.source='.*small': its files changed since .*out was made"
    ):
        run(small, tmp_path / "out")


def test_directory_of_somebody_else_is_left_alone(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "train").mkdir(parents=True)
    (tmp_path / "out" / "train" / "thesis.txt").write_text("precious")
    for more in ((), ("--force",)):
        with pytest.raises(ConfigError, match=r"--output='.*out': holds files that prepare did not make"):
            run(small, tmp_path / "out", *more)
    assert (tmp_path / "out" / "train" / "thesis.txt").read_text() == "precious"


def test_wrong_setting_does_not_claim_the_directory(small: Path, tmp_path: Path) -> None:
    """GIVEN a first try that fails THEN the corrected command needs no --force."""
    with pytest.raises(ConfigError, match="is no directory"):
        run(small, tmp_path / "out", "--tokenizer", "/no/such/model")
    assert run(small, tmp_path / "out") == 0


def test_two_at_once(small: Path, tmp_path: Path) -> None:
    with (
        OutputDirectory(tmp_path / "out").locked(),
        pytest.raises(RunError, match="another prepare is writing"),
    ):
        run(small, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocabulary-tokens", "3"], r"prepare\.vocabulary_tokens=3: must be from 257"),
        (["--workers", "0"], r"--workers=0: must be at least 1"),
        (
            ["--source", "/no/such/folder"],
            r"prepare\.source='/no/such/folder': is no folder; give python-stdlib",
        ),
    ],
)
def test_wrong_options(small: Path, tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(small, tmp_path / "out", *options)


def test_all_documents_skipped(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("   ")
    with pytest.raises(ConfigError, match="has no document for the training shards"):
        run(tmp_path / "in", tmp_path / "out")


def test_recipe_gives_settings_and_place(small: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"""
        version = 1
        job.name = "x"
        model.config.model_type = "llama"
        data = {{ path = "{tmp_path}/data", sequence_length_tokens = 8, global_batch_samples = 1 }}
        training.steps = 1
        prepare = {{ source = "{small}", validation_fraction = 0.0 }}
    """)
    assert main([str(recipe), "--workers", "1"]) == 0
    assert TokenStore(tmp_path / "data" / "train").index.documents == 30
    assert TokenStore(tmp_path / "data" / "validation").tokens == 0
