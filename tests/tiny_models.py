"""Tiny random models of every served architecture, built from config, and a small tokenizer trained on the spot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

VOCAB = 384
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}


def _config(name: str, **settings: Any) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        return getattr(transformers, name)(**{**SIZES, **settings})

    return build


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "llama3_rope": _config("LlamaConfig", rope_parameters=LLAMA3, rope_scaling=None),
    "llama_yarn": _config("LlamaConfig", rope_parameters=YARN, rope_scaling=None),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config", head_dim=24),
    "mistral": _config("MistralConfig", sliding_window=48, head_dim=32),
    "phi3": _config("Phi3Config", partial_rotary_factor=0.5),
    "gemma2": _config("Gemma2Config", head_dim=256, sliding_window=48, query_pre_attn_scalar=64),
    "gemma3": _config(
        "Gemma3TextConfig",
        head_dim=256,
        sliding_window=40,
        query_pre_attn_scalar=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
    "olmo2": _config("Olmo2Config"),
    "granite": _config(
        "GraniteConfig", attention_multiplier=0.2, residual_multiplier=0.5, embedding_multiplier=2.0, logits_scaling=3.0
    ),
    "smollm3": _config("SmolLM3Config", no_rope_layer_interval=2),
}


def build_model(architecture: str, seed: int = 0) -> Any:
    """A random float32 model with attention that is far from uniform, so that a wrong row shows."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "qkv_proj" in name:
                parameter.mul_(2.0)
    return model.eval()


TEXTS = [
    "The harbour office in Lindmark opens at eight and closes at noon on Fridays.",
    "Every pump is tested for two hours before it leaves the hall.",
    "Who signs the report? The shift lead signs it, and the engineer adds a date.",
    "Questions about holidays go to the people team; answers come within three days.",
    "A valve that leaks is replaced, never repaired: order part 7741 from the store.",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@cache
def _backend(adds_bos: bool) -> str:
    """Definition of a byte-level BPE tokenizer of `VOCAB` tokens, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>", "<pad>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


def build_tokenizer(*, adds_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A tokenizer for the tiny models; with or without a BOS of its own, with or without a chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(adds_bos)), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
