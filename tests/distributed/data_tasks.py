"""Trains on all kinds of data, one after the other, on the ranks it is started on.

Arguments: `whole`, `stop` or `resume`, a folder for run directories, and names of cases (all if
none is given). Rank 0 prints SHA-256s and metrics.
"""

import json
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep as ls
from lockstep.config import override
from lockstep.launching.api import Session, run
from lockstep.launching.rank.environment import detect

SIZE = 83
STOP = 6
CONFIG = ls.TrainConfig(batch_size=16, num_microbatches=4, steps=11, lr=0.05, eval_batch_size=8)


def samples(size=SIZE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 5, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


class Base(ls.Task):
    """Three classes of points; subclasses say where they come from."""

    def build_model(self):
        return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3))

    def dataset(self, split):
        return {"train": TensorDataset(*samples()), "val": TensorDataset(*samples(21, 1))}.get(
            split
        )

    def loss(self, model, batch):
        x, y = batch
        logits = model(x)
        correct = (logits.argmax(1) == y).sum()
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
        return ls.Loss(loss, len(y), {"accuracy": (correct, len(y))})


class Weighted(Base):
    def sample_weights(self):
        return 1.0 / torch.bincount(samples()[1]).double()[samples()[1]]


class Curriculum(Base):
    """Easy samples first; two of three samples an epoch."""

    def epoch_indices(self, epoch, generator):
        order = np.argsort(samples()[0][:, 0].abs().numpy())[::-1][: 2 * SIZE // 3]
        random.random()
        return generator.permutation(order) if epoch else order


class Aging(Dataset):
    """Gives other samples in each epoch, as the collate function does."""

    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x, y = samples()
        return x[index] * (1 + self.epoch) + 0.1 * torch.rand(5), y[index]


class AgingCollate:
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __call__(self, batch):
        xs, ys = zip(*batch, strict=True)
        return torch.stack(xs) - self.epoch, torch.stack(ys)


class Epochs(Base):
    def __init__(self, config=None):
        super().__init__(config)
        self.collate = AgingCollate()

    def dataset(self, split):
        return Aging() if split == "train" else super().dataset(split)


class Quiet(Dataset):
    """Draws in later epochs, for some samples, from each global generator in turn."""

    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x, y = samples()
        noise = 0.0
        if self.epoch and index % 5 == 0:
            draws = (random.random, np.random.standard_normal, lambda: torch.rand(()).item())
            noise = draws[index % 3]()
        return x[index] + noise, y[index], torch.tensor([index, self.epoch])


class Drawing(ls.Hook):
    """Draws after some steps: the next ones must not notice."""

    def after_step(self, run):
        if run.step % 3 == 2:
            random.gauss(0.0, 1.0), np.random.rand(run.step), torch.rand(run.step)


class LateDraws(Base):
    """Draws in later epochs only, and in some microbatches only, which differ in what they use."""

    def build_model(self):
        return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))

    def dataset(self, split):
        return Quiet() if split == "train" else super().dataset(split)

    def hooks(self):
        return [Drawing()]

    def loss(self, model, batch):
        factor = 1.0
        if len(batch) == 3 and batch[2][0, 1] > 0:
            first = int(batch[2][0, 0])
            if first % 4 == 0:
                factor += random.gauss(0.0, 1.0)
            elif first % 4 == 1:
                factor += np.random.standard_normal()
            elif first % 4 == 2:
                # Looks ahead: draws, and leaves the generators as they were.
                states = random.getstate(), np.random.get_state()
                factor += random.random() + np.random.rand()
                random.setstate(states[0])
                np.random.set_state(states[1])
        loss = super().loss(model, batch[:2])
        return ls.Loss(loss.sum * factor**2, loss.weight, loss.metrics)


class Shifted(Base):
    """Is also judged on shifted points."""

    splits = ("val", "val_shifted", "test_shifted")

    def dataset(self, split):
        if split.endswith("_shifted"):
            x, y = samples(30, 2)
            return TensorDataset(x + 0.5, y)
        return super().dataset(split)


class Plain(IterableDataset):
    """Draws from all global generators, and shuffles once a pass."""

    size = SIZE

    def __iter__(self):
        x, y = samples(self.size)
        order = list(range(self.size))
        random.shuffle(order)
        for i in order:
            yield x[i] + 0.1 * torch.rand(5) + 0.1 * np.random.rand(), y[i]


class Measured(Plain):
    def __len__(self):
        return self.size


class Drifting(Plain):
    """Passes are of other lengths."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.size = 37 + 11 * (epoch % 3)


class Seeking:
    """Passes over samples without making them, and counts what it has made."""

    def __iter__(self):
        return SeekingIterator()


class SeekingIterator:
    def __init__(self):
        self.position, (self.x, self.y) = 0, samples()

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == SIZE:
            raise StopIteration
        self.position += 1
        return self.x[self.position - 1] + 0.1 * torch.rand(5), self.y[self.position - 1]

    def skip(self, count):
        skipped = min(count, SIZE - self.position)
        self.position += skipped
        return skipped


class NotSeeking(Seeking):
    def __iter__(self):
        yield from SeekingIterator()


class Buffered(IterableDataset):
    """Shuffles with Python's global generator, through a buffer."""

    def __iter__(self):
        buffer = []
        for one in zip(*samples(), strict=True):
            buffer.append(one)
            if len(buffer) > 7:
                yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            x = torch.randn(5)
            yield x, (x[0] > 0).long()


