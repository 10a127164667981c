"""What each architecture's config.json means: a struct of its fields and a function that makes the spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from eventlm.models.families import (
    cohere,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    layer_norm,
    lfm2,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
    qwen_next,
)
from eventlm.models.families.fields import Fields
from eventlm.models.spec import ModelSpec


class Family(NamedTuple):
    """An architecture. models: what is known to have it."""

    fields: type[Fields]
    make: Callable[[Any], ModelSpec]
    models: str


class Multimodal(NamedTuple):
    """An architecture whose decoder, of which `text_config` tells, is another: one for each `model_type` there.

    Only the decoder is served. Where `text_config` has no `model_type`, it is the first.
    """

    decoders: dict[str, str]
    models: str


#: By the names that config.json has under `architectures`.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.LlamaFields, llama.llama, "Llama 2 and 3, SmolLM2, TinyLlama, Yi"),
    "ArceeForCausalLM": Family(llama.ArceeFields, llama.arcee, "Arcee AFM"),
    "Ernie4_5ForCausalLM": Family(llama.ErnieFields, llama.ernie, "ERNIE 4.5, dense"),
    "GraniteForCausalLM": Family(llama.GraniteFields, llama.granite, "Granite 3, dense"),
    "HeliumForCausalLM": Family(llama.HeliumFields, llama.helium, "Helium"),
    "SeedOssForCausalLM": Family(llama.SeedOssFields, llama.seed_oss, "Seed-OSS"),
    "SmolLM3ForCausalLM": Family(llama.SmolLM3Fields, llama.smollm3, "SmolLM3"),
    "MistralForCausalLM": Family(mistral.MistralFields, mistral.mistral, "Mistral 7B, Nemo, Small, Large"),
    "MinistralForCausalLM": Family(mistral.MistralFields, mistral.mistral, "Ministral 8B"),
    "Ministral3ForCausalLM": Family(mistral.Ministral3Fields, mistral.ministral3, "Ministral 3"),
    "Qwen2ForCausalLM": Family(qwen.Qwen2Fields, qwen.qwen2, "Qwen 2 and 2.5, QwQ, dense"),
    "Qwen3ForCausalLM": Family(qwen.Qwen3Fields, qwen.qwen3, "Qwen 3, dense"),
    "GemmaForCausalLM": Family(gemma.GemmaFields, gemma.gemma, "Gemma, CodeGemma"),
    "Gemma2ForCausalLM": Family(gemma.Gemma2Fields, gemma.gemma2, "Gemma 2"),
    "Gemma3ForCausalLM": Family(gemma.Gemma3Fields, gemma.gemma3, "Gemma 3 270M and 1B"),
    "Gemma4ForCausalLM": Family(gemma4.Gemma4Fields, gemma4.gemma4, "Gemma 4, text only"),
    "Gemma4UnifiedForCausalLM": Family(
        gemma4.Gemma4UnifiedFields, gemma4.gemma4_unified, "Gemma 4, unified, text only"
    ),
    "PhiForCausalLM": Family(phi.PhiFields, phi.phi, "Phi 1, 1.5 and 2"),
    "Phi3ForCausalLM": Family(phi.Phi3Fields, phi.phi3, "Phi 3, 3.5 and 4, dense"),
    "OlmoForCausalLM": Family(olmo.OlmoFields, olmo.olmo, "OLMo"),
    "Olmo2ForCausalLM": Family(olmo.Olmo2Fields, olmo.olmo2, "OLMo 2"),
    "Olmo3ForCausalLM": Family(olmo.Olmo3Fields, olmo.olmo3, "OLMo 3"),
    "Exaone4ForCausalLM": Family(olmo.Exaone4Fields, olmo.exaone4, "EXAONE 4"),
    "GlmForCausalLM": Family(glm.GlmFields, glm.glm, "GLM-4 9B"),
    "Glm4ForCausalLM": Family(glm.GlmFields, glm.glm4, "GLM-4-0414"),
    "CohereForCausalLM": Family(cohere.CohereFields, cohere.cohere, "Command R, Aya 23 8B"),
    "Cohere2ForCausalLM": Family(cohere.Cohere2Fields, cohere.cohere2, "Command R7B, Command A"),
    "StableLmForCausalLM": Family(layer_norm.StableLmFields, layer_norm.stablelm, "StableLM 3B, StableLM 2 1.6B"),
    "Starcoder2ForCausalLM": Family(layer_norm.Starcoder2Fields, layer_norm.starcoder2, "StarCoder 2"),
    "NemotronForCausalLM": Family(layer_norm.NemotronFields, layer_norm.nemotron, "Nemotron 4, Minitron"),
    "MixtralForCausalLM": Family(mistral.MixtralFields, mistral.mixtral, "Mixtral 8x7B and 8x22B"),
    "Qwen2MoeForCausalLM": Family(qwen.Qwen2MoeFields, qwen.qwen2_moe, "Qwen 1.5 MoE A2.7B, Qwen 2 57B-A14B"),
    "Qwen3MoeForCausalLM": Family(qwen.Qwen3MoeFields, qwen.qwen3_moe, "Qwen 3 30B-A3B and 235B-A22B, Qwen 3 Coder"),
    "OlmoeForCausalLM": Family(olmo.OlmoeFields, olmo.olmoe, "OLMoE"),
    "GraniteMoeForCausalLM": Family(llama.GraniteMoeFields, llama.granite_moe, "Granite 3 1B-A400M and 3B-A800M"),
    "GraniteMoeSharedForCausalLM": Family(llama.GraniteMoeFields, llama.granite_moe, "Granite MoE, shared expert"),
    "Glm4MoeForCausalLM": Family(glm.Glm4MoeFields, glm.glm4_moe, "GLM-4.5, 4.5 Air, 4.6 and 4.7"),
    "Ernie4_5_MoeForCausalLM": Family(llama.ErnieMoeFields, llama.ernie_moe, "ERNIE 4.5 21B-A3B and 300B-A47B"),
    "Qwen3_5ForCausalLM": Family(qwen_next.Qwen35Fields, qwen_next.qwen3_5, "Qwen 3.5 and 3.6, dense, text only"),
    "Qwen3_5MoeForCausalLM": Family(
        qwen_next.Qwen35MoeFields, qwen_next.qwen3_5_moe, "Qwen 3.5 and 3.6 with experts, text only"
    ),
    "Qwen3NextForCausalLM": Family(qwen_next.Qwen3NextFields, qwen_next.qwen3_next, "Qwen3-Next 80B-A3B"),
    "Lfm2ForCausalLM": Family(lfm2.Lfm2Fields, lfm2.lfm2, "LFM2 350M to 2.6B"),
    "Lfm2MoeForCausalLM": Family(lfm2.Lfm2MoeFields, lfm2.lfm2_moe, "LFM2 8B-A1B"),
    "GptOssForCausalLM": Family(gpt_oss.GptOssFields, gpt_oss.gpt_oss, "gpt-oss 20B and 120B"),
}
MULTIMODAL: dict[str, Multimodal] = {
    "Gemma3ForConditionalGeneration": Multimodal(
        {"gemma3_text": "Gemma3ForCausalLM"}, "Gemma 3 from 4B on, without pictures"
    ),
    "Gemma4ForConditionalGeneration": Multimodal(
        {"gemma4_text": "Gemma4ForCausalLM"}, "Gemma 4 E2B, E4B, 26B-A4B and 31B, without pictures and sounds"
    ),
    "Gemma4UnifiedForConditionalGeneration": Multimodal(
        {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, "Gemma 4 12B, without pictures and sounds"
    ),
    "Mistral3ForConditionalGeneration": Multimodal(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        "Mistral Small 3.1 and 3.2, Ministral 3, without pictures",
    ),
    "Qwen3_5ForConditionalGeneration": Multimodal(
        {"qwen3_5_text": "Qwen3_5ForCausalLM"}, "Qwen 3.5 and 3.6, dense, without pictures"
    ),
    "Qwen3_5MoeForConditionalGeneration": Multimodal(
        {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, "Qwen 3.5 and 3.6 with experts, without pictures"
    ),
}
#: How the tensors of these are named, by transformers 5 and before, for `TensorNames`: the decoder's, and the others.
DECODER_NAMES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
TOWER_NAMES = tuple(
    f"{start}{name}."
    for start in ("", "model.")
    for name in (
        *("vision_tower", "multi_modal_projector", "visual"),
        *("audio_tower", "embed_vision", "embed_audio", "vision_embedder"),
    )
)
