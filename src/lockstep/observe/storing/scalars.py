"""The numbers of events by the names that curves have elsewhere."""

from __future__ import annotations

from lockstep.engine.events import Evaluated, Event, Logged, StepDone


def scalars_of(event: Event) -> dict[str, float]:
    """The values of a `StepDone`, an `Evaluated` or a `Logged` scalar, by name; else none."""
    if isinstance(event, StepDone):
        return {
            "train/loss": event.loss,
            **{f"train/{name}": value for name, value in event.metrics.items()},
            "train/lr": event.lr,
            "train/grad_norm": event.grad_norm,
            "time/samples_per_s": event.samples_per_s,
            "time/compute_efficiency": event.compute_efficiency,
        }
    if isinstance(event, Evaluated):
        return {f"{event.split}/{name}": value for name, value in event.metrics.items()}
    if isinstance(event, Logged) and event.kind == "scalar":
        return {f"log/{event.name}": event.value}
    return {}
