from __future__ import annotations

import hashlib
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from lockstep.config import (
    OF_MODEL,
    Section,
    TrainConfig,
    build,
    load,
    outcome,
    override,
    override_data,
)
from lockstep.errors import ConfigError, LockstepError

NO_OUTCOME = {
    "batch_loss.recompute",
    "carry.buddy",
    "compression.buddy",
    "compute.graphs",
    "tables.buddy",
    "weights_from.path",
    "weights_from.step",
    "balance_every",
    "strict",
    "sharding",
    "optimizer.sharded",
    "optimizer.buddy",
    "stop_at_step",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.file_bytes",
    "checkpoint.keep_every_s",
    "test_on",
    "checkpoint.background",
    "checkpoint.copies",
    "data.num_workers",
    "data.prefetch",
    "digest_every",
    "exchange",
    "overlap",
    "hang_timeout_s",
    "start_timeout_s",
    "log_every",
    "min_ranks",
    "plan",
    "mesh.interleave",
    "mesh.pp",
    "mesh.shrink",
    "mesh.tp",
    "tensorboard",
    "trackers",
    "bucket_bytes",
}
BASE = TrainConfig(optimizer={"momentum": 0.9}, num_microbatches=1, num_shards=2)  # type: ignore[arg-type]


class Depth(Section):
    layers: int = 2
    widths: tuple[int, ...] = (8, 8)


class Recipe(TrainConfig):
    lr: float = 0.5
    depth: Depth = Depth()
    kind: Literal["small", "large"] = "small"


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, annotation and value of every field that is no section."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, field.annotation, value


