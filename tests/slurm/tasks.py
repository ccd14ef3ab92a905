"""The digits, trained slowly as long as a job has not been requeued; also as a script."""

import os
import time

import lockstep as ls
from lockstep.systems.digits.task import Digits

SLOW_S = float(os.environ.get("SLOW_S", "0"))


class SlowDigits(Digits):
    def loss(self, model, batch):
        if "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(SLOW_S)
        return super().loss(model, batch)


if __name__ == "__main__":
    ls.main(SlowDigits(), SlowDigits.Config())
