"""`lockstep quantum plateau` and `expressibility`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")


def test_a_plateau_as_a_table_and_a_picture(here, tmp_path: Path) -> None:
    options = ("--qubits", "2,3,2", "--layers", "1", "--samples", "5", "--circuits", "2")
    pictures = []
    for name in ("ä.svg", "b.png", "c.svg"):
        done = here("quantum", "plateau", *options, "--plot", name)
        assert done.returncode == 0, done.stderr
        pictures.append((tmp_path / name).read_bytes())
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["2", "qubits", "3", "qubits", "decay"]
    name, _, _, *numbers = lines[2].split()
    assert (name, len(numbers)) == ("L", 3)
    assert lines[3].split() == ["2-designs", "1.07e-01", "5.64e-02", "0.637"]
    assert lines[4] == "c.svg"
    assert pictures[0].startswith(b"<?xml")
    assert pictures[0] == pictures[2]
    assert pictures[1].startswith(b"\x89PNG")


def test_expressibility_as_a_table_and_a_picture(here, tmp_path: Path) -> None:
    names = "rx_rz,h_cz_rx,rx_rz"
    options = ("--ansatz", names, "--qubits", "3", "--samples", "50", "--layers", "2,1")
    done = here("quantum", "expressibility", *options, "--plot", "a.png")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows[:4]] == [
        ["rx_rz", "1"], ["rx_rz", "2"], ["h_cz_rx", "1"], ["h_cz_rx", "2"]
    ]  # fmt: skip
    assert (rows[0][3], rows[2][3], rows[4]) == ("0.0000", "1.0000", ["Haar", "0.0000", "0.6667"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plateau", "--qubits", "2,x"], "--qubits 2,x: must be whole numbers from 1 to 24"),
        (["plateau", "--qubits", ""], "must be whole numbers"),
        (["plateau", "--layers", "0"], "--layers 0: must be whole numbers"),
        (["plateau", "--ansatz", "idle"], "has no parameter"),
        (["plateau", "--plot", "a.pdf"], "a.pdf: must end in .svg or .png"),
        (["expressibility", "--ansatz", "ring,foo"], "ansatz 'foo': there is none"),
        (
            ["expressibility", "--samples", "1", "--layers", "1", "--plot", "none/a.svg"],
            "none/a.svg: cannot be written",
        ),
    ],
)
def test_wrong_options_are_refused(here, arguments: list[str], message: str) -> None:
    done = here("quantum", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
