"""transformers: language models from their configurations, most with a head for sequence classification."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from benchmarks.robustness.adversary.entry import CLASSES, VOCABULARY, Entry, entry, family, text

SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": CLASSES, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BERT = SIZES | {"max_position_embeddings": 32}
GROUPED = BERT | {"num_key_value_heads": 1}
HEADS = GROUPED | {"head_dim": 8}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
EAGER, BATCHED = {"experts_implementation": "eager"}, {"experts_implementation": "batched_mm"}  # grouped: no float64
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "relative_attention_num_buckets": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}

# With a head for sequences: the configuration's name and what makes it small.
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("albert", BERT | {"embedding_size": 8}),
    "bert": ("bert", BERT),
    "bert_eager": ("bert", BERT | {"attn_implementation": "eager"}),
    "big_bird_full": ("big_bird", BERT | {"attention_type": "original_full"}),
    "big_bird_sparse": ("big_bird", BERT | {"block_size": 2, "num_random_blocks": 1, "max_position_embeddings": 64}),
    "convbert": ("convbert", BERT | {"embedding_size": 16, "head_ratio": 2, "conv_kernel_size": 3}),
    "ctrl": ("ctrl", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "dff": 32}),
    "deberta": ("deberta", BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta_v2": (
        "deberta-v2",
        BERT
        | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "share_att_key": True},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        BERT
        | LATENT
        | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
        | EAGER
        | {"first_k_dense_replace": 1, "moe_intermediate_size": 16, "num_key_value_heads": 2},
    ),
    "distilbert": (
        "distilbert",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32},
    ),
    "electra": ("electra", BERT | {"embedding_size": 8}),
    "ernie": ("ernie", BERT),
    "esm": ("esm", BERT | {"position_embedding_type": "rotary", "mask_token_id": 3}),
    "falcon": ("falcon", SIZES | {"multi_query": True, "alibi": False}),
    "falcon_alibi": ("falcon", SIZES | {"multi_query": False, "alibi": True}),
    "fnet": ("fnet", BERT),
    "funnel": (
        "funnel",
        {"block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "num_decoder_layers": 1},
    ),
    "gemma": ("gemma", HEADS),
    "gemma2": ("gemma2", HEADS | {"query_pre_attn_scalar": 8, "sliding_window": 4}),
    "gemma3": ("gemma3_text", HEADS | {"query_pre_attn_scalar": 8, "sliding_window": 4}),
    "glm": ("glm", HEADS),
    "gpt2": ("gpt2", GPT),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "intermediate_size": 32,
        },
    ),
    "gpt_neox": ("gpt_neox", BERT),
    "gpt_oss": ("gpt_oss", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4} | EAGER),
    "gptj": ("gptj", GPT | {"rotary_dim": 4}),
    "helium": ("helium", HEADS),
    "ibert": ("ibert", BERT),
    "jamba": (
        "jamba",
        GROUPED
        | EAGER
        | {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_state": 4,
            "mamba_d_conv": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "layoutlm": ("layoutlm", BERT | {"max_2d_position_embeddings": 32}),
    "llama": ("llama", GROUPED),
    "llama_eager": ("llama", GROUPED | {"attn_implementation": "eager", "attention_bias": True, "mlp_bias": True}),
    "longformer": ("longformer", BERT | {"attention_window": 4, "max_position_embeddings": 40}),
    "megatron_bert": ("megatron-bert", BERT),
    "mistral": ("mistral", HEADS | {"sliding_window": 4}),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2} | EAGER),
    "mixtral_grouped": ("mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mobilebert": (
        "mobilebert",
        BERT | {"embedding_size": 8, "intra_bottleneck_size": 8, "num_feedforward_networks": 2},
    ),
    "modernbert": (
        "modernbert",
        BERT | {"local_attention": 4, "global_attn_every_n_layers": 2, "reference_compile": False},
    ),
    "mpnet": ("mpnet", BERT),
    "mpt": ("mpt", {"d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32, "expansion_ratio": 2}),
    "nystromformer": ("nystromformer", BERT | {"num_landmarks": 4, "segment_means_seq_len": 8, "conv_kernel_size": 3}),
    "olmo2": ("olmo2", GROUPED),
    "openai_gpt": ("openai-gpt", GPT),
    "opt": (
        "opt",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 8,
        },
    ),
    "persimmon": ("persimmon", BERT),
    "phi": ("phi", BERT),
    "phi3": ("phi3", GROUPED),
    "qwen2": ("qwen2", GROUPED),
    "qwen2_moe": ("qwen2_moe", GROUPED | EXPERTS | BATCHED | {"shared_expert_intermediate_size": 16}),
    "qwen3": ("qwen3", HEADS),
    "qwen3_moe": ("qwen3_moe", HEADS | EXPERTS | EAGER),
    "roberta": ("roberta", BERT | {"max_position_embeddings": 40}),
    "roberta_prelayernorm": ("roberta-prelayernorm", BERT | {"max_position_embeddings": 40}),
    "roformer": ("roformer", BERT | {"embedding_size": 16, "rotary_value": True}),
    "squeezebert": (
        "squeezebert",
        BERT
        | {
            "embedding_size": 16,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "post_attention_groups": 1,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
    ),
    "stablelm": ("stablelm", GROUPED | {"qk_layernorm": True}),
    "starcoder2": ("starcoder2", GROUPED),
    "xlm": ("xlm", {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32}),
    "xlnet": ("xlnet", {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}),
}


def classifier(kind: str, options: dict[str, Any]) -> nn.Module:
    config = AutoConfig.for_model(kind, **(SMALL | options))
    return AutoModelForSequenceClassification.from_config(config)


def base(kind: str, **options: Any) -> Any:
    return AutoModel.from_config(AutoConfig.for_model(kind, **(SMALL | options)))


def seq2seq(kind: str, **options: Any) -> nn.Module:
    config = AutoConfig.for_model(kind, decoder_start_token_id=0, **(SMALL | options))
    return AutoModelForSeq2SeqLM.from_config(config)


class Encoder(nn.Module):
    """The encoder of a sequence-to-sequence model, with a linear head."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.encoder, self.head = base(kind, **options).get_encoder(), nn.Linear(16, CLASSES)

    def forward(self, **x: Tensor) -> Tensor:
        return self.head(self.encoder(**x)[0].mean(1))


