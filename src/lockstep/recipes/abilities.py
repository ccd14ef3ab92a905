"""What a recipe may be able to do beside training: commands ask for it by these protocols."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import typer
    from torch import Tensor, nn


@runtime_checkable
class Reports(Protocol):
    """A task that can say more of a trained model than its metrics."""

    def report(self, model: nn.Module, split: str, folder: Path, run_dir: Path) -> list[str]:
        """Write tables and pictures of a model.

        Args:
            model: trained model in evaluation mode.
            split: name of the split whose samples are looked at; the task has it.
            folder: folder to write to; it exists.
            run_dir: directory of the run that trained the model.

        Returns:
            Lines for people.
        """


@runtime_checkable
class Adopts(Protocol):
    """A task whose samples are prepared by what a trained model holds, such as its statistics."""

    def adopt(self, model: nn.Module) -> None:
        """Prepare samples as for this model from now on, rather than as its data says.

        Args:
            model: model with the parameters and buffers of a checkpoint.
        """


@runtime_checkable
class Exports(Protocol):
    """A task whose models can be used by other programs."""

    def export(self, state: Mapping[str, Tensor], folder: Path) -> list[str]:
        """Write a model in forms that need no Lockstep. Its training data need not be there.

        Args:
            state: the model's parameters and buffers by name.
            folder: folder to write to; it exists.

        Returns:
            Lines for people.
        """


@runtime_checkable
class Applies(Protocol):
    """A task that can have what it exported predict on the data that its config names."""

    def apply(self, model: nn.Module, folder: Path) -> list[str]:
        """Write what was exported into a folder predicts.

        Args:
            model: model that was exported, in evaluation mode, on the CPU.
            folder: folder that `export` has written to.

        Returns:
            Lines for people.
        """


@runtime_checkable
class GivesExample(Protocol):
    """A task that says which part of a batch its model is called with."""

    def example_input(self, batch: Any) -> Tensor | tuple[Tensor, ...]:
        """What the model's forward method takes, by position.

        Args:
            batch: as `Task.collate` makes it.
        """


class HasCommands(Protocol):
    """A module with subcommands of a recipe; `lockstep.recipes.CommandGroup` names it.

    It is imported to list them too, so its functions import what is slow themselves.

    Attributes:
        app: the subcommands.
    """

    app: typer.Typer