def another(annotation: Any, value: Any) -> Any:
    """A different valid value of a field."""
    if typing.get_origin(annotation) is Literal:
        return next(v for v in typing.get_args(annotation) if v != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 + 0.25
    if isinstance(value, str):
        return value + "_too"
    if value is None:
        return 7
    if value:
        return list(reversed(value))
    item = typing.get_args(annotation)[0]
    if typing.get_origin(item) is Literal:
        return list(typing.get_args(item))
    return [item().model_dump()] if issubclass(item, BaseModel) else ["layer.*"]


def changed(config: TrainConfig, key: str, value: Any) -> TrainConfig:
    data = config.model_dump()
    *sections, leaf = key.split(".")
    target = data
    for section in sections:
        target = target[section]
    target[leaf] = value
    return build(type(config), data, "test")


def refused(*overrides: str, kind: type[TrainConfig] = TrainConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        override(kind(), overrides)
    return str(caught.value)


LEAVES = {key: (annotation, value) for key, annotation, value in leaves(BASE)}


@pytest.mark.parametrize("key", LEAVES)
def test_hash_changes_with_every_key_that_can_change_the_result(key: str) -> None:
    other = changed(BASE, key, another(*LEAVES[key]))
    assert other != BASE
    assert (other.hash == BASE.hash) == (key in NO_OUTCOME)


def test_a_config_that_compresses_nothing_has_the_hash_of_its_other_keys() -> None:
    others = outcome(TrainConfig())
    del others["compression"], others["local"], others["weights_from"]
    del others["data"]["stream_shards"], others["init"]
    canonical = json.dumps(others, sort_keys=True, default=str)
    expected = hashlib.sha256(canonical.encode()).hexdigest()[:16]
    assert TrainConfig().hash == expected
    assert override(TrainConfig(), ["compression.buddy=true"]).hash == expected
    assert override(TrainConfig(), ["compression.name=int8"]).hash != expected
    assert override(TrainConfig(), ["local.steps=2"]).hash != expected
    assert override(TrainConfig(), ["data.stream_shards=8"]).hash != expected
    assert override(TrainConfig(), ["init=by_name"]).hash != expected


def test_keys_without_outcome_are_keys() -> None:
    assert set(LEAVES) >= NO_OUTCOME


def test_hash_is_sixteen_hex_digits_and_the_same_for_equal_configs() -> None:
    assert len(BASE.hash) == 16
    int(BASE.hash, 16)
    assert build(TrainConfig, BASE.model_dump(), "test").hash == BASE.hash
    assert build(TrainConfig, BASE.model_dump(mode="json"), "test").hash == BASE.hash


@pytest.mark.parametrize("key", LEAVES)
def test_every_key_survives_yaml(tmp_path: Path, key: str) -> None:
    config = changed(BASE, key, another(*LEAVES[key]))
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load(TrainConfig, path) == config
    assert load(TrainConfig, path).hash == config.hash


@given(
    seed=st.integers(0, 2**63 - 1),
    lr=st.floats(0, 1e300),
    watch=st.text(st.characters(exclude_categories=["Cs"])),
    patterns=st.lists(st.text(max_size=5), max_size=3),
)
@settings(deadline=None)
def test_any_values_survive_yaml(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lr: float, watch: str, patterns: list[str]
) -> None:
    config = TrainConfig(seed=seed, lr=lr, watch=watch, activation_checkpointing=tuple(patterns))
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load(TrainConfig, path) == config


def test_bytes_that_are_no_text_survive_yaml(tmp_path: Path) -> None:
    config = TrainConfig(watch=b"r\xe9n".decode("utf-8", "surrogateescape"))
    path = tmp_path / "any.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load(TrainConfig, path) == config


@pytest.mark.parametrize(
    ("item", "key", "value"),
    [
        ("lr=0.01", "lr", 0.01),
        ("lr=1e-3", "lr", 0.001),
        ("seed=9", "seed", 9),
        ("steps=100", "steps", 100),
        ("steps=null", "steps", None),
        ("watch=accuracy", "watch", "accuracy"),
        ("watch=a=b", "watch", "a=b"),
        ("tensorboard=true", "tensorboard", True),
        ("optimizer.name=sgd", "optimizer.name", "sgd"),
        ("optimizer.betas=[0.8, 0.95]", "optimizer.betas", (0.8, 0.95)),
        ("activation_checkpointing=[a.*, b]", "activation_checkpointing", ("a.*", "b")),
    ],
)
def test_overrides_set_one_key(item: str, key: str, value: Any) -> None:
    config = override(TrainConfig(), [item])
    assert {k: v for k, _, v in leaves(config)} == {
        **{k: v for k, _, v in leaves(TrainConfig())},
        key: value,
    }


def test_later_overrides_win_and_earlier_configs_stay() -> None:
    config = TrainConfig(epochs=3)
    assert override(config, ["lr=1", "lr=2", "optimizer.eps=0.5"]).lr == 2
    assert config == TrainConfig(epochs=3)
    assert override(config, []) == config


def test_a_section_can_be_overridden_as_a_whole() -> None:
    config = override(TrainConfig(), ["schedule={name: cosine, warmup_steps: 5}"])
    assert (config.schedule.name, config.schedule.warmup_steps) == ("cosine", 5)


def test_overrides_are_judged_together() -> None:
    assert override(TrainConfig(), ["num_microbatches=512", "batch_size=1024"]).batch_size == 1024


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        ("batch_sise=3", ["'batch_sise'", "did you mean batch_size?"]),
        ("optimizer.learning=3", ["'optimizer.learning'"]),
        ("optimizer.wieght_decay=3", ["did you mean optimizer.weight_decay?"]),
        ("momentum=0.9", ["'momentum'", "did you mean optimizer.momentum?"]),
        ("keep=1", ["'keep'", "did you mean checkpoint.keep?"]),
        ("optimiser.name=sgd", ["did you mean optimizer.name?"]),
        ("lr.max=1", ["'lr.max'"]),
        ("optimizer.name.first=sgd", ["'optimizer.name.first'"]),
        (" lr=1", ["' lr'", "did you mean lr?"]),
        ("xyzzy=1", ["unknown key 'xyzzy'"]),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(item: str, parts: list[str]) -> None:
    message = refused(item)
    assert message.startswith("command line: unknown key ")
    assert all(part in message for part in parts)
    assert "\n" not in message


def test_a_key_like_no_other_gets_no_hint() -> None:
    assert refused("xyzzy=1") == "command line: unknown key 'xyzzy'"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("batch_size=0", "batch_size=0: input should be greater than 0"),
        ("batch_size=-1", "batch_size=-1: input should be greater than 0"),
        ("batch_size=many", "batch_size='many': input should be a valid integer"),
        ("batch_size=1.5", "batch_size=1.5: input should be a valid integer"),
        ("batch_size=", "batch_size=None: input should be a valid integer"),
        ("seed=-1", "seed=-1: input should be greater than or equal to 0"),
        (f"seed={2**63}", f"seed={2**63}: input should be less than {2**63}"),
        ("lr=-0.1", "lr=-0.1: input should be greater than or equal to 0"),
        ("lr=.nan", "lr=nan: input should be"),
        ("lr=.inf", "lr=inf: input should be a finite number"),
        ("lr=[1]", "lr=[1]: input should be a valid number"),
        ("watch=3", "watch=3: input should be a valid string"),
        ("watch_mode=best", "watch_mode='best': input should be 'min' or 'max'"),
        ("device=tpu", "device='tpu': input should be 'auto', 'cpu', 'cuda' or 'accelerator'"),
        ("optimizer.name=lion", "optimizer.name='lion': input should be 'sgd', 'adam' or 'adamw'"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1="),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1=1.0: input should be less than 1"),
        ("optimizer.betas=[-0.1, 0.9]", "optimizer.betas.0=-0.1: input should be greater than or"),
        ("optimizer.eps=.nan", "optimizer.eps=nan: input should be"),
        ("clip_norm=0", "clip_norm=0: input should be greater than 0"),
        ("clip_norm=.nan", "clip_norm=nan: input should be"),
        ("precision.loss_scale=.inf", "precision.loss_scale=inf: input should be"),
        ("schedule.gamma=0", "schedule.gamma=0: input should be greater than 0"),
        ("schedule.min_ratio=1.5", "schedule.min_ratio=1.5: input should be less than or equal"),
        ("checkpoint.keep=0", "checkpoint.keep=0: input should be greater than 0"),
        ("tensorboard=maybe", "tensorboard='maybe': input should be a valid boolean"),
        ("schedule={name: cosine, warmup: 5}", "unknown key 'schedule.warmup'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_source_key_and_value(
    item: str, expected: str
) -> None:
    message = refused(item)
    assert message.startswith(f"command line: {expected}")
    assert "\n" not in message
    assert "pydantic" not in message


def test_more_microbatches_than_samples_are_refused() -> None:
    message = refused("batch_size=4", "num_microbatches=5")
    assert message == (
        "command line: num_microbatches=5 is more than batch_size=4: a microbatch needs at least "
        "one sample"
    )
    assert override(TrainConfig(), ["batch_size=4", "num_microbatches=4"]).batch_size == 4


def test_parts_of_a_stream_that_are_no_multiple_of_the_microbatches_are_refused() -> None:
    message = refused("data.stream_shards=12")
    assert message == (
        "command line: data.stream_shards=12: must be a multiple of num_microbatches=8, so that "
        "each microbatch has as many parts of the stream, or 0"
    )
    assert override(TrainConfig(), ["data.stream_shards=16"]).data.stream_shards == 16


def test_nesterov_without_momentum_is_refused() -> None:
    message = refused("optimizer.name=sgd", "optimizer.nesterov=true")
    assert message == "command line: optimizer: nesterov=True needs a momentum above 0"
    kept = override(BASE, ["optimizer.name=sgd", "optimizer.nesterov=true"])
    assert kept.optimizer.nesterov


def test_all_errors_are_told_at_once() -> None:
    lines = refused("batch_size=0", "lr=-1", "optimizer.eps=0").splitlines()
    assert len(lines) == 3
    assert all(line.startswith("command line: ") for line in lines)


@pytest.mark.parametrize("item", ["optimizer=sgd", "optimizer=3", "optimizer="])
def test_a_section_is_no_value(item: str) -> None:
    message = refused(item)
    assert message.startswith("command line: optimizer=")
    assert "optimizer is a section; set one of optimizer.name, optimizer.weight_decay" in message


@pytest.mark.parametrize("item", ["lr", "", "=3", "--lr"])
def test_what_is_no_key_and_value_is_refused(item: str) -> None:
    assert refused(item) == f"command line: {item!r} is not of the form key=value"


@pytest.mark.parametrize("item", ["lr=[1", "watch='a", "lr={", "watch=2024-99-99", "watch=!x y"])
def test_a_value_that_is_no_yaml_is_refused(item: str) -> None:
    key, _, text = item.partition("=")
    assert refused(item).startswith(f"command line: {key}: {text!r} is not a YAML value: ")


def written(folder: Path, text: str | bytes, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_file_sets_some_keys_and_leaves_the_others(tmp_path: Path) -> None:
    path = written(tmp_path, "lr: 0.2\noptimizer:\n  name: sgd\n  momentum: 0.5\n")
    config = load(TrainConfig, path)
    assert (config.lr, config.optimizer.name, config.optimizer.momentum) == (0.2, "sgd", 0.5)
    assert config.batch_size == TrainConfig().batch_size


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "---\n"])
def test_an_empty_file_is_the_default(tmp_path: Path, text: str) -> None:
    assert load(TrainConfig, written(tmp_path, text)) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- lr\n- 3\n", "must hold keys and values, holds a list"),
        ("hello", "must hold keys and values, holds a str"),
        ("3", "must hold keys and values, holds a int"),
        ("lr: [1", "is not valid YAML: "),
        ("lr: 1\n lr2: 3\n", "is not valid YAML: "),
        ("a: 1\n---\nb: 2\n", "is not valid YAML: "),
        ("when: 2024-99-99", "is not valid YAML: "),
        (b"\xff\xfe\x00lr", "cannot be read: "),
        ("batch_size: 0", "batch_size=0: input should be greater than 0"),
        ("bach_size: 8", "unknown key 'bach_size'; did you mean batch_size?"),
        ("optimizer: {lr: 8}", "unknown key 'optimizer.lr'; did you mean "),
        ("optimizer: sgd", "optimizer='sgd': input should be a valid dictionary"),
        ("lr: {max: 1}", "lr={'max': 1}: input should be a valid number"),
        ("num_microbatches: 500", "num_microbatches=500 is more than batch_size=256"),
        ("7: 8", "7=7: keys should be strings"),
    ],
)
def test_a_bad_file_is_refused_by_its_name(
    tmp_path: Path, text: str | bytes, expected: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, path)
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load(TrainConfig, path)
        assert str(caught.value).startswith(f"{path}: cannot be read: ")