class Sharded:
    """Has uneven parts; notes each sample that is made, by rank, in the folder `READS`."""

    def __init__(self, index=0, count=1):
        self.own = range(index, SIZE, count)[: 11 - index % 5]
        self.noted = "READS" in os.environ
        self.epoch = 0

    def shard(self, index, count):
        return type(self)(index, count)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def sample(self, position):
        x, y = samples()
        if self.noted:
            with (Path(os.environ["READS"]) / str(detect(os.environ).rank)).open("a") as file:
                file.write(f"{self.epoch} {self.own[position]}\n")
        i = self.own[position]
        return x[i] + self.epoch + 0.1 * torch.rand(5) + random.random(), y[i]

    def __iter__(self):
        for position in range(len(self.own)):
            yield self.sample(position)


class ShardedLength(Sharded):
    def __len__(self):
        return len(self.own)


class ShardedState(Sharded):
    """Goes on from its state; the iterator is the stream itself."""

    position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def __iter__(self):
        while self.position < len(self.own):
            self.position += 1
            yield self.sample(self.position - 1)
        self.position = 0


def hugging_face():
    import datasets

    x, y = samples()
    return datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})


def noisy(rows):
    noise = [random.random() + np.random.rand() + torch.rand(5) for _ in rows["x"]]
    x = [torch.tensor(x) + n for x, n in zip(rows["x"], noise, strict=True)]
    return {"x": x, "y": [torch.tensor(y) for y in rows["y"]]}


class HuggingFace(Base):
    def dataset(self, split):
        return self.train() if split == "train" else super().dataset(split)

    def train(self):
        return hugging_face().with_format("torch")

    def loss(self, model, batch):
        return super().loss(model, (batch["x"], batch["y"]) if isinstance(batch, dict) else batch)


class HuggingFaceRandom(HuggingFace):
    def train(self):
        return hugging_face().with_transform(noisy)


class HuggingFaceStream(HuggingFace):
    def train(self):
        stream = hugging_face().to_iterable_dataset(num_shards=4)
        return stream.shuffle(seed=3, buffer_size=7).with_format("torch")


class HuggingFaceParts(HuggingFace):
    def train(self):
        return hugging_face().to_iterable_dataset(num_shards=8).with_format("torch")


class LateIterator(SeekingIterator):
    def __next__(self):
        x, y = super().__next__()
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        return x + rank * (self.position > 40), y


class LateStream:
    """Is another one on other ranks, but not at the start."""

    def __iter__(self):
        yield from LateIterator()


class Late(Base):
    def dataset(self, split):
        return LateStream() if split == "train" else super().dataset(split)


class Slow(Base):
    """A stream that can only be read, for tests of losses."""

    def dataset(self, split):
        return NotSeeking() if split == "train" else super().dataset(split)


class InParts(Base):
    """A stream that goes on from its state, for tests of losses and of what ranks read."""

    def dataset(self, split):
        return ShardedState() if split == "train" else super().dataset(split)


def of(stream):
    """A task that trains on a stream, and is judged on another."""

    def dataset(self, split):
        return {"train": stream(), "val": NotSeeking()}.get(split)

    return type(stream.__name__ + "Task", (Base,), {"dataset": dataset})


CASES = {
    "plain": (Base, []),
    "hf": (HuggingFace, []),
    "hf-random": (HuggingFaceRandom, []),
    "hf-stream": (HuggingFaceStream, []),
    "drop-last": (Base, ["data.drop_last=true"]),
    "weights": (Weighted, []),
    "curriculum": (Curriculum, []),
    "epochs": (Epochs, []),
    "epochs-workers": (Epochs, ["data.num_workers=1"]),
    "late-draws": (LateDraws, []),
    "late-draws-workers": (LateDraws, ["data.num_workers=1"]),
    "stream": (of(Plain), []),
    "stream-length": (of(Measured), []),
    "stream-drifting": (of(Drifting), ["data.shuffle_buffer=10"]),
    "stream-seeking": (of(Seeking), []),
    "stream-not-seeking": (of(NotSeeking), []),
    "stream-seeking-shuffled": (of(Seeking), ["data.shuffle_buffer=25"]),
    "stream-not-seeking-shuffled": (of(NotSeeking), ["data.shuffle_buffer=25"]),
    "stream-buffered": (of(Buffered), []),
    "stream-endless": (of(Endless), ["checkpoint.every=2", "eval_every=4"]),
    "parts": (of(Sharded), ["data.stream_shards=8"]),
    "parts-length": (of(ShardedLength), ["data.stream_shards=8", "data.num_workers=1"]),
    "parts-state": (InParts, ["data.stream_shards=8", "data.num_workers=2"]),
    "parts-shuffled": (InParts, ["data.stream_shards=4", "data.shuffle_buffer=6"]),
    "parts-hf": (HuggingFaceParts, ["data.stream_shards=8"]),
    "splits": (Shifted, ["watch=val_shifted/accuracy", "watch_mode=max", "eval_every=2", "lr=0.3"]),
}


def main():
    mode, folder, *names = sys.argv[1:]
    environment = detect(os.environ)
    found = {}
    for name in names or CASES:
        kind, overrides = CASES[name]
        if mode == "stop":
            overrides = [*overrides, f"stop_at_step={STOP}"]
        config = override(CONFIG, overrides, name)
        run_dir = f"{environment.world_size}-{name}" if mode == "whole" else f"stopped-{name}"
        target = f"{Path(__file__).resolve()}:{kind.__name__}"
        session = Session(
            str(Path(folder) / run_dir), mode == "resume", console=False, target=target
        )
        finished = run(kind(config), config, session)
        found[name] = [finished.params_sha256, finished.step, finished.metrics]
    if environment.rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
