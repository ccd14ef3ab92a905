"""Twenty LightningModules as people write them, each with its data."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import lightning as L

NUM = 56  # of samples: the last batch of 16 is smaller
WHOLE = 48  # where a smaller batch would be cut into other microbatches than Lightning's
BATCH = 16


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(count=NUM, classes=3, seed=1):
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def loader(*tensors):
    return DataLoader(TensorDataset(*tensors), batch_size=BATCH)


class Classified(L.LightningModule):
    """Data of a classifier with three classes."""

    def train_dataloader(self):
        return loader(numbers(NUM, 8), labels())

    def val_dataloader(self):
        return loader(numbers(40, 8, seed=2), labels(40, seed=3))


class MLP(Classified):
    def __init__(self, hidden: int = 16, lr: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro")
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_acc, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class CNN(L.LightningModule):
    """Computes its metric when the epoch ends, and keeps the best, as many templates do.

    Its hooks set attributes that `__init__` does not.
    """

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 16, 3),
        )  # fmt: skip
        self.val_acc = torchmetrics.classification.MulticlassAccuracy(3)
        self.best = torchmetrics.MaxMetric()
        self.best_so_far = 0.0

    def on_train_start(self):
        self.scale = torch.tensor(2.0)
        self.log("scale", self.scale)

    def on_train_epoch_start(self):
        self.smoothing = 0.2 / (1 + self.current_epoch)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.scale * F.cross_entropy(self.net(x), y, label_smoothing=self.smoothing)
        self.log("train/loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.val_acc(logits, y)
        self.log("val/loss", F.cross_entropy(logits, y))

    def on_validation_epoch_end(self):
        acc = self.val_acc.compute()
        self.best(acc)
        self.best_so_far = max(self.best_so_far, float(acc))
        self.log("val/acc", acc)
        self.log("val/best", self.best.compute())
        self.log("val/best_so_far", self.best_so_far)
        self.val_acc.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return loader(numbers(WHOLE, 1, 8, 8), labels(WHOLE))

    def val_dataloader(self):
        return loader(numbers(40, 1, 8, 8, seed=2), labels(40, seed=3))


class Points(L.LightningDataModule):
    def __init__(self, size: int = 12, batch_size: int = BATCH):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        assert self.hparams.size > 0

    def setup(self, stage):
        everything = TensorDataset(numbers(NUM + 40, self.hparams.size))
        if stage == "fit":
            generator = torch.Generator().manual_seed(0)
            self.train, self.val = random_split(everything, [NUM, 40], generator=generator)
        if stage == "test":
            self.held_out = TensorDataset(numbers(24, self.hparams.size, seed=7))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.held_out, batch_size=self.hparams.batch_size)


class Autoencoder(L.LightningModule):
    def __init__(self, code: int = 4):
        super().__init__()
        self.code = code

    def setup(self, stage):
        size = self.trainer.datamodule.hparams.size
        self.encoder = nn.Sequential(nn.Linear(size, 8), nn.GELU(), nn.Linear(8, self.code))
        self.decoder = nn.Sequential(nn.Linear(self.code, 8), nn.GELU(), nn.Linear(8, size))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch):
        (x,) = batch
        return F.mse_loss(self(x), x)

    def validation_step(self, batch, _):
        (x,) = batch
        loss = F.mse_loss(self(x), x)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch):
        (x,) = batch
        self.log("test_loss", F.mse_loss(self(x), x))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Unsupervised(L.LightningModule):
    def train_dataloader(self):
        return loader(numbers(NUM, 12))

    def val_dataloader(self):
        return loader(numbers(40, 12, seed=2))


class VAE(Unsupervised):
    def __init__(self, noise: float = 1.0):
        super().__init__()
        self.noise = noise
        self.encoder = nn.Linear(12, 8)
        self.decoder = nn.Linear(4, 12)

    def losses(self, x):
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        z = mean + self.noise * torch.randn_like(mean) * (log_var / 2).exp()
        fit = F.mse_loss(self.decoder(z), x, reduction="none").sum(1).mean()
        kl = (-0.5 * (1 + log_var - mean**2 - log_var.exp())).sum(1).mean()
        return {"fit": fit, "kl": kl, "elbo": fit + 0.1 * kl}

    def training_step(self, batch, batch_idx):
        losses = self.losses(*batch)
        self.log_dict({f"train/{k}": v for k, v in losses.items()}, on_step=False, on_epoch=True)
        return losses["elbo"]

    def validation_step(self, batch, batch_idx):
        losses = self.losses(*batch)
        self.log_dict({f"val/{k}": v for k, v in losses.items()})
        return losses["elbo"]

    def configure_optimizers(self):
        return {"optimizer": torch.optim.Adam(self.parameters(), lr=0.01)}


class UNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.middle(skip))], dim=1))

    def training_step(self, batch, batch_idx):
        loss = F.binary_cross_entropy_with_logits(self(batch["image"]), batch["mask"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch["image"])
        self.log("val_loss", F.binary_cross_entropy_with_logits(logits, batch["mask"]))
        self.log("val_iou", ((logits > 0) == (batch["mask"] > 0)).float().mean(), on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(self.parameters(), lr=0.001)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self):
        return DataLoader(Masks(NUM, 0), batch_size=BATCH)

    def val_dataloader(self):
        return DataLoader(Masks(24, 1), batch_size=BATCH)


class Masks(Dataset):
    def __init__(self, count, seed):
        self.images = numbers(count, 1, 8, 8, seed=seed)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return {"image": image, "mask": (image > 0.5).float(), "name": f"image {index}"}


class GAN(Unsupervised):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 12), nn.Linear(12, 1)

    def training_step(self, batch, batch_idx):
        g, d = self.optimizers()
        for optimizer, sign in ((d, 1), (g, -1)):
            optimizer.zero_grad()
            fake = self.generator(torch.randn(len(batch[0]), 4))
            self.manual_backward(sign * (self.critic(fake) - self.critic(batch[0])).mean())
            optimizer.step()

    def configure_optimizers(self):
        parts = (self.generator, self.critic)
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in parts], []


class Texts(L.LightningModule):
    """Token ids, masks and labels, as a tokenizer would give them."""

    def batches(self, count, seed):
        ids = torch.randint(1, 50, (count, 12), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[::3, 8:] = 0
        rows = [
            {"input_ids": i, "attention_mask": m, "labels": i.sum() % 2}
            for i, m in zip(ids, mask, strict=True)
        ]
        return DataLoader(rows, batch_size=BATCH)

    def train_dataloader(self):
        return self.batches(NUM, 0)

    def val_dataloader(self):
        return self.batches(24, 1)


class Bert(Texts):
    def __init__(self):
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = BertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        loss = self.bert(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        output = self.bert(**batch)
        self.log("val_loss", output.loss)
        self.log("val_acc", (output.logits.argmax(1) == batch["labels"]).float().mean())

    def configure_optimizers(self):
        from transformers import get_linear_schedule_with_warmup

        decayed = [p for p in self.parameters() if p.dim() > 1]
        plain = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_linear_schedule_with_warmup(optimizer, 2, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


class GPT(L.LightningModule):
    """The loss is a mean over tokens, whose number is given to `log`."""

    def __init__(self, width=16, vocabulary=20, length=10):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def nll(self, batch):
        (tokens,) = batch
        x = self.embed(tokens[:, :-1]) + self.place
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.head(self.block(x, src_mask=causal, is_causal=True))
        targets = tokens[:, 1:]
        kept = targets != 0
        return F.cross_entropy(logits[kept], targets[kept]), int(kept.sum())

    def training_step(self, batch, batch_idx):
        loss, count = self.nll(batch)
        self.log("train_loss", loss, batch_size=count)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, count = self.nll(batch)
        self.log("val_loss", loss, batch_size=count)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.95))

    def tokens(self, count, seed):
        return torch.randint(20, (count, 11), generator=torch.Generator().manual_seed(seed))

    def train_dataloader(self):
        return loader(self.tokens(NUM, 0))

    def val_dataloader(self):
        return loader(self.tokens(24, 1))


class RNN(L.LightningModule):
    def __init__(self, hidden: int = 8):
        super().__init__()
        self.lstm = nn.LSTM(3, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)
        self.example_input_array = torch.zeros(1, 6, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.smooth_l1_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": F.smooth_l1_loss(self(x), y)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def series(self, count, seed):
        x = numbers(count, 6, 3, seed=seed)
        return loader(x, x.sum((1, 2), keepdim=False)[:, None])

    def train_dataloader(self):
        return self.series(NUM, 0)

    def val_dataloader(self):
        return self.series(24, 1)


class GNN(L.LightningModule):
    """Graphs of six nodes with dense adjacency."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 3)
        self.degrees = torchmetrics.MeanMetric()

    def forward(self, nodes, edges):
        for layer in self.layers:
            nodes = torch.relu(layer(edges @ nodes) / edges.sum(-1, keepdim=True).clamp(min=1))
        return self.head(nodes.mean(1))

    def training_step(self, batch, batch_idx):
        nodes, edges, y = batch
        loss = F.cross_entropy(self(nodes, edges), y)
        self.log("train_loss", loss, batch_size=len(y))
        return loss

    def validation_step(self, batch, batch_idx):
        nodes, edges, y = batch
        self.degrees(edges.sum(-1))
        self.log("val_degree", self.degrees)
        self.log("val_loss", F.cross_entropy(self(nodes, edges), y), batch_size=len(y))

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)

    def graphs(self, count, seed):
        edges = (numbers(count, 6, 6, seed=seed) > 0).float()
        return loader(numbers(count, 6, 5, seed=seed + 1), edges, labels(count, seed=seed + 2))

    def train_dataloader(self):
        return self.graphs(NUM, 0)

    def val_dataloader(self):
        return self.graphs(24, 5)


