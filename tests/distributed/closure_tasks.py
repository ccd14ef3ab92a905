"""Tasks whose optimizers evaluate the loss again, have modes, or are scheduled."""

import os
import signal
import sys

import torch
from tasks import Everything
from torch import nn
from torch.optim import lr_scheduler

import lockstep as ls
from lockstep.optim import SAM


class Searched(Everything):
    """L-BFGS of torch with its line search, with dropout and batch norm."""

    def build_optimizer(self, model):
        return torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
        )


class Sharp(Everything):
    """Two passes a step, and a scheduler of the optimizer inside."""

    def build_optimizer(self, model):
        return SAM(model.parameters(), lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9))

    def build_scheduler(self, optimizer):
        return lr_scheduler.CosineAnnealingLR(optimizer, 8)

    def loss(self, model, batch):
        is_rank = "pytest" not in sys.modules  # other tests in that process compile
        assert not is_rank or "torch._dynamo" not in sys.modules, "a step imports the compiler"
        return super().loss(model, batch)


class ScheduleFree(torch.optim.Optimizer):
    """As schedule-free SGD: trains other parameters than are to be evaluated."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "trains": False})

    @torch.no_grad()
    def _move(self, weight):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))

    def train(self):
        if not self.param_groups[0]["trains"]:
            self._move(lambda beta: 1 - beta)
        for group in self.param_groups:
            group["trains"] = True

    def eval(self):
        if self.param_groups[0]["trains"]:
            self._move(lambda beta: 1 - 1 / beta)
        for group in self.param_groups:
            group["trains"] = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            share = 1 / group["k"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class Free(Everything):
    """Evaluates and keeps other parameters than it trains."""

    def build_optimizer(self, model):
        return ScheduleFree(model.parameters())


class Cycled(Everything):
    """A scheduler that sets momentum too, and one more rate by hand."""

    def build_optimizer(self, model):
        self.optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        return self.optimizer

    def build_scheduler(self, optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=200)

    def after_step(self, model, step):
        if step == 3:
            self.optimizer.param_groups[0]["weight_decay"] = 0.3


class DiesLast(ls.Hook):
    """Ends the second process when the run has ended in its last step, once."""

    def on_end(self, run, status, reason):
        flag = run.run_dir / "died"
        if (
            os.environ.get("DIE_LAST") == os.environ.get("LOCKSTEP_LOCAL_RANK", "")
            and not flag.exists()
        ):
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class FreeToTheEnd(Free):
    """Loses a rank after its parameters have been summed up."""

    def hooks(self):
        return [DiesLast()]


class Gan(ls.Task):
    """Two phases, of which one would evaluate again."""

    def build_model(self):
        return nn.ModuleDict({"one": nn.Linear(2, 1), "other": nn.Linear(2, 1)})

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(8, 2)) if split == "train" else None

    def phases(self):
        return [ls.Phase("one", self.of_one), ls.Phase("other", self.of_one)]

    def of_one(self, model, batch):
        return ls.Loss(sum(part(batch[0]).square().sum() for part in model.values()), 1)

    def build_optimizer(self, model):
        sgd = torch.optim.SGD(model["other"].parameters(), 0.1)
        return {"one": torch.optim.LBFGS(model["one"].parameters()), "other": sgd}