def test_paths_and_values_may_hold_any_characters(tmp_path: Path) -> None:
    folder = tmp_path / "Läufe 実験 [1]"
    folder.mkdir()
    path = written(folder, "watch: Größe\n", "größe 🚀.yaml")
    assert load(TrainConfig, path).watch == "Größe"
    broken = written(folder, "lr: schnell\n", "größe 🚀.yaml")
    with pytest.raises(ConfigError, match=r"größe 🚀\.yaml: lr='schnell': "):
        load(TrainConfig, broken)


def test_a_recipe_adds_keys_and_changes_defaults() -> None:
    config = override(Recipe(), ["depth.layers=4", "kind=large", "batch_size=32"])
    assert isinstance(config, Recipe)
    assert (config.depth.layers, config.kind, config.lr) == (4, "large", 0.5)
    assert config.hash != override(Recipe(), ["kind=large", "batch_size=32"]).hash
    assert "did you mean depth.layers?" in refused("depth.layer=3", kind=Recipe)
    assert "depth.layers='deep'" in refused("depth.layers=deep", kind=Recipe)


class OfModel(TrainConfig):
    """A config with a key that says what the model is."""

    names: tuple[str, ...] = Field(default=("a",), json_schema_extra=OF_MODEL)
    box: int = 0


def test_a_trained_model_sees_other_data_and_is_no_other() -> None:
    config = OfModel(names=("a", "b"))
    assert override_data(config, ["names=[a, b]", "box=3"]) == OfModel(names=("a", "b"), box=3)
    with pytest.raises(ConfigError) as caught:
        override_data(config, ["box=3", "names=[b, a]"])
    assert str(caught.value).startswith(
        "command line: names=['b', 'a']: the model was trained with names=['a', 'b']"
    )


