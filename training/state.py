"""The whole training state: model shards, AdamW moments, two counters.

There is nothing else to carry. The schedule is a function of the step, the data order a function of
the position, and random numbers are drawn afresh each step from (seed, step, rank).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from training.config import OptimizerConfig


@dataclass(kw_only=True, slots=True)
class TrainState:
    """What a checkpoint holds, by DCP key.

    Keys are `model.<name>`, `optimizer.state.<name>.exp_avg`, `optimizer.state.<name>.exp_avg_sq`,
    `step` and `position`; names are exactly Hugging Face's.

    Attributes:
        parameters: fp32 shards (DTensors) by name. These objects stay the shards even while FSDP has
            gathered a module.
        optimizer: AdamW over them, whose moments exist from the start so that a load has a target.
        step: Optimizer steps done.
        position: Samples of the data order consumed, over all ranks.
    """

    parameters: dict[str, nn.Parameter]
    optimizer: AdamW
    step: int = 0
    position: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state by DCP key; the shards are not copied."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            found[f"model.{name}"] = parameter.detach()
            moments = self.optimizer.state[parameter]
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.state.{name}.{moment}"] = moments[moment].detach()
        found["step"] = torch.tensor(self.step, dtype=torch.int64)
        found["position"] = torch.tensor(self.position, dtype=torch.int64)
        return found

    def adopt(self, *, step: int, position: int) -> None:
        """Take the counters of a state whose shards were filled in place."""
        self.step, self.position = step, position
        for parameter in self.parameters.values():
            self.optimizer.state[parameter]["step"].fill_(self.step)

    def clear(self) -> None:
        """Return to step 0; parameters are left as they are."""
        self.adopt(step=0, position=0)
        for moments in self.optimizer.state.values():
            moments["exp_avg"].zero_()
            moments["exp_avg_sq"].zero_()


def make_state(model: nn.Module, config: OptimizerConfig, *, device: torch.device) -> TrainState:
    """Make the optimizer over a sharded model; matrices decay, norms and biases don't."""
    parameters = dict(model.named_parameters())
    decayed = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    others = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=device.type == "cuda",
    )
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            # fused AdamW keeps its step count on the device, the plain one on the host
            "step": torch.zeros((), device=device if device.type == "cuda" else "cpu"),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return TrainState(parameters=parameters, optimizer=optimizer)
