from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.idx_files import write_idx
from torch import nn

from lockstep import config as config_module
from lockstep.data.images import mean_and_deviation
from lockstep.errors import ConfigError, DataError
from lockstep.launching.systems import load_recipe, recipe_names, summary
from lockstep.systems.digits.task import (
    Digits,
    DigitsConfig,
    Labelled,
    embedded_digits,
    hold_out,
)

SPLITS = ("train", "val", "test")
MODELS = ("mlp", "cnn")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def digits(**keys: Any) -> Digits:
    return Digits(DigitsConfig(**keys))


def tensors(task: Digits, split: str) -> tuple[torch.Tensor, ...]:
    dataset = task.dataset(split)
    assert dataset is not None
    return dataset.tensors


def save(folder: Path, prefix: str, count: int, size: tuple[int, int] = (6, 5)) -> Path:
    """Images that all differ, five classes."""
    images = torch.arange(count * size[0] * size[1]).reshape(count, *size) * 7 % 251
    write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images.to(torch.uint8))
    write_idx(folder / f"{prefix}-labels-idx1-ubyte", torch.arange(count).to(torch.uint8) % 5)
    return folder


def train_by_hand(task: Digits) -> float:
    """Test accuracy after a plain loop with the config's defaults, microbatches included."""
    config = task.config
    torch.manual_seed(0)
    model = task.build_model()
    images, labels = tensors(task, "train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0)
    num_steps = config.epochs * -(-len(labels) // config.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, num_steps)
    for _ in range(config.epochs):
        for rows in torch.randperm(len(labels)).split(config.batch_size):
            optimizer.zero_grad()
            for part in rows.tensor_split(config.num_microbatches):
                loss = task.loss(model, (images[part], labels[part]))
                (loss.sum / len(rows)).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    return float(task.evaluate(model, tensors(task, "test")).metrics["accuracy"][0]) / 180


@pytest.mark.parametrize(
    "model", [m if m == "mlp" else pytest.param(m, marks=pytest.mark.slow) for m in MODELS]
)
def test_half_the_default_epochs_reach_97_percent(model: str) -> None:
    epochs = DigitsConfig().epochs // 2
    assert train_by_hand(digits(model=model, epochs=epochs)) >= 0.97


@pytest.mark.parametrize("is_file", [True, False])
def test_the_embedded_images_are_those_of_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, is_file: bool
) -> None:
    from sklearn.datasets import load_digits

    monkeypatch.setattr(Path, "is_file", lambda _: is_file)
    images, labels = embedded_digits()
    expected = load_digits()
    assert torch.equal(images, torch.from_numpy(expected.images).to(torch.uint8))
    assert torch.equal(labels, torch.from_numpy(expected.target).long())


def test_the_embedded_images_are_all_used_once() -> None:
    task = digits()
    sizes = {split: len(tensors(task, split)[1]) for split in SPLITS}
    assert sizes == {"train": 1437, "val": 180, "test": 180}
    rows = torch.cat([tensors(task, split)[0] for split in SPLITS])
    assert len(rows.unique(dim=0)) == 1797


def test_images_and_labels_have_the_promised_form() -> None:
    images, labels = tensors(digits(), "val")
    assert (images.shape, labels.shape) == ((180, 1, 8, 8), (180,))
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)


def test_statistics_come_from_training_images_only() -> None:
    task = digits()
    train, test = tensors(task, "train")[0], tensors(task, "test")[0]
    assert (train.mean().item(), train.std().item()) == pytest.approx((0, 1), abs=1e-5)
    assert abs(test.mean().item()) > 1e-4


def test_statistics_do_not_depend_on_the_number_of_threads() -> None:
    pixels = torch.arange(300_000).square().fmod(251).to(torch.uint8)
    found = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.add(mean_and_deviation(pixels))
    assert len(found) == 1
    assert found.pop() == pytest.approx((pixels.numpy().mean(), pixels.numpy().std()))


def test_there_is_no_other_split() -> None:
    assert digits().dataset("validation") is None


def test_splits_do_not_depend_on_the_seed_nor_on_random_state() -> None:
    first = tensors(digits(seed=0), "test")[0]
    torch.manual_seed(99)
    assert torch.equal(first, tensors(digits(seed=7), "test")[0])


