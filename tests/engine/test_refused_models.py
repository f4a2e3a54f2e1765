"""What cannot be served from chunk caches correctly is refused by name when the engine is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusionrag_engine.engine
from fusionrag_engine import ConfigError, Engine, UnsupportedModelError
from fusionrag_engine.rope import Rope, read_rope
from tests.engine.support import tiny_engine, tiny_model
from tests.tiny_models import ARCHITECTURES, SIZES, VOCAB, build_model

MakeEngine = Callable[..., Engine]
SMALL = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
MLA = {
    **SMALL,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

# Name -> (class of the model, class and settings of its config, what the message must name).
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "GPT-2: absolute positions": (
        "AutoModelForCausalLM",
        "GPT2Config",
        {**SMALL, "n_embd": 64, "n_layer": 2, "n_head": 4},
        "absolute",
    ),
    "OPT: absolute positions": (
        "AutoModelForCausalLM",
        "OPTConfig",
        {
            **SMALL,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": 256,
        },
        "absolute",
    ),
    "BLOOM: ALiBi": (
        "AutoModelForCausalLM",
        "BloomConfig",
        {**SMALL, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "ALiBi",
    ),
    "MPT: ALiBi": ("AutoModelForCausalLM", "MptConfig", {**SMALL, "d_model": 64, "n_layers": 2, "n_heads": 4}, "ALiBi"),
    "Falcon with ALiBi": (
        "AutoModelForCausalLM",
        "FalconConfig",
        {**SMALL, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        "ALiBi",
    ),
    "T5: encoder-decoder": (
        "AutoModelForSeq2SeqLM",
        "T5Config",
        {**SMALL, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        "encoder-decoder",
    ),
    "BART: encoder-decoder": (
        "AutoModelForSeq2SeqLM",
        "BartConfig",
        {
            **SMALL,
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        },
        "encoder-decoder",
    ),
    "Mamba: recurrent": (
        "AutoModelForCausalLM",
        "MambaConfig",
        {**SMALL, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        "linear|recurrent",
    ),
    "RWKV: recurrent": (
        "AutoModelForCausalLM",
        "RwkvConfig",
        {**SMALL, "hidden_size": 64, "num_hidden_layers": 2},
        "recurrent",
    ),
    "Qwen3-Next: hybrid": (
        "AutoModelForCausalLM",
        "Qwen3NextConfig",
        {**SIZES, **EXPERTS, **LINEAR, "head_dim": 16},
        "linear_attention",
    ),
    "Jamba: hybrid": (
        "AutoModelForCausalLM",
        "JambaConfig",
        {**SIZES, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
        "linear|mamba",
    ),
    "RecurrentGemma: hybrid": (
        "AutoModelForCausalLM",
        "RecurrentGemmaConfig",
        {**SIZES, "lru_width": 64, "attention_window_size": 32},
        "linear|recurrent",
    ),
    "LFM2: convolutions": (
        "AutoModelForCausalLM",
        "Lfm2Config",
        {**SIZES, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        "conv",
    ),
    "DeepSeek-V2: MLA": ("AutoModelForCausalLM", "DeepseekV2Config", MLA, "latent"),
    "DeepSeek-V3: MLA": ("AutoModelForCausalLM", "DeepseekV3Config", MLA, "latent"),
    "Llama with dynamic NTK": (
        "AutoModelForCausalLM",
        "LlamaConfig",
        {**SIZES, "rope_parameters": DYNAMIC},
        "dynamic.*length",
    ),
    "Phi-3 with longrope": (
        "AutoModelForCausalLM",
        "Phi3Config",
        {**SIZES, "max_position_embeddings": 512, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE},
        "longrope.*length",
    ),
    "Llama 4: chunked attention": (
        "AutoModelForCausalLM",
        "Llama4TextConfig",
        {**SIZES, "intermediate_size_mlp": 96, "num_local_experts": 2, "head_dim": 16, "attention_chunk_size": 32},
        "chunked_attention",
    ),
    "GPT-OSS: attention sinks": (
        "AutoModelForCausalLM",
        "GptOssConfig",
        {**SIZES, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 32},
        "own attention",
    ),
    "Cohere 2: interleaved rotation": (
        "AutoModelForCausalLM",
        "Cohere2Config",
        {**SIZES, "sliding_window": 32},
        "rotation",
    ),
    "a model without a head": ("AutoModel", "LlamaConfig", SIZES, "head"),
}


def _build(auto: str, config: str, settings: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, auto).from_config(getattr(transformers, config)(**settings)).float().eval()


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_by_name(make_engine: MakeEngine, name: str) -> None:
    auto, config, settings, reason = REFUSED[name]
    model = _build(auto, config, settings)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        make_engine(model=model)
    assert isinstance(caught.value, RuntimeError)
    assert type(model).__name__ in str(caught.value)


def _wrong_frequencies(model: Any) -> Rope:
    return Rope(read_rope(model).inv_freq * 1.01)


def _one_layer_wrong(model: Any) -> Rope:
    inv_freq = read_rope(model).inv_freq.clone()
    inv_freq[0] = inv_freq[0].flip(0)
    return Rope(inv_freq)


def _no_rotation(model: Any) -> Rope:
    return Rope(torch.zeros_like(read_rope(model).inv_freq))


@pytest.mark.parametrize("lie", [_wrong_frequencies, _one_layer_wrong, _no_rotation])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_frequencies_that_lie_fail_the_self_check(
    monkeypatch: pytest.MonkeyPatch, architecture: str, lie: Callable[..., Rope]
) -> None:
    monkeypatch.setattr(fusionrag_engine.engine, "read_rope", lie)
    with pytest.raises(UnsupportedModelError, match=r"self-check.*rotation"):
        tiny_engine(architecture)


def test_an_attention_that_ignores_positions_fails_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed forward in which every row sees every other one."""
    from fusionrag_engine import runner

    original = runner.q_sparse_attention

    def not_causal(q: Any, k: Any, v: Any, positions: Any, **keywords: Any) -> Any:
        return original(q, k, v, torch.full_like(positions, k.shape[0]), **keywords)

    monkeypatch.setattr(runner, "q_sparse_attention", not_causal)
    with pytest.raises(UnsupportedModelError, match="self-check"):
        tiny_engine()


