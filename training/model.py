"""Any Hugging Face causal language model, built without memory and sharded by FSDP2.

The order matters (facts of each step in docs/training.md): meta device -> activation checkpointing ->
per-block compile -> `fully_shard` of each block -> `fully_shard` of the root -> empty storage -> weights.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from training.config import ModelConfig
from training.errors import ConfigError
from training.loss import cross_entropy_sum

logger = logging.getLogger(__name__)

# Fields of transformers configurations that change the logits after the head, by model family:
# Gemma 2 and 3, Cohere, Granite. Their neutral value is None or 1.
_LOGIT_FIELDS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class LanguageModelTask(nn.Module):
    """A causal language model and its loss, as one root for FSDP.

    The head's weight is read by the loss directly, so it has to belong to the root group: in a group of
    its own it would be a sharded DTensor outside its forward, and tied embeddings would be untied.
    """

    def __init__(self, model: nn.Module, *, loss_chunk_tokens: int) -> None:
        super().__init__()
        self.model: Any = model
        self.loss_chunk_tokens = loss_chunk_tokens
        self.plain_head = _has_plain_head(model)
        if not self.plain_head:
            logger.warning(
                "%s changes its logits after the head: the loss is not chunked and holds all logits",
                type(model).__name__,
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the summed next-token loss of `tokens` [samples, length + 1], in fp32."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:].reshape(-1)
        if not self.plain_head:
            logits = self.model(input_ids=inputs, use_cache=False).logits
            return nn.functional.cross_entropy(
                logits.reshape(labels.numel(), -1).float(), labels, reduction="sum"
            )
        hidden = self.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        weight = self.model.get_output_embeddings().weight
        return cross_entropy_sum(
            hidden.reshape(labels.numel(), -1), weight, labels, chunk_tokens=self.loss_chunk_tokens
        )


def load_model_config(config: ModelConfig) -> Any:
    """Return the transformers configuration that a recipe describes.

    Raises:
        ConfigError: The model is unknown, or transformers refuses a field.
    """
    from transformers import AutoConfig

    fields = dict(config.config)
    try:
        if config.source:
            loaded = AutoConfig.from_pretrained(config.source, **fields)
        else:
            loaded = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        path = "model.source" if config.source else "model.config"
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        rule = f"is no model that transformers can build ({reason})"
        fix = "give a directory with a config.json, the name of a hub model, or a known model_type"
        raise ConfigError.of(path, config.source or config.config, rule, fix) from error
    loaded.use_cache = False
    return loaded


def build_model(model_config: Any) -> nn.Module:
    """Build the model on the meta device: no memory, no weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(
                model_config, attn_implementation="sdpa", dtype=torch.float32
            )
        except ValueError as error:
            reason = str(error).splitlines()[0][:200]
            raise ConfigError.of(
                "model", model_config.model_type, f"is no causal language model ({reason})", "use one"
            ) from error
    return model  # type: ignore[no-any-return]


def shard(task: LanguageModelTask, mesh: DeviceMesh, config: ModelConfig, *, bf16: bool) -> LanguageModelTask:
    """Apply activation checkpointing, compile and FSDP2, in that order."""
    blocks = list(decoder_blocks(task.model))
    _checkpoint_activations(task.model, blocks, config.activation_checkpointing)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if bf16
        else MixedPrecisionPolicy()
    )
    for block in decoder_blocks(task.model):
        if config.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(task, mesh=mesh, mp_policy=policy)
    return task


def reshard(task: nn.Module) -> None:
    """Free the root's gathered parameters.

    The root stays gathered after a forward without backward, and everything that walks over
    parameters (snapshots, fingerprints) would see full bf16 copies instead of fp32 shards.
    """
    assert isinstance(task, FSDPModule)
    task.reshard()


def decoder_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that the model's authors name as units that must not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError.of(
            "model",
            type(model).__name__,
            "names no decoder blocks (_no_split_modules)",
            "use another model",
        )
    yield from blocks


def parameter_counts(task: LanguageModelTask) -> tuple[int, int]:
    """Return (all parameters, parameters without an untied input embedding), over all ranks."""
    total = sum(parameter.numel() for parameter in task.model.parameters())
    embedding = task.model.get_input_embeddings().weight
    tied = task.model.get_output_embeddings().weight is embedding
    return total, total if tied else total - embedding.numel()


@contextlib.contextmanager
def no_packed_sequence_check() -> Iterator[None]:
    """Switch off transformers' test for packed sequences, which waits for the device in each forward.

    It calls `.all()` on position ids; behind a snapshot in flight that doubles the step (measured on an
    H200). Samples are never packed with restarted positions here, so the answer is always "no".
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    original: Callable[..., Any] | None = getattr(masking_utils, name, None)
    if original is None:
        logger.warning("transformers has no %s any more: check for a host sync in forward", name)
        yield
        return
    setattr(masking_utils, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, original)


def _has_plain_head(model: nn.Module) -> bool:
    head = model.get_output_embeddings()  # type: ignore[operator]
    config: Any = model.config
    neutral = all(getattr(config, name, None) in (None, 1, 1.0) for name in _LOGIT_FIELDS)
    return isinstance(head, nn.Linear) and head.bias is None and neutral


def _checkpoint_activations(model: Any, blocks: list[nn.Module], mode: str) -> None:
    if mode == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if mode == "selective":
        for block in blocks:
            _checkpoint_selectively(block)


def _checkpoint_selectively(block: nn.Module) -> None:
    """Keep attention and every second matmul; compute the rest again in backward.

    Wraps `forward` in place: a wrapper module would add a level to every parameter name.
    """
    from torch.utils.checkpoint import checkpoint

    forward = block.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)

    block.forward = checkpointed


def _selective_contexts() -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    attention = {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    matmuls = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in attention:
            return CheckpointPolicy.MUST_SAVE
        if op == torch.ops.aten.mm.default:
            phase = "recompute" if context.is_recompute else "forward"
            matmuls[phase] += 1
            if matmuls[phase] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
