"""The causes that cost time."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from lockstep.engine.events import Checkpointed, Evaluated, Rebalanced, RunStarted
from lockstep.observe import text
from lockstep.observe.reading.diagnosis import Cause, NewestSession, measured, percent

_SLOWER = 1.3
"""A rank is slow if it takes so many times the others' time for a microbatch."""
_FULL, _OTHERS = 0.85, 0.15
"""Shares of the cores that are used at all, and by others, from which a host is busy."""
_FAULTED = 20.0
"""Page faults from the disk per second that mean a shortage of memory."""
_SWAPPED = 0.02
"""The least share of a rank's memory that is swapped out in a shortage."""
_SLOW_DISK = 50e6
"""Bytes per second below which a disk is slow."""
_SMALL = 4e6
"""Bytes of gradients below which latency determines the time of an exchange."""
_PASS_S = 2.5e-4
"""About what a microbatch takes at least, of however few samples: Python and starts of kernels."""
_FAULT_S = 1e-3
"""About the time of a page fault from a disk in seconds."""
_RETRY_S = 0.02
"""About the time of `cudaFree` of all that is kept, and of asking for it again, in seconds."""
_IDLE_DEVICE = 0.5
"""Part of the time in which a device computes at least, if Python keeps up with it."""


def slowness(session: NewestSession) -> Iterator[Cause]:
    """All causes that have cost time, however little."""
    if not session.workers:
        return
    for find in (
        _crowded, _busy, _memory, _full_device, _waiting_device, _slow_rank, _imbalance, _short,
        _data, _evaluation, _checkpoints, _exchange, _idle,
    ):  # fmt: skip
        cause = find(session)
        if cause is not None:
            yield cause


def _crowded(session: NewestSession) -> Cause | None:
    """More threads than cores; not on GPUs, whose ranks' threads hardly compute."""
    for host, (threads, cores) in session.hosts.items() if session.on_cpu else ():
        if threads > cores:
            ranks = sum(p.joined.host == host for p in session.history.living)
            return Cause(
                "oversubscribed",
                1.0 - cores / threads,
                f"{text.count(ranks, 'rank')} with {text.count(threads, 'thread')} share "
                f"{text.count(cores, 'core')} of {host}",
                [f"compute takes {percent(session.share('compute_s'))}, exchange with waiting "
                 f"{percent(session.share('communication_s'))} of the time"],
                f"start {max(1, cores * ranks // threads)} ranks there, or lower threads",
                explains=("busy", "latency", "bandwidth", "slow_rank", "imbalance"),
            )  # fmt: skip
    return None


def _busy(session: NewestSession) -> Cause | None:
    """Other processes on cores that are fully used."""
    if session.config.get("data.num_workers"):
        return None  # the rank's own workers would count as other processes
    for host, (_, cores) in session.hosts.items():
        # Also ranks without microbatches, which use the cores while they wait in MPI.
        ranks = [p for p in session.history.living if p.joined.host == host]
        counted = [p.joined.counted_cores for p in ranks]
        if not ranks or not all(p.times.cores_s for p in ranks):
            continue
        # Ranks that share all cores all measure the same work; ranks that are bound to cores of
        # their own each measure a part of it. Otherwise cores of other jobs were counted.
        if set(counted) == {cores}:
            worked = max(p.times.cores_s for p in ranks) / session.seconds
        elif sum(counted) == cores:
            worked = sum(p.times.cores_s for p in ranks) / session.seconds
        else:
            continue
        own = sum(p.times.cpu_s for p in ranks) / session.seconds
        others = worked - own
        if worked > _FULL * cores and others > _OTHERS * cores:
            return Cause(
                "busy",
                min(0.9, others / cores),
                f"other processes compute on the cores of {host}",
                [f"of {text.count(cores, 'core')} they have {others:.1f}, the ranks {own:.1f}",
                 f"ranks had to leave a core {sum(p.times.preemptions for p in ranks):,.0f} times"],
                "end them, or ask for cores of your own (`srun --exclusive`)",
                explains=("latency", "bandwidth", "slow_rank"),
            )  # fmt: skip
    return None


def _memory(session: NewestSession) -> Cause | None:
    worst = max(session.workers, key=lambda p: p.times.faults)
    used = worst.times
    # Pages of mapped files are read from the disk too, without any swapping.
    if used.faults / session.seconds < _FAULTED or used.swapped_bytes < _SWAPPED * used.peak_bytes:
        return None
    return Cause(
        "memory",
        min(0.9, used.faults * _FAULT_S / session.seconds),
        f"memory of rank {worst.rank} is swapped out and in",
        [f"{used.faults:,.0f} page faults read from the disk; {text.size(used.swapped_bytes)} were "
         f"swapped out, and the most that it had in memory are {text.size(used.peak_bytes)}"],
        "raise num_microbatches, set activation_checkpointing or sharding, or start fewer ranks "
        "on each host",
        explains=("slow_rank", "busy"),
    )  # fmt: skip


