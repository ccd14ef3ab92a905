"""A Hugging Face model, dataset and collator, as a Trainer takes them, in ten lines of Task."""

from typing import Any

import datasets
import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification, default_data_collator

import lockstep as ls

MODEL = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=32,
    num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
)  # fmt: skip
MODEL.num_labels = 10
images, digits = map(torch.tensor, load_digits(return_X_y=True))
rows = datasets.Dataset.from_dict(
    {"pixel_values": (images.float() / 16).view(-1, 1, 8, 8).numpy(), "labels": digits.numpy()}
).with_format("numpy")
PARTS = {"train": range(1400), "val": range(1400, 1797)}


class Vit(ls.Task):
    def build_model(self) -> ViTForImageClassification:
        return ViTForImageClassification(MODEL)

    def dataset(self, split: str) -> Any:
        return rows.select(PARTS[split]) if split in PARTS else None

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        return dict(default_data_collator(samples))

    def loss(self, model: ViTForImageClassification, batch: dict[str, Any]) -> ls.Loss:
        output, count = model(**batch), len(batch["labels"])
        correct = (output.logits.argmax(-1) == batch["labels"]).sum()
        return ls.Loss.mean(output.loss, count, {"accuracy": (correct, count)})


if __name__ == "__main__":
    ls.main(Vit(), ls.TrainConfig(batch_size=64, num_microbatches=4, epochs=10, lr=3e-3))