def test_a_ready_model_that_contradicts_the_config_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="dtype='bfloat16'"):
        make_engine(dtype="bfloat16")
    with pytest.raises(ConfigError, match="device='meta'"):
        make_engine(device="meta")


def test_architectures_that_are_not_in_the_list_are_served_when_the_self_check_passes(make_engine: MakeEngine) -> None:
    """The check decides, not a list of names."""
    from fusionrag_engine import Request
    from tests.engine.support import assert_same, documents, eager_copy, full, own_logits, ring

    for config, settings in (
        ("MixtralConfig", {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1}),
        ("OlmoConfig", SIZES),
        ("Qwen2Config", {**SIZES, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
        ("LlamaConfig", {**SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    ):
        engine = make_engine(model=_build("AutoModelForCausalLM", config, settings))
        engine.precompute(documents(4), neighbours=ring(4))
        request = Request("Who?", documents(4), recompute_ratio=1.0)
        reference = full(engine, request)
        assert_same(engine.prefill(request).logits, reference.logits)
        assert_same(reference.logits, own_logits(eager_copy(engine.model), reference.token_ids))


def test_the_list_of_served_architectures_is_served() -> None:
    """What the README promises, and the tiny models stand for."""
    names = {type(build_model(name)).__name__ for name in ARCHITECTURES}
    assert names == {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Olmo2ForCausalLM",
        "GraniteForCausalLM",
        "SmolLM3ForCausalLM",
    }
    assert (
        len({tiny_model(name).config.rope_parameters["rope_type"] for name in ("llama", "llama3_rope", "llama_yarn")})
        == 3
    )