def _full_device(session: NewestSession) -> Cause | None:
    """A device whose allocator had to give back what it kept, which waits for the device."""
    worst = max(session.workers, key=lambda p: p.times.device_retries)
    used, whole = worst.times, worst.joined.device_bytes
    if not used.device_retries:
        return None
    of_all = f" of {text.size(whole)}" if whole else ""
    return Cause(
        "device_memory",
        min(0.9, used.device_retries * _RETRY_S / session.seconds),
        f"memory of {worst.joined.device} of rank {worst.rank} is full",
        [f"its tensors have had up to {text.size(used.device_bytes)}{of_all}; "
         f"{text.count(int(used.device_retries), 'time')} all that was kept for later was freed"],
        "raise num_microbatches, set activation_checkpointing or sharding, or export "
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        explains=("slow_rank",),
    )  # fmt: skip


def _waiting_device(session: NewestSession) -> Cause | None:
    """Devices that compute for a small part of the time that ranks spend computing."""
    known = [p for p in session.workers if p.times.device_busy]
    if session.on_cpu or not known:
        return None
    busy, share = median(p.times.device_busy for p in known), session.share("compute_s")
    if busy > _IDLE_DEVICE or share < _IDLE_DEVICE:
        return None
    return Cause(
        "device_idle",
        0.5 * share * (1.0 - busy),  # half: this is a possible gain
        f"devices compute for {percent(busy)} of the time: they wait for Python",
        [f"ranks spend {percent(share)} of the time in forward and backward passes"],
        "set compute.graphs=true, which says why if it cannot; or have fewer, larger microbatches",
    )


def _slow_rank(session: NewestSession) -> Cause | None:
    workers = [p for p in session.workers if p.num_computed]
    each = {p.rank: p.seconds["compute_s"] / p.num_computed for p in workers}
    if len(each) < 2:
        return None
    slow = max(each, key=each.__getitem__)
    others = median(seconds for rank, seconds in each.items() if rank != slow)
    if not others or each[slow] < _SLOWER * others:
        return None
    process = next(p for p in session.workers if p.rank == slow)
    mean = sum(p.seconds["compute_s"] for p in session.workers) / len(session.workers)
    lost = max(0.0, process.seconds["compute_s"] - mean) / session.seconds
    waits = max(p.seconds["communication_s"] for p in session.workers if p.rank != slow)
    evidence = [f"the others wait up to {percent(waits / session.seconds)} of the time"]
    total = sum(process.seconds.values())
    if process.times.cpu_s < 0.6 * process.seconds["compute_s"]:
        evidence.append(
            f"its threads computed for {process.times.cpu_s:.1f} of {total:.1f} s: it waits for "
            "something in the loss, or for a core"
        )
    every = session.config.get("balance_every")
    return measured(
        "slow_rank",
        lost,
        f"rank {slow} on {process.joined.host} computes {each[slow] / others:.1f}x slower than the "
        "others",
        evidence,
        f"give it fewer microbatches (balance_every is {every}), or look at its host",
    )


def _imbalance(session: NewestSession) -> Cause | None:
    """Some ranks have more microbatches than others, and not because they are faster."""
    if session.events(Rebalanced):
        return None
    living = [p for p in session.history.living if sum(p.seconds.values())]
    counts = [p.num_microbatches for p in living]
    mean, most = sum(counts) / len(counts), max(counts)
    lost = (1.0 - mean / most) * session.worst("compute_s")[1]
    if mean == most:
        return None
    spares = sum(not count for count in counts)
    idle = f"{text.count(spares, 'rank')} of {len(counts)} have nothing to compute" if spares else (
        f"ranks have {min(counts):g} to {most:g} microbatches"
    )  # fmt: skip
    number = session.config.get("num_microbatches")
    return measured(
        "imbalance",
        lost,
        f"{idle}, and all wait for those that have most",
        [f"{number} microbatches for {len(counts)} ranks"],
        f"set num_microbatches to a multiple of {len(counts)} (it is {number})",
    )