def last_five(out: Any) -> Tensor:
    """Five entries of the last position."""
    return (out["logits"] if "logits" in out else out[0])[:, -1, :CLASSES]


def decoded(n: int) -> dict[str, Tensor]:
    return text()(n) | {"decoder_input_ids": torch.randint(3, VOCABULARY, (n, 4))}


def ending(n: int) -> dict[str, Tensor]:
    """Each sequence with exactly one end token, which BART's head looks for."""
    x = text(padded=False)(n)
    x["input_ids"][:, -1] = 2
    return x


PLAIN = text(padded=False)
SAMPLES = {
    "big_bird_sparse": text(24, padded=False),
    "layoutlm": text(bbox=lambda n: torch.randint(1, 8, (n, 7, 4)).cumsum(-1)),
    "nystromformer": text(8, padded=False),
    "longformer": text(8),
    "fnet": lambda n: {"input_ids": torch.randint(3, VOCABULARY, (n, 7))},
}
SWITCH = T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 16}
MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "conv_kernel": 3, "time_step_rank": 4}
OTHERS = [
    entry("t5", partial(seq2seq, "t5", **T5), decoded, last_five),
    entry("t5_gated", partial(seq2seq, "t5", feed_forward_proj="gated-gelu", **T5), decoded, last_five),
    entry("t5_encoder", partial(Encoder, "t5", **T5), text()),
    entry("bart", partial(classifier, "bart", SEQ2SEQ), ending),
    entry("bart_generation", partial(seq2seq, "bart", **SEQ2SEQ), decoded, last_five),
    entry("mbart_generation", partial(seq2seq, "mbart", **SEQ2SEQ), decoded, last_five),
    entry("pegasus_generation", partial(seq2seq, "pegasus", **SEQ2SEQ), decoded, last_five),
    entry("marian_generation", partial(seq2seq, "marian", **SEQ2SEQ), decoded, last_five),
    entry("switch_transformers", partial(seq2seq, "switch_transformers", **SWITCH), decoded, last_five),
    entry("bloom", partial(classifier, "bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2}), text()),
    entry("mamba", partial(base, "mamba", **MAMBA), PLAIN, last_five),
    entry(
        "mamba2", partial(base, "mamba2", **MAMBA, num_heads=4, head_dim=8, n_groups=1, chunk_size=4), PLAIN, last_five
    ),
]
# Products of experts that exist in 16 and 32 bits only; a pseudo-inverse that starts from the batch's maximum.
OPTIONS: dict[str, dict[str, Any]] = {"mixtral_grouped": {"cast": False}, "nystromformer": {"expected": "refused"}}
ENTRIES: list[Entry] = family(
    "transformers",
    [
        entry(f"hf_{name}", partial(classifier, kind, options), SAMPLES.get(name, text()), **OPTIONS.get(name, {}))
        for name, (kind, options) in CLASSIFIERS.items()
    ]
    + [entry("hf_" + e.name, e.make, e.sample, e.outputs) for e in OTHERS],
)