def test_a_recipes_config_survives_yaml(tmp_path: Path) -> None:
    config = Recipe(depth=Depth(layers=3, widths=(4, 5, 6)), kind="large")
    path = written(tmp_path, config.to_yaml())
    assert load(Recipe, path) == config
    with pytest.raises(ConfigError, match="unknown key 'depth'"):
        load(TrainConfig, path)


def test_a_config_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig().lr = 3  # type: ignore[misc]


def test_errors_are_for_the_user() -> None:
    assert issubclass(ConfigError, LockstepError)
    assert ConfigError("x").exit_code == 2


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "lr"),
        ("batchsize", "batch_size"),
        ("Batch-Size", "batch_size"),
        ("num_epochs", "epochs"),
        ("max_steps", "steps"),
        ("wd", "optimizer.weight_decay"),
        ("weight_decy", "optimizer.weight_decay"),
        ("warmup", "schedule.warmup_steps"),
        ("max_grad_norm", "clip_norm"),
        ("epoch", "epochs"),
    ],
)
def test_names_that_others_use_are_understood(key: str, meant: str) -> None:
    assert refused(f"{key}=1").endswith(f"unknown key {key!r}; did you mean {meant}?")


class OtherRate(TrainConfig):
    lr: float = 0.5


class YetAnotherRate(OtherRate):
    lr: float = 0.25


