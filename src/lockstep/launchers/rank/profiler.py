"""A trace of a few steps of this rank, by torch's profiler."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lockstep.engine.events import Emit, Profiled, Warned


class Profiler:
    """Records some steps of this process, and writes them as a Chrome trace.

    To be used in a `with` statement around the training; a trace that the end of the training cuts
    short is written too.

    Args:
        steps: first and last step to record, counted from the start of this sitting in this
            process, from 1; the first is at least 2.
        folder: path of the folder for traces; created if it is not there.
        slot: lifelong number of this process; part of the file's name.
        emit: function that takes events.
    """

    def __init__(self, steps: tuple[int, int], folder: Path, slot: int, emit: Emit) -> None:
        self._first, self._last = steps
        self._folder = folder
        self._slot = slot
        self._emit = emit
        self._num_steps = self._step = self._since = 0
        self._profile: profile | None = None
        self._range: record_function | None = None
        self._is_done = False

    def __call__(self, step: int) -> None:
        """Take note of a committed step; begins and ends the recording.

        Args:
            step: number of steps of the run that are committed.
        """
        self._num_steps, self._step = self._num_steps + 1, step
        self._end_range()
        if self._num_steps == self._first - 1:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._since = step + 1
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()
        elif self._num_steps == self._last:
            self._write()
        if self._profile is not None:
            self._range = record_function(f"step {step + 1}")
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def _end_range(self) -> None:
        """Close the range in the trace that is the step."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _write(self) -> None:
        """End the recording and store it; that it cannot be stored is a warning."""
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        self._is_done = True
        recorded.stop()
        path = self._folder / f"rank{self._slot}_steps{self._since}-{self._step}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # what torch raises where it cannot write
            message = f"{path}: the profile cannot be written: {error}"
            self._emit(Warned(step=self._step, message=message))
            return
        self._emit(Profiled(step=self._step, path=str(path)))

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_range()
        if self._profile is not None and self._step >= self._since:
            self._write()
        elif self._profile is not None:
            self._profile.stop()
        if error is None and not self._is_done:
            message = (
                f"no profile: this sitting ended after {self._num_steps} steps, and step "
                f"{self._first} of it was to be the first recorded; choose others with "
                "--profile-steps"
            )
            self._emit(Warned(step=self._step, message=message))
