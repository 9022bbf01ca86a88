"""The Hugging Face Trainer with HyTrain: a small ViT learns scikit-learn's handwritten digits.

python examples/hf_vit_digits.py            # half a minute on two cores
python examples/hf_vit_digits.py --small    # seconds
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from hytrain.integrations.transformers import adopt

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="a smaller model and fewer epochs")
small = parser.parse_args().small
width, depth, epochs = (64, 2, 3) if small else (96, 4, 15)

digits = load_digits()  # 1,797 images of 8 × 8 pixels with values from 0 to 16
pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
examples = [{"pixel_values": picture, "labels": label} for picture, label in zip(pictures, digits.target)]
training, validation = train_test_split(examples, test_size=360, random_state=0)


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


torch.manual_seed(0)
model = ViTForImageClassification(
    ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_labels=10,
    )
)
args = TrainingArguments(
    "runs/hf_vit_digits",
    num_train_epochs=epochs,
    per_device_train_batch_size=32,
    learning_rate=2e-3,
    warmup_steps=20,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model, args, train_dataset=training, eval_dataset=validation, compute_metrics=accuracy)
opt = adopt(trainer)  # the only new line
trainer.train()

for record in trainer.state.log_history:
    if "eval_accuracy" in record:
        print("epoch {epoch:.0f}: validation loss {eval_loss:.4f}, accuracy {eval_accuracy:.1%}".format(**record))