def test_making_splits_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    digits().dataset("train")
    assert torch.equal(before, torch.get_rng_state())


def labelled(*counts: int) -> Labelled:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return torch.arange(len(labels)).view(-1, 1, 1), labels


def test_every_class_is_held_out_in_proportion() -> None:
    splits = hold_out({"train": labelled(100, 50, 200)}, val=0.1, test=0.2)
    counts = {name: labels.bincount().tolist() for name, (_, labels) in splits.items()}
    for name, fraction in (("val", 0.1), ("test", 0.2)):
        wanted = [fraction * count for count in (100, 50, 200)]
        assert sum(counts[name]) == round(sum(wanted))
        assert counts[name] == pytest.approx(wanted, abs=1)


@pytest.mark.parametrize(("val", "test"), [(0.1, 0.1), (0.49, 0.49), (0.0, 0.3), (0.001, 0.0)])
def test_held_out_rows_are_disjoint_and_keep_their_labels(val: float, test: float) -> None:
    images, labels = labelled(17, 3, 40)
    splits = hold_out({"train": (images, labels)}, val, test)
    rows = torch.cat([split[0].flatten() for split in splits.values()])
    assert rows.sort().values.tolist() == list(range(60))
    assert ("val" in splits, "test" in splits) == (val > 0, test > 0)
    for part_images, part_labels in splits.values():
        assert torch.equal(labels[part_images.flatten()], part_labels)


def test_a_given_test_set_is_left_whole() -> None:
    given = {"train": labelled(50, 50), "test": labelled(3, 2)}
    splits = hold_out(given, val=0.1, test=0.1)
    assert [len(splits[name][1]) for name in SPLITS] == [90, 10, 5]


def test_too_few_images_to_hold_any_out() -> None:
    with pytest.raises(DataError, match=r"2 labelled images are too few .* 1 for val and 1 for"):
        hold_out({"train": labelled(2)}, val=0.1, test=0.1)


def test_train_and_t10k_files_are_train_val_and_test(tmp_path: Path) -> None:
    save(save(tmp_path, "train", 60), "t10k", 20)
    task = digits(data_dir=tmp_path, val_fraction=0.25)
    assert [len(tensors(task, split)[1]) for split in SPLITS] == [45, 15, 20]
    assert tensors(task, "test")[1].tolist() == [0, 1, 2, 3, 4] * 4


def test_t10k_alone_is_split(tmp_path: Path) -> None:
    task = digits(data_dir=save(tmp_path, "t10k", 50))
    assert [len(tensors(task, split)[1]) for split in SPLITS] == [40, 5, 5]


def test_a_missing_dataset_is_an_error_not_other_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"^{tmp_path}: none of t10k-images.*holds nothing"):
        digits(data_dir=tmp_path).dataset("train")
    with pytest.raises(DataError, match="there is no such folder"):
        digits(data_dir=tmp_path / "none").build_model()


@pytest.mark.parametrize("lost", ["train-labels-idx1-ubyte", "t10k-images-idx3-ubyte.gz"])
def test_half_a_dataset_is_an_error(tmp_path: Path, lost: str) -> None:
    save(save(tmp_path, "train", 60), "t10k", 20)
    (tmp_path / lost).unlink()
    with pytest.raises(DataError, match=f"none of {lost.removesuffix('.gz')}, "):
        digits(data_dir=tmp_path).dataset("train")


def test_train_and_test_images_of_different_size(tmp_path: Path) -> None:
    save(save(tmp_path, "train", 60), "t10k", 20, size=(5, 6))
    with pytest.raises(DataError, match="train and t10k images differ in size: 6x5 and 5x6"):
        digits(data_dir=tmp_path).dataset("train")


def test_blank_images_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, "t10k", 50)
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", torch.full((50, 6, 5), 9).to(torch.uint8))
    with pytest.raises(DataError, match=f"data_dir={tmp_path}: all training pixels are 9"):
        digits(data_dir=tmp_path).dataset("train")


def test_a_home_directory_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(save(tmp_path, "t10k", 50)))
    assert len(tensors(digits(data_dir="~"), "train")[1]) == 40


