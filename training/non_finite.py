"""A loss or gradient norm that is NaN or infinite: its update is never applied, and then the recipe decides.

Whether a step is finite is known on the device, from numbers that all ranks have in common, so they all
leave out the same update without asking anybody. The host learns of it with the step's metrics, on a GPU
one step later: by then one more step was done on the state without that update, which `skip` keeps and the
others throw away with every state from the bad step on. A fault may come before that, so those states carry
the count of such updates (`training.slots.check_notes`): nothing saves or restores them.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from training.config import NonFinitePolicy
from training.errors import EXIT_SAME_STEP, HoldfastError
from training.events import EventLog
from training.metrics import Reading

logger = logging.getLogger(__name__)

# Skipped steps in a row after which the weights, not the data, are taken for the cause.
MAXIMUM_SKIPPED_IN_A_ROW = 20


class NonFiniteLossError(HoldfastError):
    """Training has come to a NaN or infinity that it must not go past."""

    exit_code = EXIT_SAME_STEP


def update_if_finite(optimizer: Optimizer, is_finite: Tensor) -> None:
    """Do an optimizer step, or only count it.

    AdamW's own step count follows the training step in both cases, so that it is known from that after a
    restore.
    """
    if is_finite.device.type != "cpu":
        update_on_device(optimizer, is_finite)
    elif is_finite.item():
        optimizer.step()
    else:
        _count_step(optimizer, torch.ones(()))


def update_on_device(optimizer: Optimizer, is_finite: Tensor) -> None:
    """Do the same without the host knowing which; the optimizer must be a fused one."""
    skipped = (~is_finite).float()
    # fused AdamW's switch for gradient scaling: it then takes back the count of a step that it leaves out
    optimizer.found_inf = skipped  # type: ignore[attr-defined]
    optimizer.step()
    _count_step(optimizer, skipped)


def _count_step(optimizer: Optimizer, amount: Tensor) -> None:
    counts = [state["step"] for state in optimizer.state.values()]
    torch._foreach_add_(counts, [amount] * len(counts))


class NonFiniteGuard:
    """Looks at each step's numbers and says what has to be done about them."""

    def __init__(self, policy: NonFinitePolicy, *, events: EventLog) -> None:
        self._policy, self._events = policy, events
        self._skipped = self._in_a_row = 0
        self._bad: Reading | None = None

    def accepts(self, reading: Reading) -> bool:
        """Say whether a step's numbers are finite; record it if they are not.

        Raises:
            NonFiniteLossError: Too many steps in a row were skipped.
        """
        if math.isfinite(reading.loss_sum) and math.isfinite(reading.gradient_norm):
            self._in_a_row = 0
            return True
        logger.warning("%s: %s", describe(reading), self._policy)
        if self._policy == "skip":
            self._skip(reading)
        elif self._bad is None:
            self._bad = reading
        self._emit(reading)
        return False

    def take_bad(self) -> Reading | None:
        """Return, once, the step before which training has to go back."""
        bad, self._bad = self._bad, None
        return bad

    def _skip(self, reading: Reading) -> None:
        self._skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MAXIMUM_SKIPPED_IN_A_ROW:
            raise NonFiniteLossError(
                f"training.non_finite_loss='skip': {self._in_a_row} steps in a row were skipped, the last: "
                f"{describe(reading)}; log: {self._events.path}; go back to an earlier checkpoint"
            )

    def _emit(self, reading: Reading) -> None:
        # as text: JSON has no NaN
        self._events.emit(
            "non_finite",
            step=reading.step,
            action=self._policy,
            loss=str(reading.loss_sum),
            gradient_norm=str(reading.gradient_norm),
            own_loss=str(reading.own_loss_sum),
            sample_ids=reading.batch.sample_ids.tolist(),
            skipped=self._skipped,
        )


def describe(reading: Reading) -> str:
    """Return what is wrong with a step, for people."""
    return (
        f"step {reading.step}: loss {reading.loss_sum:g}, gradient norm {reading.gradient_norm:g}, this "
        f"rank's own loss {reading.own_loss_sum:g} with samples {reading.batch.sample_ids.tolist()}"
    )
