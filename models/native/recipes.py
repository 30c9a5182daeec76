"""Families of decoders as data: how transformers names the parts of a layer, and in which order they compute.

A layer consists of attention and a feed-forward part, each with a residual sum. Norms stand before the parts, before
the sums, or at both places. In some families both parts read the same states (Wang and Komatsuzaki 2021, "GPT-J").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, frozen


def _is_turned(attention: Any) -> bool:
    return bool(getattr(attention, "use_rope", True))


def _is_turned_near(attention: Any) -> bool:
    """Tells whether an attention has rotary positions, where those of all positions have none beside windows."""
    return attention.sliding_window is None or bool(attention.is_sliding)


@frozen(kw_only=True)
class Recipe:
    """A family of decoders. Names are attributes of transformers' modules; dots separate the parts of a path.

    Args:
        layers: the layers, in the base model.
        last_norm: the norm behind them.
        attention: the attention, in a layer that has some.
        recurrent: the recurrent part, in a layer that has one; empty: no layer has one. See `recurrent`.
        read: the linear layers of queries, keys and values, in the attention; and of gates of its outputs, one for each
            head, if it has such a layer.
        in_heads: True: outputs of ``read`` are queries, keys and values of one head after the other.
        opens_numbers: True: each head's queries are followed by gates of its outputs, one for each number.
        out: the linear layer of the attention's outputs.
        head_norms: the norms of queries and keys, if the attention has them.
        feed: the feed-forward part, in a layer; empty: the layer itself.
        widen: the first linear layers of the feed-forward part: gates before what they are multiplied with.
        narrow: its last linear layer.
        router: what chooses experts, in a feed-forward part that has some.
        shared: the expert that all rows share, in a layer with experts; empty: none. It has ``widen`` and ``narrow``.
        correction: the numbers of the router, or of the feed-forward part, that are added to chances only to choose, if
            there are some.
        apart: True: the chance of each expert is the sigmoid of its logit.
        more: what is added to that sum.
        gated: True: it has gates.
        norms: the norms of attention: before it, and before its sum; the norms of the feed-forward part likewise.
            Empty: none.
        parallel: True: the feed-forward part reads what attention reads, not the sum. A layer may say otherwise.
        activation: the setting that names the activation.
        is_turned: tells whether an attention has rotary positions, if the model has some.
        paired: True: a dimension is turned together with its neighbour.
        repeated: True: each cosine and sine of the model stands beside itself, not in two halves.
        once: True: each stands once.
        latent: True: queries, keys and values are made of latent ones, see `latent`.
        shares: True: layers that have no keys and values read those of the last layer of their kind that has some;
            values may be made of keys.
        together: True: the chances of a row's experts are divided by their sum, if the router does not say.
        by_kind: True: kinds of layers have different rotary positions.
        by_theta: True: each layer has its own frequency of rotary positions, or has none.
        by_position: True: queries are multiplied with numbers that depend on their positions, as Llama 4's are.
        positions: the embedding of positions, in the base model; empty: none.
        caps: True: logits may be capped.
        caps_scores: True: scores may be capped.
        embeddings_by: the setting that embeddings are multiplied with; empty: none.
        residuals_by: the setting that outputs are multiplied with before each sum.
        logits_by: the setting that logits are multiplied with.
        logits_over: the setting that logits are divided by.
    """

    layers: str = "layers"
    last_norm: str = "norm"
    attention: str = "self_attn"
    recurrent: str = ""
    read: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    in_heads: bool = False
    opens_numbers: bool = False
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    feed: str = "mlp"
    widen: tuple[str, ...] = ("gate_proj", "up_proj")
    narrow: str = "down_proj"
    router: str = "gate"
    shared: str = ""
    correction: str = "e_score_correction_bias"
    apart: bool = False
    gated: bool = True
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    parallel: bool = False
    activation: str = "hidden_act"
    is_turned: Callable[[Any], bool] = _is_turned
    paired: bool = False
    repeated: bool = False
    once: bool = False
    latent: bool = False
    shares: bool = False
    together: bool = True
    more: float = 0.0
    by_kind: bool = False
    by_theta: bool = False
    by_position: bool = False
    positions: str = ""
    caps: bool = False
    caps_scores: bool = False
    embeddings_by: str = ""
    residuals_by: str = ""
    logits_by: str = ""
    logits_over: str = ""


_PLAIN = Recipe()
_GEMMA3 = Recipe(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    activation="hidden_activation",
    by_kind=True,
    caps=True,
)
_GEMMA2 = evolve(_GEMMA3, by_kind=False, caps_scores=True)
_GLM = Recipe(widen=("gate_up_proj",), paired=True)
_GLM4 = evolve(
    _GLM,
    norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)
_BEHIND = Recipe(norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm"))
_COHERE = Recipe(
    norms=("input_layernorm", "", "input_layernorm", ""),
    parallel=True,
    paired=True,
    repeated=True,
    logits_by="logit_scale",
)
_GRANITE = Recipe(
    embeddings_by="embedding_multiplier", residuals_by="residual_multiplier", logits_over="logits_scaling"
)
_GLM_MOE = Recipe(shared="mlp.shared_experts", apart=True)
_LATENT = evolve(_GLM_MOE, latent=True)
_GRANITE_MOE = evolve(_GRANITE, feed="block_sparse_moe", router="router")
_GRANITE_SHARED = evolve(_GRANITE_MOE, shared="shared_mlp", widen=("input_linear",), narrow="output_linear")
_LFM2 = Recipe(
    last_norm="embedding_norm",
    recurrent="conv",
    out="out_proj",
    head_norms=("q_layernorm", "k_layernorm"),
    feed="feed_forward",
    widen=("w1", "w3"),
    narrow="w2",
    norms=("operator_norm", "", "ffn_norm", ""),
)
_QWEN_NEXT = Recipe(recurrent="linear_attn", opens_numbers=True, shared="mlp.shared_expert")
_BAMBA = Recipe(
    last_norm="final_layernorm",
    recurrent="mamba",
    feed="feed_forward",
    norms=("input_layernorm", "", "pre_ff_layernorm", ""),
)
_MIXERS = Recipe(  # a layer has one part, of whatever kind
    last_norm="norm_f",
    attention="mixer",
    recurrent="mixer",
    feed="mixer",
    widen=("up_proj",),
    shared="mixer.shared_experts",
    apart=True,
    gated=False,
    norms=("norm", "", "norm", ""),
    activation="mlp_hidden_act",
)

FAMILIES: dict[str, tuple[str, Recipe]] = {
    "llama": ("LlamaDecoderLayer", _PLAIN),
    "mistral": ("MistralDecoderLayer", _PLAIN),
    "ministral": ("MinistralDecoderLayer", _PLAIN),
    "ministral3": ("Ministral3DecoderLayer", Recipe(by_position=True)),
    "qwen2": ("Qwen2DecoderLayer", _PLAIN),
    "qwen3": ("Qwen3DecoderLayer", _PLAIN),
    "smollm3": ("SmolLM3DecoderLayer", _PLAIN),
    "cwm": ("CwmDecoderLayer", _PLAIN),
    "internlm3": ("LlamaDecoderLayer", _PLAIN),
    "iquestcoder": ("LlamaDecoderLayer", _PLAIN),
    "mellum": ("MellumDecoderLayer", Recipe(by_kind=True)),
    "seed_oss": ("SeedOssDecoderLayer", _PLAIN),
    "phi3": ("Phi3DecoderLayer", Recipe(read=("qkv_proj",), widen=("gate_up_proj",))),
    "gemma": ("GemmaDecoderLayer", _PLAIN),
    "gemma2": ("Gemma2DecoderLayer", _GEMMA2),
    "vaultgemma": (
        "VaultGemmaDecoderLayer",
        evolve(_GEMMA2, norms=("input_layernorm", "", "pre_feedforward_layernorm", "")),
    ),
    "gemma3_text": ("Gemma3DecoderLayer", _GEMMA3),
    "gemma4_text": ("Gemma4TextDecoderLayer", evolve(_GEMMA3, shares=True)),
    "gemma4_unified_text": ("Gemma4UnifiedTextDecoderLayer", evolve(_GEMMA3, shares=True)),
    "helium": ("HeliumDecoderLayer", Recipe(paired=True)),
    "ernie4_5": ("Ernie4_5DecoderLayer", Recipe(paired=True)),
    "ernie4_5_moe": (
        "Ernie4_5_MoeDecoderLayer",
        Recipe(paired=True, shared="mlp.shared_experts", correction="moe_statics.e_score_correction_bias"),
    ),
    "glm4_moe": ("Glm4MoeDecoderLayer", _GLM_MOE),
    "deepseek_v2": (
        "DeepseekV2DecoderLayer",
        evolve(_LATENT, apart=False, together=False, paired=True, once=True),
    ),
    "deepseek_v3": ("DeepseekV3DecoderLayer", _LATENT),
    "glm4_moe_lite": ("Glm4MoeLiteDecoderLayer", _LATENT),
    "mistral4": ("Mistral4DecoderLayer", evolve(_LATENT, apart=False, by_position=True)),
    "youtu": ("YoutuDecoderLayer", _LATENT),
    "minicpm3": (
        "MiniCPM3DecoderLayer",
        evolve(_LATENT, residuals_by="residual_scale", logits_over="logits_scaling"),
    ),
    "gpt_oss": ("GptOssDecoderLayer", Recipe(router="router", once=True)),
    "dots1": ("Dots1DecoderLayer", _GLM_MOE),
    "solar_open": ("SolarOpenDecoderLayer", _GLM_MOE),
    "exaone_moe": ("ExaoneMoeDecoderLayer", evolve(_GLM_MOE, is_turned=_is_turned_near)),
    "minimax_m2": ("MiniMaxM2DecoderLayer", Recipe(apart=True)),
    "mixtral": ("MixtralDecoderLayer", _PLAIN),
    "qwen2_moe": ("Qwen2MoeDecoderLayer", Recipe(shared="mlp.shared_expert")),
    "qwen3_moe": ("Qwen3MoeDecoderLayer", _PLAIN),
    "olmoe": ("OlmoeDecoderLayer", _PLAIN),
    "granite": ("GraniteDecoderLayer", _GRANITE),
    "granite_docling_text": ("GraniteDoclingTextDecoderLayer", _GRANITE),
    "hyperclovax": (
        "HyperCLOVAXDecoderLayer",
        evolve(
            _GRANITE,
            norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
            logits_by="logits_scaling",
            logits_over="",
        ),
    ),
    "granitemoe": ("GraniteMoeDecoderLayer", _GRANITE_MOE),
    "granitemoeshared": (
        "GraniteMoeSharedDecoderLayer",
        _GRANITE_SHARED,
    ),
    "granitemoehybrid": ("GraniteMoeHybridDecoderLayer", evolve(_GRANITE_SHARED, recurrent="mamba")),
    "lfm2": ("Lfm2DecoderLayer", _LFM2),
    "lfm2_moe": ("Lfm2MoeDecoderLayer", evolve(_LFM2, apart=True, correction="expert_bias", more=1e-6)),
    "lfm3": (
        "Lfm3DecoderLayer",
        evolve(
            _LFM2,
            read=("q_proj", "k_proj", "v_proj", "g_proj"),
            out="o_proj",
            head_norms=("q_norm", "k_norm"),
            norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
            by_kind=True,
        ),
    ),
    "qwen3_next": ("Qwen3NextDecoderLayer", _QWEN_NEXT),
    "qwen2_vl_text": ("Qwen2VLDecoderLayer", _PLAIN),
    "qwen2_5_vl_text": ("Qwen2_5_VLDecoderLayer", _PLAIN),
    "qwen3_vl_text": ("Qwen3VLTextDecoderLayer", _PLAIN),
    "qwen3_vl_moe_text": ("Qwen3VLMoeTextDecoderLayer", _PLAIN),
    "paddleocr_vl_text": ("PaddleOCRDecoderLayer", _PLAIN),
    "qwen3_5_text": ("Qwen3_5DecoderLayer", _QWEN_NEXT),
    "qwen3_5_moe_text": ("Qwen3_5MoeDecoderLayer", _QWEN_NEXT),
    "olmo_hybrid": ("OlmoHybridAttentionDecoderLayer", evolve(_BEHIND, recurrent="linear_attn")),
    "mamba2": ("Mamba2Block", _MIXERS),
    "nemotron_h": ("NemotronHBlock", _MIXERS),
    "bamba": ("BambaDecoderLayer", _BAMBA),
    "falcon_h1": (
        "FalconH1DecoderLayer",
        evolve(_BAMBA, embeddings_by="embedding_multiplier", logits_by="lm_head_multiplier"),
    ),
    "granite_swa": ("GraniteSWADecoderLayer", evolve(_GRANITE, by_theta=True)),
    "granitemoe_swa": ("GraniteMoeSWADecoderLayer", evolve(_GRANITE_SHARED, by_theta=True)),
    "olmo2": ("Olmo2DecoderLayer", _BEHIND),
    "olmo3": ("Olmo3DecoderLayer", evolve(_BEHIND, by_kind=True)),
    "exaone4": (
        "Exaone4DecoderLayer",
        evolve(_BEHIND, is_turned=_is_turned_near),
    ),
    "glm": ("GlmDecoderLayer", _GLM),
    "glm4": ("Glm4DecoderLayer", _GLM4),
    "glm_ocr_text": ("GlmOcrTextDecoderLayer", evolve(_GLM4, repeated=True)),
    "glm4v_text": ("Glm4vTextDecoderLayer", evolve(_GLM4, repeated=True)),
    "glm4v_moe_text": ("Glm4vMoeTextDecoderLayer", _GLM_MOE),
    "starcoder2": ("Starcoder2DecoderLayer", Recipe(widen=("c_fc",), narrow="c_proj", gated=False)),
    "cohere": ("CohereDecoderLayer", _COHERE),
    "cohere2": (
        "Cohere2DecoderLayer",
        evolve(_COHERE, is_turned=lambda attention: attention.sliding_window is not None),
    ),
    "phi": (
        "PhiDecoderLayer",
        Recipe(
            last_norm="final_layernorm",
            out="dense",
            head_norms=("q_layernorm", "k_layernorm"),
            widen=("fc1",),
            narrow="fc2",
            gated=False,
            norms=("input_layernorm", "", "input_layernorm", ""),
            parallel=True,
        ),
    ),
    "gpt_neox": (
        "GPTNeoXLayer",
        Recipe(
            last_norm="final_layer_norm",
            attention="attention",
            read=("query_key_value",),
            in_heads=True,
            out="dense",
            widen=("dense_h_to_4h",),
            narrow="dense_4h_to_h",
            gated=False,
        ),
    ),
    "gpt2": (
        "GPT2Block",
        Recipe(
            layers="h",
            last_norm="ln_f",
            attention="attn",
            read=("c_attn",),
            out="c_proj",
            widen=("c_fc",),
            narrow="c_proj",
            gated=False,
            norms=("ln_1", "", "ln_2", ""),
            activation="activation_function",
            positions="wpe",
        ),
    ),
    "opt": (
        "OPTDecoderLayer",
        Recipe(
            layers="decoder.layers",
            last_norm="decoder.final_layer_norm",
            out="out_proj",
            feed="",
            widen=("fc1",),
            narrow="fc2",
            gated=False,
            norms=("self_attn_layer_norm", "", "final_layer_norm", ""),
            activation="activation_function",
            positions="decoder.embed_positions",
        ),
    ),
}
"""By the model type of a configuration: the class of its layers, or of those with attention, and their recipe."""

RECIPES: dict[str, Recipe] = {
    **dict(FAMILIES.values()),
    "OlmoHybridLinearAttentionDecoderLayer": evolve(_PLAIN, recurrent="linear_attn"),
}
"""Recipes by the class of the layers."""
