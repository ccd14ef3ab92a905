"""Small models of transformers from a config, as users bring them, marked for stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import lockstep as ls

ATTENTION = {"*.q_proj": "heads", "*.k_proj": "heads", "*.v_proj": "heads", "*.o_proj": "row"}
LLAMA = ATTENTION | {
    "*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row",
    "*.embed_tokens": "vocabulary", "lm_head": "vocabulary",
}  # fmt: skip
GPT2_ENDS = {"transformer.wte": "vocabulary", "lm_head": "vocabulary"}
BERT = {
    "*.query": "heads", "*.key": "heads", "*.value": "heads",
    "*.intermediate.dense": "column", "*.output.dense": "row",
}  # fmt: skip
VIT = ATTENTION | {"*.fc1": "column", "*.fc2": "row"}


class Llama(ls.Task):
    """Next tokens of sentences of different lengths."""

    def build_model(self) -> nn.Module:
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
            )
        )  # fmt: skip
        return ls.nn.stages(ls.nn.shard(model, LLAMA), "model.layers")

    def dataset(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(len(split))
        num = {"train": 90, "val": 20, "test": 11}[split]
        lengths = torch.randint(5, 20, (num,), generator=generator).tolist()
        return [torch.randint(1, 96, (length,), generator=generator) for length in lengths]

    def collate(self, samples: Any) -> Any:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        logits, targets = model(input_ids=batch).logits[:, :-1].flatten(0, 1), batch[:, 1:]
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=0, reduction="sum")
        return ls.Loss(total, (targets != 0).sum())


class GPT2(Llama):
    """With dropout, and one weight for the embedding and the head."""

    def build_model(self) -> nn.Module:
        config = hf.GPT2Config(vocab_size=96, n_embd=64, n_layer=3, n_head=4, n_positions=32)
        model = ls.nn.shard(hf.GPT2LMHeadModel(config), GPT2_ENDS)
        return ls.nn.stages(model, "transformer.h")


class Bert(Llama):
    """With dropout, a tied weight, and a mask of words that are there."""

    def build_model(self) -> nn.Module:
        config = hf.BertConfig(
            vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, max_position_embeddings=32,
        )  # fmt: skip
        model = ls.nn.shard(hf.BertForMaskedLM(config), BERT)
        return ls.nn.stages(model, "bert.encoder.layer")

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        mask = batch != 0
        logits = model(input_ids=batch, attention_mask=mask).logits
        return ls.Loss(F.cross_entropy(logits[mask], batch[mask], reduction="sum"), mask.sum())


class ViT(Llama):
    """Begins with a convolution, and with a parameter that is no layer."""

    def build_model(self) -> nn.Module:
        config = hf.ViTConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            image_size=8, patch_size=4, num_channels=1, num_labels=10,
        )  # fmt: skip
        model = ls.nn.shard(hf.ViTForImageClassification(config), VIT)
        return ls.nn.stages(model, "vit.layers")

    def dataset(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(len(split))
        num = {"train": 90, "val": 20, "test": 11}[split]
        images = torch.randn(num, 1, 8, 8, generator=generator)
        return TensorDataset(images, torch.randint(10, (num,), generator=generator))

    def collate(self, samples: Any) -> Any:
        return default_collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        images, labels = batch
        logits = model(pixel_values=images).logits
        return ls.Loss(F.cross_entropy(logits, labels, reduction="sum"), len(labels))


class InUnits(GPT2):
    """In units that are found; the tied weight is used at both ends."""

    def build_model(self) -> nn.Module:
        config = hf.GPT2Config(vocab_size=96, n_embd=64, n_layer=3, n_head=4, n_positions=32)
        return ls.nn.units(hf.GPT2LMHeadModel(config))
