"""What every rank of a test needs, imported once by the fork server; nothing here starts a thread."""

import transformers.models.llama.modeling_llama  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401

import training.worker  # noqa: F401
import training.writer_server  # noqa: F401