def test_without_scikit_learn_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r'pip install "lockstep-train\[recipes\]"'):
        digits().dataset("train")
    assert digits(data_dir=save(tmp_path, "t10k", 50)).dataset("train") is not None


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [(28, 28), (6, 5), (1, 1)])
def test_models_fit_the_images_and_classes(
    tmp_path: Path, model: str, size: tuple[int, int]
) -> None:
    task = digits(model=model, data_dir=save(tmp_path, "t10k", 50, size))
    network, batch = task.build_model(), tensors(task, "val")
    assert network(batch[0]).shape == (5, 5)
    task.loss(network, batch).sum.backward()
    assert all(p.grad is not None for p in network.parameters())


def test_the_mlp_is_the_one_asked_for() -> None:
    shapes = [tuple(p.shape) for p in digits(hidden=512).build_model().parameters()]
    assert shapes == [(512, 64), (512,), (10, 512), (10,)]
    assert any(isinstance(m, nn.BatchNorm2d) for m in digits(model="cnn").build_model().modules())


def test_a_loss_is_a_sum_with_its_weight() -> None:
    task = digits(dropout=0.0)
    model = task.build_model()
    images, labels = tensors(task, "val")
    whole = task.loss(model, (images, labels))
    batches = zip(images.split(70), labels.split(70), strict=True)
    parts = [task.loss(model, batch) for batch in batches]
    assert sum(float(part.sum.detach()) for part in parts) == pytest.approx(whole.sum.item(), 1e-5)
    assert sum(part.weight for part in parts) == whole.weight == 180
    expected = (model(images).argmax(1) == labels).sum()
    assert whole.metrics["accuracy"] == (expected, 180)
    assert not whole.metrics["accuracy"][0].requires_grad


UNUSABLE = [("model", "vit"), ("dropout", 1.0), ("dropout", -0.1), ("hidden", 0)]
UNUSABLE += [("val_fraction", 0.5), ("test_fraction", -0.1), ("dataset_dir", "x")]


@pytest.mark.parametrize(("key", "value"), UNUSABLE)
def test_unusable_keys_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^test: .*{key}"):
        config_module.build(DigitsConfig, {key: value}, "test")


def test_the_config_survives_yaml_with_a_path(tmp_path: Path) -> None:
    config = DigitsConfig(data_dir=tmp_path, model="cnn")
    text = config.to_yaml()
    assert f"data_dir: {tmp_path}\n" in text
    (tmp_path / "config.yaml").write_text(text)
    assert config_module.load(DigitsConfig, tmp_path / "config.yaml") == config


def test_the_hash_follows_the_model_but_not_where_the_data_is(tmp_path: Path) -> None:
    assert DigitsConfig(data_dir=tmp_path).hash == DigitsConfig().hash
    assert DigitsConfig(model="cnn").hash != DigitsConfig().hash
    assert DigitsConfig(val_fraction=0.2).hash != DigitsConfig().hash


def test_every_recipe_loads_and_has_a_summary() -> None:
    assert "digits" in recipe_names()
    assert load_recipe("digits") is Digits
    for name in recipe_names():
        assert 10 < len(summary(name)) < 100
        assert (load_recipe(name).__doc__ or "").startswith(summary(name))
    assert summary("digits").startswith("Handwritten digits")


def test_an_unknown_recipe_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'digit'; did you mean digits\?"):
        load_recipe("digit")
    with pytest.raises(ConfigError, match=r"unknown recipe 'xyz' \(there are: .*digits"):
        summary("xyz")


def test_recipes_are_imported_when_asked_for_and_not_before() -> None:
    code = (
        "import sys, lockstep.launching.systems as r; r.recipe_names();"
        "assert 'lockstep.systems.digits' not in sys.modules; r.load_recipe('digits');"
        "assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_real_mnist_is_split_80_10_10() -> None:
    folder = Path(__file__).parents[3] / "shared" / "data" / "mnist"
    if not folder.is_dir():
        pytest.skip("MNIST is not at hand")
    task = digits(data_dir=folder)
    assert [len(tensors(task, split)[1]) for split in SPLITS] == [8000, 1000, 1000]