class SimCLR(L.LightningModule):
    """Its loss compares the samples of a microbatch with one another."""

    def __init__(self, noise: float = 0.1):
        super().__init__()
        self.noise = noise
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        views = (x, x.flip(1) + self.noise * torch.randn_like(x))
        one, two = (F.normalize(self.encoder(v), dim=1) for v in views)
        loss = F.cross_entropy(one @ two.T / 0.5, torch.arange(len(x), device=self.device))
        self.log("train_loss", loss)
        return loss

    def train_dataloader(self):
        return loader(numbers(WHOLE, 12))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Distilled(Classified):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(8, 3)
        self.teacher = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        self.teacher.requires_grad_(False)
        self.teacher.eval()

    def training_step(self, batch, batch_idx):
        x, y = batch
        assert not self.teacher.training
        with torch.no_grad():
            target = F.log_softmax(self.teacher(x), dim=1)
        logits = self.student(x)
        kl = F.kl_div(F.log_softmax(logits, 1), target, reduction="batchmean", log_target=True)
        hard = F.cross_entropy(logits, y)
        self.log_dict({"kl": kl, "hard": hard})
        return kl + hard

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.student(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)


class EMA(Classified):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.slow(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Mixup(Classified):
    def __init__(self, alpha: float = 0.4):
        super().__init__()
        self.alpha = alpha
        self.net = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        share, order = 1.0, torch.arange(len(x))
        if self.alpha:
            share = float(torch.distributions.Beta(self.alpha, self.alpha).sample())
            order = torch.randperm(len(x))
        logits = self.net(share * x + (1 - share) * x[order])
        pair = F.cross_entropy(logits, y), F.cross_entropy(logits, y[order])
        return share * pair[0] + (1 - share) * pair[1]

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        return {"optimizer": optimizer, "lr_scheduler": cosine}


class MultiTask(L.LightningModule):
    """The weight of its second loss grows from epoch to epoch, in a hook."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleDict({"class": nn.Linear(8, 3), "value": nn.Linear(8, 1)})
        self.share = 0.0

    def on_train_epoch_start(self):
        self.share = min(1.0, 0.5 * self.current_epoch)

    def losses(self, batch):
        x, y, v = batch
        h = torch.relu(self.trunk(x))
        return F.cross_entropy(self.heads["class"](h), y), F.mse_loss(
            self.heads["value"](h)[:, 0], v
        )

    def training_step(self, batch, batch_idx):
        of_class, of_value = self.losses(batch)
        self.log("train_class", of_class)
        self.log("train_value", of_value, on_epoch=True)
        return of_class + self.share * of_value

    def on_train_epoch_end(self):
        self.log("share", self.share)

    def validation_step(self, batch, batch_idx):
        of_class, of_value = self.losses(batch)
        self.log_dict({"val_class": of_class, "val_value": of_value})
        return of_class + of_value

    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return loader(numbers(NUM, 8), labels(), numbers(NUM, seed=4))

    def val_dataloader(self):
        return loader(numbers(24, 8, seed=5), labels(24, seed=6), numbers(24, seed=7))


class Plateau(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }

    def train_dataloader(self):
        return loader(numbers(NUM, 8), numbers(NUM, 1, seed=4))

    def val_dataloader(self):
        return loader(numbers(24, 8, seed=5), numbers(24, 1, seed=6))


class OneCycle(Plateau):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.2, total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Quasi(Plateau):
    """Steps by a closure, on the whole data at a time."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    def train_dataloader(self):
        return DataLoader(super().train_dataloader().dataset, batch_size=NUM)


class Measured(Classified):
    """A collection of metrics, and a test."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)
        made = torchmetrics.MetricCollection(
            {
                "f1": torchmetrics.classification.MulticlassF1Score(3),
                "auroc": torchmetrics.classification.MulticlassAUROC(3),
            }
        )
        self.val_metrics, self.test_metrics = made.clone(prefix="val_"), made.clone(prefix="test_")

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_metrics.update(self.net(x), y)
        self.log_dict(self.val_metrics)
        return F.cross_entropy(self.net(x), y)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.test_metrics.update(self.net(x), y)
        self.log_dict(self.test_metrics)
        self.log("test_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def test_dataloader(self):
        return loader(numbers(40, 8, seed=8), labels(40, seed=9))


class Domains(Classified):
    """Two validation sets, batches that are changed as they move, and a collate function."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x / 2, y

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        if batch_idx == 0:
            self.log("at_start", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx):
        x, y = batch
        self.log("loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def val_dataloader(self):
        return [loader(numbers(40, 8, seed=s), labels(40, seed=s + 1)) for s in (10, 20)]


ALIKE = (
    MLP, Autoencoder, UNet, Bert, GPT, RNN, GNN, Distilled, EMA, MultiTask, Plateau, OneCycle,
    Measured, Domains, Quasi,
)  # fmt: skip
"""Those whose loss is a mean over samples: microbatches change nothing but rounding."""
BY_MICROBATCH = (CNN, SimCLR)
"""Those whose loss depends on which samples share a microbatch."""
RANDOM = (VAE, Mixup)
"""Those that draw random numbers, which Lightning draws otherwise."""
REFUSED = (GAN,)
