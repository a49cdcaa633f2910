"""Every sample exactly once along the line that survived: through kills and changes of world size."""

from __future__ import annotations

import time
from pathlib import Path

from tests.ranks import Ranks, run_ranks
from tests.tiny import replaced, tiny_recipe, train_rank, train_rank_and_stand_still
from training.config import JobConfig
from training.data import BatchReader
from training.events import read_events
from training.ledger import consumed
from training.shards import TokenStore


def expected_checksums(
    config: JobConfig, data: Path, positions: list[int], ranks: int, rank: int
) -> list[int]:
    with BatchReader(
        TokenStore(data / "train"),
        sequence_length_tokens=config.data.sequence_length_tokens,
        global_batch_samples=config.data.global_batch_samples,
        seed=config.training.seed,
        rank=rank,
        world_size=ranks,
    ) as batches:
        return [batches.at(position).checksum for position in positions]


def kill_after(ranks: Ranks, run_dir: Path, step: int) -> None:
    """SIGKILL all ranks once one of them has done a step."""
    deadline = time.monotonic() + 60
    while not any(event["event"] == "step" and event["step"] >= step for event in read_events(run_dir)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks.kill()


def test_exactly_once_through_kills_and_resizes(data: Path, tmp_path: Path) -> None:
    # GIVEN a run that is killed and goes on with another number of ranks, three times
    config = tiny_recipe(data, ranks=4, training={"steps": 1000}, checkpoint={"every_steps": 3})
    reached = 0
    for ranks in (4, 2, 4):
        reached += 5
        resized = replaced(config, "job", ranks_per_node=ranks)
        kill_after(Ranks(ranks, train_rank_and_stand_still, resized, tmp_path, reached), tmp_path, reached)
    # WHEN it ends with a single one
    steps = reached + 3
    last = replaced(replaced(config, "job", ranks_per_node=1), "training", steps=steps)
    run_ranks(1, train_rank, last, tmp_path)
    # THEN the surviving line has consumed the data order once, in order
    entries = consumed(tmp_path)
    batch = config.data.global_batch_samples
    assert [entry.step for entry in entries] == sorted(entry.step for entry in entries)
    ids: dict[int, list[int]] = {}
    for entry in entries:
        assert entry.position == (entry.step - 1) * batch
        ids.setdefault(entry.step, []).extend(entry.ids)
    with BatchReader(
        TokenStore(data / "train"),
        sequence_length_tokens=config.data.sequence_length_tokens,
        global_batch_samples=batch,
        seed=config.training.seed,
        rank=0,
        world_size=1,
    ) as batches:
        for step in range(1, steps + 1):
            assert ids[step] == batches.at((step - 1) * batch).sample_ids.tolist()
    assert set(ids) == set(range(1, steps + 1))
    # and the tokens of the last rank's steps were those of the store
    alone = [entry for entry in entries if len(entry.ids) == batch]
    positions = [entry.position for entry in alone]
    assert [entry.checksum for entry in alone] == expected_checksums(last, data, positions, 1, 0)
