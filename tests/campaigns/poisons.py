"""What can be wrong with the surroundings of a command, and which of it comes together."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Poison:
    """One thing that is wrong.

    Attributes:
        name: what the table shows.
        mounts: lines of a shell that are run first, in namespaces of their own.
        setup: lines of the shell that becomes the command.
        env: variables that are set.
        unset: variables that are not there; `*` for all.
        namespaces: options of `unshare`.
        folder: name of the folder that everything is in.
        needs_ranks: whether it says something with `-n 2` only.
        is_mute: whether nothing can be read of what the command says.
    """

    name: str
    mounts: str = ""
    setup: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    folder: str = ""
    needs_ranks: bool = False
    is_mute: bool = False


def _variables(*choices: Mapping[str, str], needs_ranks: bool = False) -> list[Poison]:
    return [
        Poison(
            " ".join(f"{name}={value}" for name, value in env.items()),
            env=env,
            needs_ranks=needs_ranks,
        )
        for env in choices
    ]


_FILLER = ".filler"
"""File that takes all space of a folder."""


def _full(folder: str, size: str) -> str:
    return (
        f"mount -t tmpfs -o size={size} tmpfs {folder}\n"
        f"dd if=/dev/zero of={folder}/{_FILLER} bs=4096 2>/dev/null"
    )


_BARE_DEV = """\
mkdir "$ROOT/dev"; mount -t tmpfs tmpfs "$ROOT/dev"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty "$ROOT/dev"
ln -s /proc/self/fd "$ROOT/dev/fd"; mount --move "$ROOT/dev" /dev"""
"""Devices, without /dev/shm."""


def _own_module(name: str, text: str) -> str:
    """A module of the user's in PYTHONPATH."""
    return f"""mkdir "$ROOT/own"; echo '{text}' > "$ROOT/own/{name}.py"
export PYTHONPATH="$ROOT/own\""""


_READ_ONLY_TMP = 'mount -t tmpfs -o ro tmpfs "$ROOT/tmp"'


def _clock(days: int) -> tuple[str, ...]:
    seconds = str(days * 86400)
    return ("--fork", "--time", f"--monotonic={seconds}", f"--boottime={seconds}")


