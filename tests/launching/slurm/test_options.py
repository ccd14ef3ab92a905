"""Options for sbatch that are passed through, and a site's lines."""

from __future__ import annotations

import pytest

from lockstep.errors import LaunchError
from lockstep.launching.slurm.script import Given, checked, split_setup


def given(*options: str) -> list[Given]:
    return [Given(option) for option in options]


def test_options_are_lines_of_the_script() -> None:
    options = ["--gpus-per-task=1", "--qos=high", "--exclusive", "--comment=it's a b", "--mem=4G"]
    assert checked(given(*options)) == (
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
        checked(given(option))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_option_comes_twice_in_a_source() -> None:
    with pytest.raises(LaunchError, match="--qos: comes twice"):
        checked(given("--qos=a", "--qos=b"))
    with pytest.raises(LaunchError, match=r"^site, line 3: --qos: comes twice"):
        checked([Given("--qos=a"), Given("--qos=b", "site, line 3")])


def test_who_comes_later_may_give_an_option_another_value() -> None:
    site, file = given("--qos=a", "--exclusive", "--mem=1G"), given("--qos=b", "--mem=2G")
    expected = ("--qos=c", "--exclusive", "--mem=2G")
    assert checked(site, file, given("--qos=c")) == expected


@pytest.mark.parametrize("option", ["--array=0-1", "--arra=0-1", "--arr=0"])
def test_an_array_is_a_sweeps_own(option: str) -> None:
    place = Given(option, "site, line 2")
    assert checked([place]) == (option,)
    name = option.partition("=")[0]
    with pytest.raises(LaunchError, match=f"^site, line 2: {name}: is set by lockstep sweep"):
        checked([place], is_sweep=True)


def test_a_sites_lines() -> None:
    text = (
        "#SBATCH --qos=a --comment='b c'\n# modules\nmodule load gcc\n#SBATCH --exclusive # why\n"
    )
    options, lines = split_setup(text, "site")
    assert [option.text for option in options] == ["--qos=a", "--comment=b c", "--exclusive"]
    assert [option.where for option in options] == ["site, line 1"] * 2 + ["site, line 4"]
    assert lines == "# modules\nmodule load gcc"
    with pytest.raises(LaunchError, match="site, line 2: has a control"):
        split_setup("a\nb\x07", "site")
    with pytest.raises(LaunchError, match="site, line 1: cannot be read"):
        split_setup("#SBATCH --comment='a", "site")
