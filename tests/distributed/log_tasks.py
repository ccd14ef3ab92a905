"""A task that logs what its steps have, on every rank alike."""

import torch
from tasks import Everything

import lockstep as ls


class Logging(Everything):
    """Everything, and after each step a scalar, a histogram, text and a picture of it."""

    def hooks(self):
        return [*super().hooks(), Says()]

    def after_step(self, model, step):
        super().after_step(model, step)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        ls.log("norms/all", weights.norm())
        ls.log("weights", weights)
        ls.log("noise", torch.rand(3, 8, 8), kind="image")


class Says(ls.Hook):
    def after_step(self, run):
        ls.log("loss as text", f"{run.train['loss']!r}")

    def after_evaluation(self, run, split, metrics):
        ls.log(f"evaluated/{split}", metrics["loss"])
