"""Images of CIFAR's kind: what is made of them, and the network that learns them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import result
from tests.data.idx_files import write_idx
from tests.data.test_cifar import cifar

from lockstep.errors import ConfigError, DataError
from lockstep.systems.cifar.task import Cifar, CifarConfig, ResidualNetwork, augmented


def by_hand(image: torch.Tensor, mirrored: bool, down: int, right: int, shift: int) -> torch.Tensor:
    """One image, pixel by pixel."""
    height, width = image.shape[1:]
    moved = torch.zeros_like(image)
    for y in range(height):
        for x in range(width):
            at = width - 1 - x if mirrored else x
            row, column = y + down - shift, at + right - shift
            if 0 <= row < height and 0 <= column < width:
                moved[:, y, x] = image[:, row, column]
    return moved


@pytest.mark.parametrize("shift", [0, 2, 5])
def test_images_are_mirrored_and_moved(shift: int) -> None:
    images = torch.randn(12, 3, 5, 4)
    found = augmented(images, shift, torch.Generator().manual_seed(3))
    draws = torch.Generator().manual_seed(3)
    mirrored = torch.rand(12, generator=draws) < 0.5
    down, right = torch.randint(0, 2 * shift + 1, (2, 12, 1), generator=draws)[..., 0]
    for n in range(12):
        wanted = by_hand(images[n], bool(mirrored[n]), int(down[n]), int(right[n]), shift)
        assert torch.equal(found[n], wanted)
    assert found.is_contiguous()
    assert mirrored.any()
    assert not mirrored.all()


@pytest.mark.parametrize("depth", [8, 20, 56])
def test_the_network_is_as_deep_as_it_says(depth: int) -> None:
    model = ResidualNetwork(3, 4, depth, 10)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    around = [m for m in convolutions if m.kernel_size == (1, 1)]
    assert len(convolutions) - len(around) + 1 == depth
    assert len(around) == 2
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert model(torch.randn(2, 3, 9, 7)).shape == (2, 10)


def test_the_published_size() -> None:
    """ResNet-20 has 0.27 million parameters (table 6), here with 1x1 convolutions on the way."""
    count = sum(p.numel() for p in ResidualNetwork(3, 16, 20, 10).parameters())
    assert count == 272_474


def fashion(folder: Path, count: int = 60) -> Path:
    """Files as Fashion-MNIST's; a bright stripe tells the label, mirrored or not."""
    random = torch.Generator().manual_seed(1)
    for prefix, number in (("train", count), ("t10k", 20)):
        labels = torch.arange(number) % 4
        images = torch.randint(0, 60, (number, 12, 12), generator=random)
        for n, label in enumerate(labels.tolist()):
            images[n, 3 * label : 3 * label + 3] += 180
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images.to(torch.uint8))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels.to(torch.uint8))
    return folder


def test_files_of_both_kinds_are_read(tmp_path: Path) -> None:
    (tmp_path / "grey").mkdir()
    grey = Cifar(CifarConfig(data_dir=fashion(tmp_path / "grey"), depth=8))
    assert grey.dataset("train").tensors[0].shape == (54, 1, 12, 12)
    colour = Cifar(CifarConfig(data_dir=cifar(tmp_path, 4), depth=8))
    assert colour.dataset("train").tensors[0].shape == (18, 3, 32, 32)
    assert colour.dataset("val").tensors[0].shape == (2, 3, 32, 32)
    assert len(colour.dataset("test")) == 4
    assert colour.dataset("other") is None


@pytest.mark.parametrize("classes", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_the_command_learns_files_of_cifar(here: Any, tmp_path: Path, classes: int) -> None:
    """A band of one colour tells the label, of four; those of a hundred have a coarse one too."""
    random = torch.Generator().manual_seed(1)
    names = ["train.bin", "test.bin"]
    if classes == 10:
        names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    for name in names:
        content = b""
        for n in range(60 if name == "train.bin" else 12):
            image = torch.randint(0, 60, (3, 32, 32), generator=random)
            image[n % 3, 8 * (n % 4) : 8 * (n % 4) + 8] += 180
            labels = [n % 4] if classes == 10 else [19, n % 4]
            content += bytes([*labels, *image.flatten().tolist()])
        (tmp_path / name).write_bytes(content)
    keys = ("depth=8", "width=4", "batch_size=16", "num_microbatches=1", "steps=16", "shift=1",
            "lr=0.1", "schedule.warmup_steps=2", "eval_every=16")  # fmt: skip
    done = here("train", "cifar", f"data_dir={tmp_path}", *keys, "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["metrics"]["test/accuracy"] > 0.5


def test_images_are_augmented_in_training_only(tmp_path: Path) -> None:
    task = Cifar(CifarConfig(data_dir=fashion(tmp_path), depth=8))
    model, seen = task.build_model(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    batch = task.dataset("train")[:6]
    for is_training in (True, False, False):
        model.train(is_training)
        task.loss(model, batch)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])
    pixels = task.dataset("train").tensors[0].float()
    assert torch.allclose(seen[1], (batch[0] - pixels.mean()) / pixels.std(correction=0), atol=1e-5)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data_dir: is needed"):
        Cifar(CifarConfig()).dataset("train")
    with pytest.raises(DataError, match="t10k-images"):
        Cifar(CifarConfig(data_dir=tmp_path)).dataset("train")
    write_idx(tmp_path / "t10k-images-idx3-ubyte", torch.zeros(9, 4, 4, dtype=torch.uint8))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", torch.zeros(9, dtype=torch.uint8))
    task = Cifar(CifarConfig(data_dir=tmp_path, depth=8))
    with pytest.raises(DataError, match="is constant"):
        task.loss(task.build_model(), task.dataset("train")[:2])


@pytest.mark.slow
def test_ranks_give_the_bits_of_one_process_and_learn(lockstep, tmp_path: Path) -> None:
    keys = [f"data_dir={fashion(tmp_path)}", "depth=8", "width=4", "batch_size=20", "epochs=12",
            "shift=1", "schedule.warmup_steps=4"]  # fmt: skip
    hashes = set()
    for ranks in ("1", "3"):
        run_dir = tmp_path / ranks
        done = lockstep("train", "cifar", "-n", ranks, "--run-dir", run_dir, *keys)
        assert done.returncode == 0, done.stderr
        hashes.add(result(run_dir)["params_sha256"])
        assert result(run_dir)["metrics"]["train/accuracy"] > 0.5
    assert len(hashes) == 1
