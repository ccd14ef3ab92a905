"""Options for sbatch that are passed through, and a site's lines."""

from __future__ import annotations

import pytest

from lockstep.errors import LaunchError
from lockstep.launchers.slurm.options import checked, split_setup


def test_options_are_lines_of_the_script() -> None:
    options = ["--gpus-per-task=1", "--qos=high", "--exclusive", "--comment=it's a b", "--mem=4G"]
    assert checked(options) == (
        "--gpus-per-task=1", "--qos=high", "--exclusive", "--comment='it'\"'\"'s a b'", "--mem=4G",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("-q", "are written --name=value"),
        ("--qos high", "are written --name=value"),
        ("--qos=", "are written --name=value"),
        ("--QOS=1", "are written --name=value"),
        ("--qos=a\n#SBATCH --nodes=99", "has a line break"),
        ("--qos=a\x00", "control character"),
        ("--nodes=2", "use --nodes"),
        ("--node=2", "use --nodes"),
        ("--ntasks=2", "use --ntasks-per-node"),
        ("--time=5", "use --time"),
        ("--output=x", "use --output"),
        ("--job-name=x", "is set by lockstep"),
        ("--open-mode=truncate", "goes on in the same log"),
        ("--no-requeue", "requeues its job"),
        ("--wrap=true", "there is a script"),
    ],
)
def test_what_is_not_passed_through(option: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        checked([option])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_option_comes_twice() -> None:
    with pytest.raises(LaunchError, match="--qos: comes twice"):
        checked(["--qos=a", "--qos=b"])


def test_a_sites_lines() -> None:
    text = (
        "#SBATCH --qos=a --comment='b c'\n# modules\nmodule load gcc\n#SBATCH --exclusive # why\n"
    )
    options, lines = split_setup(text, "site")
    assert options == ["--qos=a", "--comment=b c", "--exclusive"]
    assert lines == "# modules\nmodule load gcc"
    with pytest.raises(LaunchError, match="site, line 2: has a control"):
        split_setup("a\nb\x07", "site")
    with pytest.raises(LaunchError, match="site, line 1: cannot be read"):
        split_setup("#SBATCH --comment='a", "site")
