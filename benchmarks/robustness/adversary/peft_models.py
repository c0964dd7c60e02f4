"""peft: adapters on a small BERT, GPT-2, Llama and a convolutional net; they train, and the head where it is kept."""

from functools import partial
from typing import Any

import peft
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from benchmarks.robustness.adversary.entry import CLASSES, VOCABULARY, Entry, entry, family, images, text

SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": CLASSES}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**SMALL, **SIZES, max_position_embeddings=64))


def gpt2() -> nn.Module:
    return GPT2ForSequenceClassification(GPT2Config(**SMALL, n_embd=16, n_layer=2, n_head=2, n_positions=64))


def llama() -> nn.Module:
    return LlamaForSequenceClassification(LlamaConfig(**SMALL, **SIZES, num_key_value_heads=1))


def net() -> nn.Module:
    layers = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES)]
    return nn.Sequential(*layers)


def adapted(make: Any, kind: str, on: list[str] | str | None = None, **options: Any) -> Any:
    """A model with an adapter of this kind on the named layers."""
    targets = {"target_modules": on} if on else {}
    config = getattr(peft, kind + "Config")(**targets, **options)
    return peft.get_peft_model(make(), config)


def merged() -> nn.Module:
    """LoRA merged into its layer, and all parameters train again."""
    model = adapted(bert, "Lora", QV, r=2).merge_and_unload()
    return model.requires_grad_(True)


def two_adapters() -> nn.Module:
    """Two adapters, of which the second is the active one."""
    model = adapted(bert, "Lora", QV, r=2, task_type="SEQ_CLS")
    model.add_adapter("second", peft.LoraConfig(target_modules=QV, r=3, task_type="SEQ_CLS"))
    model.set_adapter("second")
    return model


def prompted(make: Any, kind: str, **options: Any) -> nn.Module:
    config = getattr(peft, kind + "Config")(task_type="SEQ_CLS", num_virtual_tokens=3, **options)
    return peft.get_peft_model(make(), config)


QV = ["query", "value"]
HEAD = {"task_type": "SEQ_CLS"}
MODELS: dict[str, Any] = {
    "lora": partial(adapted, bert, "Lora", QV, r=2, **HEAD),
    "lora_all": partial(adapted, llama, "Lora", "all-linear", r=2, **HEAD),
    "lora_gpt2": partial(adapted, gpt2, "Lora", ["c_attn"], r=2, fan_in_fan_out=True, **HEAD),
    "lora_embedding": partial(adapted, bert, "Lora", ["word_embeddings", "query"], r=2, **HEAD),
    "lora_bias": partial(adapted, bert, "Lora", QV, r=2, bias="all", use_rslora=True, **HEAD),
    "lora_merged": merged,
    "lora_two_adapters": two_adapters,
    "dora": partial(adapted, bert, "Lora", QV, r=2, use_dora=True, **HEAD),
    "ia3": partial(adapted, bert, "IA3", [*QV, "output.dense"], feedforward_modules=["output.dense"], **HEAD),
    "adalora": partial(adapted, bert, "AdaLora", QV, init_r=3, target_r=2, total_step=100, **HEAD),
    "loha": partial(adapted, bert, "LoHa", QV, r=2, **HEAD),
    "lokr": partial(adapted, bert, "LoKr", QV, r=2, **HEAD),
    "oft": partial(adapted, bert, "OFT", QV, oft_block_size=4, **HEAD),
    "boft": partial(adapted, bert, "BOFT", QV, boft_block_size=4, **HEAD),
    "vera": partial(adapted, bert, "Vera", QV, r=2, projection_prng_key=0, **HEAD),
    "fourierft": partial(adapted, bert, "FourierFT", QV, n_frequency=10, **HEAD),
    "layernorm_tuning": partial(adapted, bert, "LNTuning", ["LayerNorm"], **HEAD),
    "prompt_tuning": partial(prompted, gpt2, "PromptTuning"),
    "prefix_tuning": partial(prompted, bert, "PrefixTuning"),
    "p_tuning": partial(prompted, bert, "PromptEncoder", encoder_hidden_size=8),
}
CONVOLUTIONAL: dict[str, Any] = {
    "lora_conv": partial(adapted, net, "Lora", ["0", "2", "5"], r=2),
    "loha_conv": partial(adapted, net, "LoHa", ["0", "2"], r=2, use_effective_conv2d=True),
    "dora_conv": partial(adapted, net, "Lora", ["0", "2"], r=2, use_dora=True),
    "lokr_conv": partial(adapted, net, "LoKr", ["2", "5"], r=2, use_effective_conv2d=True),
}
ENTRIES: list[Entry] = family(
    "peft",
    [entry(f"peft_{name}", make, text()) for name, make in MODELS.items()]
    + [entry(f"peft_{name}", make, images(8)) for name, make in CONVOLUTIONAL.items()],
)
