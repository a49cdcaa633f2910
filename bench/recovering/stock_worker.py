"""A rank as the documentation of torchrun and of NVRx's ft_launcher has it: FSDP, DCP, start again and load.

    stock_worker.py DIRECTORY SAVE_EVERY_STEPS

Writes a line for each step to DIRECTORY/steps, and a checkpoint every few steps. Under ft_launcher it sends
heartbeats. It stops when DIRECTORY/stop is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
}


def main() -> None:
    directory, every_steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    monitor = _monitor()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = _load(model, optimizer, directory)
    with (directory / "steps" / f"{dist.get_rank()}-{time.time_ns()}.jsonl").open("a", buffering=1) as lines:
        while not (directory / "stop").exists():
            step += 1
            torch.manual_seed(step)
            tokens = torch.randint(0, 257, (2, 32))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.send_heartbeat()
            lines.write(json.dumps({"time": time.time(), "step": step}) + "\n")
            if step % every_steps == 0:
                _save(model, optimizer, directory, step)


def _monitor() -> Any:
    if "FAULT_TOL_CFG_PATH" not in os.environ and "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        return None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


def _save(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, directory: Path, step: int) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    path = directory / "checkpoints" / f"{step:08}"
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    if dist.get_rank() == 0:
        (directory / "latest").write_text(path.name)


def _load(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, directory: Path) -> int:
    latest = ""
    with suppress(FileNotFoundError):
        latest = (directory / "latest").read_text()
    # ranks may read it at different times: all take the oldest that one has seen
    seen: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(seen, latest)
    if not min(seen):
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # loaded in place
    dcp.load(
        {"model": model_state, "optimizer": optimizer_state},
        checkpoint_id=directory / "checkpoints" / min(seen),
    )
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(min(seen))


if __name__ == "__main__":
    main()