def _short(session: NewestSession) -> Cause | None:
    """Ranks compute several microbatches that are so short that most of each is a fixed cost."""
    process, share, _ = session.worst("compute_s")
    count, computed = process.num_microbatches, process.num_computed
    if count <= 1 or not computed or not share:
        return None
    each = process.seconds["compute_s"] / computed
    return measured(
        "short_microbatches",
        share * min(1.0, _PASS_S / each) * (1 - 1 / count),
        "microbatches are so short that what each costs at least takes much of the time",
        [f"rank {process.rank} computes {count:g} in a step, {1e3 * each:.2f} ms each; about "
         f"{1e3 * _PASS_S:.2g} ms of that do not depend on the number of samples"],
        f"set num_microbatches={len(session.workers)} (other bits, and at most so many ranks), or "
        "raise batch_size",
    )  # fmt: skip


def _data(session: NewestSession) -> Cause | None:
    process, share, others = session.worst("data_s")
    of_one = len(session.workers) > 1 and others < share / 3
    workers = session.config.get("data.num_workers")
    return measured(
        "data",
        share,
        f"rank {process.rank} waits for its data" if of_one else "ranks wait for data",
        [f"{percent(share)} of the time of rank {process.rank}"
         + (f", {percent(others)} of that of the others" if len(session.workers) > 1 else "")],
        f"look at the disk of {process.joined.host}" if of_one
        else f"raise data.num_workers (it is {workers}), or make dataset[i] quicker",
    )  # fmt: skip


def _evaluation(session: NewestSession) -> Cause:
    done = session.events(Evaluated)
    spent = sum(event.seconds for event in done)
    every = session.config.get("eval_every")
    return measured(
        "evaluation",
        spent / session.seconds,
        "evaluations take much of the time",
        [f"{text.count(len(done), 'evaluation')} took {spent:.1f} s, "
         f"{percent(spent / session.seconds)} of the time"],
        f"raise eval_every (it is {every}; 0: at the end of each epoch) or eval_batch_size",
    )  # fmt: skip


def _checkpoints(session: NewestSession) -> Cause:
    saved = session.events(Checkpointed)
    _, share, _ = session.worst("checkpoint_s")
    stall, write = sum(s.stall_s for s in saved), sum(s.write_s for s in saved)
    rate = sum(s.num_bytes for s in saved) / write if write else 0.0
    is_disk = write > 0.1 * session.seconds and rate < _SLOW_DISK
    evidence = [
        f"{text.count(len(saved), 'checkpoint')}: training stood still for {stall:.1f} s",
        f"writing took {write:.1f} s, {text.size(rate)} a second",
    ]
    every = session.config.get("checkpoint.every")
    return measured(
        "disk" if is_disk else "checkpoints",
        max(share, stall / session.seconds),
        "the disk takes checkpoints slowly" if is_disk else "checkpoints take much of the time",
        evidence,
        f"raise checkpoint.every (it is {every})"
        + ("; or put the run directory on another disk" if is_disk else ""),
    )


def _exchange(session: NewestSession) -> Cause | None:
    """The time of an exchange without waiting for slower ranks: the least of all ranks."""
    if len(session.workers) < 2 or not session.history.num_steps or session.history.plan is None:
        return None
    least = min(p.seconds["communication_s"] for p in session.workers)
    each = least / session.history.num_steps
    gradients = 4.0 * session.history.plan.num_parameters
    compute = session.share("compute_s") * session.seconds / session.history.num_steps
    is_small = gradients < _SMALL
    return measured(
        "latency" if is_small else "bandwidth",
        least / session.seconds,
        "steps are so short that their messages take much of the time"
        if is_small
        else "the exchange of gradients takes much of the time",
        [f"a step computes for {1e3 * compute:.2f} ms and exchanges for {1e3 * each:.2f} ms, "
         f"{text.size(gradients)} of gradients"],
        _fewer_exchanges(session.history.plan, is_small),
    )  # fmt: skip


def _fewer_exchanges(plan: RunStarted, is_small: bool) -> str:
    if 0 < plan.num_samples <= plan.batch_size:
        fewer = "a step has all samples of an epoch already"
        return f"use fewer ranks: {fewer}" if is_small else f"use a faster network: {fewer}"
    if is_small:
        return "raise batch_size, or use fewer ranks"
    return "raise batch_size, so that there are fewer exchanges; or a faster network"


def _idle(session: NewestSession) -> Cause | None:
    if not session.on_cpu or session.config.get("data.num_workers"):
        return None  # a GPU computes, or data workers use the cores
    for host, (threads, cores) in session.hosts.items():
        if threads < cores:
            return Cause(
                "idle_cores",
                # Half the weight, since this is a possible gain and not a loss.
                0.5 * (1.0 - threads / cores) * min(1.0, session.share("compute_s")),
                f"{cores - threads} of {text.count(cores, 'core')} of {host} have nothing to do",
                [f"{text.count(threads, 'thread')} of all ranks there"],
                "start more ranks (-n), or raise threads (bits depend on it)",
            )
    return None
