"""Parameters that each rank keeps slices of, all of them in memory for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lockstep.engine.flat.flat_tensors import FlatTensors
from lockstep.engine.places import Places
from lockstep.engine.step.workspace import Workspace
from lockstep.nn.pipeline import Pipeline


class SlicedParameters:
    """Opens and closes the flat memory of parameters in slices; leaves that of others alone."""

    def __init__(self, model: nn.Module, places: Places) -> None:
        self._model, self._places = model, places
        self._is_open = True

    def use(self, flat: FlatTensors, workspace: Workspace) -> None:
        """Work on this memory from now on, which is open."""
        self._flat, self._workspace = flat, workspace

    def open(self, gathered: bool = False) -> None:
        """Have all parameters in memory, those of other stages apart.

        Args:
            gathered: whether they have their values, for which this is a collective of the column;
                else only what this rank keeps of them has.
        """
        if self._places.in_slices:
            for segment in range(len(self._flat.segments)):
                (self._workspace.gather if gathered else self._workspace.open)(segment)
            self._share_ties()
            self._is_open = True

    def close(self) -> None:
        """Free all but the slices that this rank keeps."""
        if self._places.in_slices:
            for segment in range(len(self._flat.segments)):
                self._flat.close(segment)
            self._share_ties()
            self._is_open = False

    @contextmanager
    def whole(self, gathered: bool = True) -> Iterator[None]:
        """`open` them within it; what they become there, alike on a column's ranks, is kept."""
        was_open = self._is_open
        self.open(gathered)
        try:
            yield
            self._workspace.take_slices()
        finally:
            if not was_open:
                self.close()

    def slices(self) -> dict[str, Tensor]:
        """The slices that this rank keeps, by names for people; none of whole parameters."""
        if not self._places.in_slices:
            return {}
        named = {}
        for number, of_segment in enumerate(self._workspace.stepped):
            block = f"column {self._places.column}, block {self._flat.blocks[number]}"
            for (first, last), parameters, _ in of_segment:
                dtype = parameters.dtype
                named[f"{block}: elements {first} to {last - 1} of {dtype}"] = parameters
        return named

    def _share_ties(self) -> None:
        assert isinstance(self._model, Pipeline), "other models are not kept in slices"
        self._model.ties.share()