@pytest.mark.parametrize("kind", [OtherRate, YetAnotherRate])
@pytest.mark.parametrize("value", ["-1", ".inf", ".nan", "01e9995"])
def test_a_key_that_is_declared_again_keeps_its_limits(kind: type[TrainConfig], value: str) -> None:
    assert kind().lr == kind.model_fields["lr"].default
    with pytest.raises(ConfigError, match="lr="):
        override(kind(), [f"lr={value}"], "key=value")


def test_a_section_and_a_key_of_it() -> None:
    config = override(TrainConfig(), ["optimizer={name: sgd}", "optimizer.betas=[0.5, 0.9]"])
    assert (config.optimizer.name, config.optimizer.betas) == ("sgd", (0.5, 0.9))
    assert "did you mean optimizer.betas?" in refused("optimizer={name: sgd}", "optimizer.betos=3")
    assert "unknown key 'lr.x'" in refused("lr.x=3")


def test_a_dotted_key_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("optimizer: {name: sgd}\noptimizer.betas: [0.5, 0.9]\n")
    with pytest.raises(ConfigError, match=r"optimizer\.betas: write it as optimizer: \{betas: …\}"):
        load(TrainConfig, path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": 0.1}, "TrainConfig: unknown key 'learning_rate'; did you mean lr?"),
        ({"lr": "fast"}, "TrainConfig: lr='fast': input should be a valid number"),
        (
            {"optimizer": {"betta": 1}},
            "TrainConfig: unknown key 'optimizer.betta'; did you mean optimizer.betas?",
        ),
        ({"num_microbatches": 9, "batch_size": 4}, "TrainConfig: num_microbatches=9 is more than"),
    ],
)
def test_a_config_made_in_python_is_checked_likewise(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["sharding=gradients"], "exchange=hierarchical: sharding=gradients sums each microbatch"),
        (["sharding=parameters"], "set sharding=optimizer, or exchange=auto"),
        (["compression.name=int8"], "exchange=hierarchical: compression.name=int8 has an exchange"),
    ],
)
def test_what_has_nothing_to_add_up_inside_hosts_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        override(TrainConfig(), ["exchange=hierarchical", *keys])
    assert override(TrainConfig(), ["exchange=auto", *keys]).exchange == "auto"


@pytest.mark.parametrize("value", ["hosts", "", "Hierarchical", "1"])
def test_an_unknown_exchange_is_refused(value):
    with pytest.raises(ConfigError, match="exchange"):
        override(TrainConfig(), [f"exchange={value}"])
