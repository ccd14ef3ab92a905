"""The keys of the quantum transformer, and the sentences that they choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.config import (
    NO_OUTCOME,
    CheckpointConfig,
    Count,
    DataConfig,
    Fraction,
    NonNegativeFloat,
    OptimizerConfig,
    Positive,
    PositiveFloat,
    TrainConfig,
)
from lockstep.systems.quantum import language as grammar
from lockstep.systems.quantum.language import MAX_SENTENCES, Sentence, read_sentences


class QuantumOptimizerConfig(OptimizerConfig):
    """Gradient descent unless another is named."""

    name: Literal["sgd", "adam", "adamw", "lbfgs", "natural"] = "sgd"  # type: ignore[assignment]
    """Also L-BFGS (with `lr=1`) and the quantum natural gradient; both need `clip_norm=null` and
    the whole corpus as batch."""
    history: Positive = 10
    """Pairs of steps and gradient changes that are kept (lbfgs)."""
    max_step: PositiveFloat = 1.0
    """Longest step, Euclidean (lbfgs)."""
    damping: PositiveFloat = 1e-3
    """Added to the metric's diagonal (natural)."""


class QuantumConfig(TrainConfig):
    """The keys of the model and its corpus, and the defaults of the MPI training guide."""

    embedding_dim: Annotated[int, Field(ge=2)] = 4
    """A power of two: a word is a state of so many amplitudes."""
    num_layers: Positive = 1
    """Layers of the ansatz."""
    dtype: Literal["complex64", "complex128"] = "complex128"
    """Type of the amplitudes."""
    embedding: Literal["fixed", "trainable"] = "fixed"
    """Whether the vectors of words are drawn once, or drawn and then trained with the angles."""
    word_scale: PositiveFloat = 0.1
    """Words are drawn from U(0, word_scale)^d."""
    position_scale: NonNegativeFloat = 1.0
    """Factor of the position encoding, whose norm is √(d / 2)."""
    objective: Literal["fidelity", "likelihood"] = "fidelity"
    """What is minimised: -ln |A|² of sentences, or -ln of next words' probabilities, |a|² of a
    transition normalised over the vocabulary."""
    restarts: Positive = 1
    """Independent sets of angles, trained side by side; more than one needs `clip_norm=null`."""
    corpus: Path | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """UTF-8 text, one sentence a line; without it, eight built-in sentences."""
    val_corpus: Path | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """The same for validation; without it, `val_fraction` of `corpus`."""
    val_fraction: Fraction = 0.1
    """Part of the sentences of `corpus` that is held out for validation, by their digests; 0 for
    none. Of the built-in ones none is."""
    validate_on: Literal["held_out", "train"] = "held_out"
    """`train`: validate on the training sentences, and hold out none. `best` is then the best on
    what was learned."""
    test_corpus: Path | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """The same for testing; without both, four built-in sentences."""
    grammar: Annotated[int, Field(ge=1, le=MAX_SENTENCES)] | None = None
    """Sentences of an artificial language to learn instead of a corpus, drawn from the seed; an
    eighth as many others are for testing, and again as many for validation."""
    backend: Literal["closed_form", "circuit"] = "closed_form"
    """Whether amplitudes are computed, or circuits simulated gate by gate."""
    grad: Literal["exact", "shift"] = "exact"
    """Gradients of circuits: by adjoint differentiation, or by the parameter-shift rule."""
    shots: Positive | None = None
    """Measurements that estimate each probability, with noise from the seed; exact without. Needs
    `grad=shift`."""
    deal: Literal["sentences", "transitions", "restarts", "shifts"] = "sentences"
    """What is distributed over microbatches: sentences, or parts of the work on each of them."""
    parts: Positive = 1
    """Parts of the work on a sentence, where `deal` is not `sentences`."""
    shards: Literal["split", "strided"] = "split"
    """Whether a microbatch gets neighbouring sentences, or every M-th of M microbatches."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    epochs: Positive = 50
    lr: NonNegativeFloat = 0.01
    optimizer: QuantumOptimizerConfig = QuantumOptimizerConfig()
    clip_norm: PositiveFloat | None = 1.0
    batch_size: Positive = 1 << 20
    """The whole corpus, up to this size: a step is an epoch."""
    data: DataConfig = DataConfig(shuffle=False)
    checkpoint: CheckpointConfig = CheckpointConfig(every=10)
    eval_every: Count = 10
    log_every: Positive = Field(default=1, json_schema_extra=NO_OUTCOME)

    @field_validator("embedding_dim")
    @classmethod
    def _power_of_two(cls, dim: int) -> int:
        if dim & (dim - 1):
            below = 1 << (dim.bit_length() - 1)
            raise ValueError(
                f"must be a power of two, for a word is a state of qubits; take {below} or "
                f"{2 * below}"
            )
        return dim

    @model_validator(mode="after")
    def _parts_fit(self) -> QuantumConfig:
        if self.deal == "sentences" and self.parts > 1:
            raise ValueError(f"parts={self.parts}: needs another deal than sentences")
        if self.deal == "restarts" and self.restarts % self.parts:
            raise ValueError(
                f"parts={self.parts}: {self.restarts} restarts cannot be distributed in so many "
                "equal parts"
            )
        if self.shards == "strided" and self.data.shuffle:
            raise ValueError("shards=strided: needs data.shuffle=false")
        return self

    @model_validator(mode="after")
    def _words_fit(self) -> QuantumConfig:
        files = {"corpus": self.corpus, "val_corpus": self.val_corpus}
        files["test_corpus"] = self.test_corpus
        given = [name for name, path in files.items() if path is not None]
        if self.grammar is not None and given:
            raise ValueError(
                f"grammar={self.grammar}: is a corpus itself; leave {' and '.join(given)} out"
            )
        if self.validate_on == "train" and self.val_corpus is not None:
            raise ValueError("validate_on=train: leave val_corpus out")
        for key in ("embedding=trainable", "objective=likelihood"):
            name, _, value = key.partition("=")
            if getattr(self, name) == value and self.backend != "closed_form":
                raise ValueError(f"{key}: needs backend=closed_form")
        if self.objective == "likelihood" and self.deal != "sentences":
            raise ValueError(f"objective=likelihood: needs deal=sentences, not {self.deal}")
        if self.embedding == "trainable" and self.restarts > 1:
            raise ValueError(
                f"restarts={self.restarts}: trainable words would be shared by restarts that are "
                "to be independent; needs embedding=fixed"
            )
        if self.embedding == "trainable" and self.optimizer.name == "natural":
            raise ValueError(
                "optimizer.name=natural: has no metric of words; needs embedding=fixed"
            )
        return self

    @model_validator(mode="after")
    def _backend_fits(self) -> QuantumConfig:
        if self.grad == "shift" and self.backend != "circuit":
            raise ValueError("grad=shift: needs backend=circuit")
        if self.shots is not None and self.grad != "shift":
            raise ValueError(f"shots={self.shots}: needs backend=circuit grad=shift")
        if self.deal == "shifts" and self.grad != "shift":
            raise ValueError("deal=shifts: needs backend=circuit grad=shift")
        if self.deal in ("transitions", "restarts") and self.backend != "closed_form":
            raise ValueError(f"deal={self.deal}: needs backend=closed_form")
        return self

    @model_validator(mode="after")
    def _optimizer_fits(self) -> QuantumConfig:
        name = self.optimizer.name
        if self.clip_norm is not None and self.restarts > 1:
            raise ValueError(
                f"restarts={self.restarts}: clip_norm={self.clip_norm} is for the gradient of all "
                "restarts together, which would then depend on one another; set clip_norm=null"
            )
        if name not in ("lbfgs", "natural"):
            return self
        if self.clip_norm is not None:
            raise ValueError(f"optimizer.name={name}: needs gradients as they are; clip_norm=null")
        if self.restarts > 1:
            raise ValueError(f"optimizer.name={name}: works on one restart, not {self.restarts}")
        return self


TRAIN = (
    "The cat flies",
    "The quick brown fox jumps",
    "Every morning birds sing songs",
    "Children happily play in parks",
    "Beautiful flowers bloom in spring",
    "Smart students learn new things",
    "Cats sleep quietly on sofas",
    "Dogs bark loudly at strangers",
)
"""Sentences to learn where `corpus` is not set."""
TEST = (
    "The quick brown fox jumps over the lazy dog",
    "I am great",
    "every day is",
    "come and play",
)
"""Sentences to test with where neither `corpus` nor `test_corpus` is set."""


def corpora(config: QuantumConfig) -> dict[str, list[Sentence]]:
    """All sentences to train with, and those that are for `test` and `val` alone, if there are any.

    Raises:
        DataError: a corpus cannot be read or has a sentence without a next word.
    """
    if config.grammar is not None:
        return grammar.splits(config.grammar, config.seed)
    found = {"train": _sentences(config.corpus, TRAIN)}
    if config.test_corpus is not None or config.corpus is None:
        found["test"] = _sentences(config.test_corpus, TEST)
    if config.val_corpus is not None:
        found["val"] = _sentences(config.val_corpus, ())
    return found


def splits(
    config: QuantumConfig, found: Mapping[str, list[Sentence]]
) -> Mapping[str, list[Sentence]]:
    """The sentences of `train`, and of `val` and `test` if there are any.

    Args:
        config: says what is held out.
        found: what `corpora` gives for it.
    """
    if config.validate_on == "train":
        return {**found, "val": found["train"]}
    if "val" in found or config.corpus is None or not config.val_fraction:
        return found
    train, val = grammar.held_out(found["train"], config.val_fraction)
    return {**found, "train": train, "val": val} if val else found


class Corpus(Dataset[tuple[Tensor, int]]):
    """Sentences, each once for each part of the work on it; all first parts come first."""

    def __init__(self, sentences: list[Tensor], num_parts: int) -> None:
        self._sentences = sentences
        self._num_parts = num_parts

    def __len__(self) -> int:
        return len(self._sentences) * self._num_parts

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        part, sentence = divmod(int(index), len(self._sentences))
        return self._sentences[sentence], part


def _sentences(path: Path | None, built_in: Iterable[str]) -> list[Sentence]:
    if path is not None:
        return read_sentences(path.expanduser())
    return [tuple(sentence.split()) for sentence in built_in]