POISONS: dict[str, list[Poison]] = {
    "home": [
        Poison("no HOME", unset=("HOME",)),
        Poison("HOME missing", env={"HOME": "/nonexistent/home"}),
        Poison("HOME empty", env={"HOME": ""}),
        Poison("env -i", unset=("*",)),
    ],
    "files": [Poison(f"ulimit -n {n}", setup=f"ulimit -n {n}") for n in (12, 16, 24, 40, 64)]
    + [Poison("ulimit -Sn 12", setup="ulimit -Sn 12")],
    "file size": [Poison(f"ulimit -f {n}", setup=f"ulimit -f {n}") for n in (0, 1, 20, 2000)],
    "memory": [
        Poison(f"ulimit -{kind} {n}", setup=f"ulimit -{kind} {n}")
        for kind, n in (("v", 200_000), ("v", 1_000_000), ("v", 4_000_000), ("d", 200_000))
    ],
    "stack": [Poison(f"ulimit -s {n}", setup=f"ulimit -s {n}") for n in (128, 512)],
    "temporary": [
        Poison("TMPDIR missing", env={"TMPDIR": "/nonexistent/tmp"}),
        Poison("TMPDIR empty", env={"TMPDIR": ""}),
        Poison("TMPDIR full", mounts=_full('"$ROOT/tmp"', "64k")),
        Poison("TMPDIR with 2 inodes", 'mount -t tmpfs -o nr_inodes=2 tmpfs "$ROOT/tmp"'),
        Poison("TMPDIR read-only", mounts=_READ_ONLY_TMP),
        Poison("/tmp and TMPDIR read-only", mounts=f"{_READ_ONLY_TMP}\nmount -o remount,ro /tmp"),
    ],
    "shared memory": [
        Poison("no /dev/shm", mounts=_BARE_DEV),
        Poison("/dev/shm full", mounts=_full("/dev/shm", "64k")),
        Poison("/dev/shm of 1 MiB", mounts="mount -t tmpfs -o size=1m tmpfs /dev/shm"),
        Poison("/dev/shm read-only", mounts="mount -o remount,ro /dev/shm"),
        Poison("/dev/shm with 2 inodes", mounts="mount -t tmpfs -o nr_inodes=2 tmpfs /dev/shm"),
    ],
    "network": [
        Poison("no loopback", namespaces=("--net",)),
        Poison(
            "IPv6 only",
            "ip link set lo up; ip address del 127.0.0.1/8 dev lo",
            namespaces=("--net",),
        ),
        Poison("loopback only", "ip link set lo up", namespaces=("--net",)),
    ],
    "host name": [
        Poison("host name unknown", "hostname nowhere.invalid", namespaces=("--uts",)),
        Poison("host name localhost", "hostname localhost", namespaces=("--uts",)),
        Poison("host name of 64 letters", f"hostname {'h' * 64}", namespaces=("--uts",)),
    ],
    "working directory": [
        Poison("deleted working directory", setup='mkdir gone; cd gone; rmdir "$ROOT/gone"'),
        Poison("working directory /", setup="cd /"),
    ],
    "streams": [
        Poison("stdin closed", setup="exec 0<&-"),
        Poison("stdout closed", setup="exec 1>&-"),
        Poison("stderr closed", setup="exec 2>&-", is_mute=True),
        Poison("no streams", setup="exec 0<&- 1>&- 2>&-", is_mute=True),
        Poison("stdout full", setup="exec 1>/dev/full"),
        Poison("stdout and stderr full", setup="exec 1>/dev/full 2>&1", is_mute=True),
    ],
    "path": [
        Poison("path with spaces", folder="a b  c"),
        Poison("path in Unicode", folder="été 海 🦀"),
        Poison("path with quotes", folder="it's \"$HOME\" %s {x} [b]"),
        Poison("path with a newline", folder="two\nlines"),
        Poison("path no UTF-8", folder=b"caf\xe9".decode(errors="surrogateescape")),
    ],
    "run directory": [
        Poison("run directory in a read-only folder", "mount -t tmpfs -o ro tmpfs \"$ROOT/runs\""),
        Poison("run directory on a full disk", _full('"$ROOT/runs"', "16k")),
        Poison("run directory on 256 KiB", 'mount -t tmpfs -o size=256k tmpfs "$ROOT/runs"'),
        Poison("run directory below a file", 'rmdir "$ROOT/runs"; touch "$ROOT/runs"'),
        Poison("run directory is a file", 'touch "$ROOT/runs/run"'),
        Poison("run directory is a link to nowhere", 'ln -s nowhere "$ROOT/runs/run"'),
        Poison("run directory is a link to itself", 'ln -s run "$ROOT/runs/run"'),
        Poison("run directory is a link", 'mkdir "$ROOT/own"; ln -s ../own "$ROOT/runs/run"'),
        Poison(
            "checkpoints on a file system of their own",
            'mkdir -p "$ROOT/runs/run/checkpoints"\n'
            'mount -t tmpfs tmpfs "$ROOT/runs/run/checkpoints"',
        ),
        *(
            Poison(f"{n} inodes for runs", f'mount -t tmpfs -o nr_inodes={n} tmpfs "$ROOT/runs"')
            for n in (2, 6, 14)
        ),
    ],
    "language": [
        *_variables({"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}),
        *_variables({"LC_ALL": "xx_YY.UTF-8"}, {"PYTHONIOENCODING": "ascii"}),
        *_variables({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    ],
    "python": _variables(
        {"PYTHONHASHSEED": "7"}, {"PYTHONOPTIMIZE": "2"}, {"PYTHONSAFEPATH": "1"},
        {"PYTHONDEVMODE": "1"}, {"PYTHONWARNINGS": "error"}, {"PYTHONMALLOC": "debug"},
        {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    ),
    "modules": [
        Poison("rich.py in PYTHONPATH", setup=_own_module("rich", "")),
        Poison("output of sitecustomize", setup=_own_module("sitecustomize", "print(1)")),
        Poison("error in sitecustomize", setup=_own_module("sitecustomize", "1/0")),
        Poison("files named like modules", setup="touch random.py queue.py copy.py torch.py"),
    ],
    "threads": _variables(
        {"OMP_NUM_THREADS": "banana"}, {"OMP_NUM_THREADS": "0", "MKL_NUM_THREADS": "-3"},
        {"OMP_NUM_THREADS": "100000"}, {"KMP_AFFINITY": "nonsense", "GOMP_CPU_AFFINITY": "999"},
    ),
    "places": _variables(
        {"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "0"}, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "1"},
        {"OMPI_COMM_WORLD_RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "old"}, {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NODELIST": "gone[1-2]"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, {"SLURM_STEP_ID": "0"},
        {"LOCKSTEP_LOCAL_RANK": "0"}, {"LOCKSTEP_WARM": "yes"}, {"LOCKSTEP_SESSION": "{"},
        needs_ranks=True,
    ),
    "MPI": _variables(
        {"OMPI_MCA_btl": "self,tcp"}, {"OMPI_MCA_pml": "nonsense"}, {"PRTE_MCA_ras": "slurm"},
        {"OMPI_MCA_btl_sm_backing_directory": "/nonexistent"}, {"PMIX_MCA_gds": "hash"},
    ),
    "terminal": [
        Poison("no TERM", unset=("TERM",)),
        *_variables({"TERM": "nonsense"}, {"COLUMNS": "1"}, {"COLUMNS": "banana", "LINES": "-1"}),
    ],
    "signals": [
        Poison("SIGPIPE ignored", setup="trap '' PIPE"),
        # The trap of a shell is none for its child.
        Poison("SIGCHLD ignored", setup='set -- env --ignore-signal=CHLD "$@"'),
        Poison("SIGINT and SIGTERM ignored", setup="trap '' INT TERM"),
        Poison("SIGUSR1 and SIGHUP ignored", setup="trap '' USR1 HUP"),
        Poison("all signals blocked", setup="set -- env --block-signal \"$@\""),
    ],
    "priority": [
        Poison("nice 19", setup="set -- nice -n 19 \"$@\""),
        Poison("one processor", setup="set -- taskset -c 0 \"$@\""),
    ],
    "user": [
        Poison("root of a container", namespaces=("--user", "--map-root-user")),
        Poison("user without a name", setup='set -- unshare --user --map-user=1234567 "$@"'),
    ],
    "umask": [Poison("umask 777", setup="umask 777"), Poison("umask 0", setup="umask 0")],
    "processes": [
        Poison("no /proc", "mount -t tmpfs tmpfs /proc"),
        Poison("processes of a container", namespaces=("--fork", "--pid", "--mount-proc")),
    ],
    "clock": [
        Poison(f"monotonic clock {days} days on", namespaces=_clock(days)) for days in (1, 20_000)
    ],
}  # fmt: skip
"""By kind: of a kind, a command meets one at most."""

_LAST = ("streams", "memory", "stack", "file size", "files", "umask")
"""Kinds whose setup the lines of others would not survive."""


@dataclass(frozen=True)
class Surroundings:
    """What a command meets.

    Attributes:
        number: of it in the campaign.
        poisons: what is wrong.
        ranks: options of `lockstep train` that say how ranks start.
    """

    number: int
    poisons: tuple[Poison, ...]
    ranks: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(poison.name for poison in self.poisons)
        return ascii(f"{' '.join(self.ranks) or 'alone'}: {names}")[1:-1]


def draw(seed: int, number: int) -> Surroundings:
    """Surroundings of a campaign; one kind after the other is met, with up to two more."""
    kinds = list(POISONS)
    random.Random(f"kinds/{seed}/{number // len(kinds)}").shuffle(kinds)
    source = random.Random(f"surroundings/{seed}/{number}")
    first = kinds[number % len(kinds)]
    others = [kind for kind in kinds if kind != first]
    chosen = [first, *source.sample(others, source.choice([0, 1, 1, 2]))]
    chosen.sort(key=lambda kind: _LAST.index(kind) if kind in _LAST else -1)
    poisons = tuple(source.choice(POISONS[kind]) for kind in chosen)
    ranks = source.choice(_RANKS)
    if any(poison.needs_ranks for poison in poisons):
        ranks = source.choice(_RANKS[-2:])
    return Surroundings(number, poisons, ranks)


_RANKS = (
    (),
    ("-n", "1", "--launcher", "local"),
    ("-n", "2", "--launcher", "local"),
    ("-n", "2", "--launcher", "mpi"),
)
