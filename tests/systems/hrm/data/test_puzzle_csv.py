"""CSV files of the public form: what is in them, and what is wrong with them, by line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm.data.arrays import Use
from lockstep.systems.hrm.data.build import build
from lockstep.systems.hrm.data.format import read_dataset
from lockstep.systems.hrm.data.maze import mazes, read_mazes, to_text
from lockstep.systems.hrm.data.sources import Options, read_rows
from lockstep.systems.hrm.data.sudoku import puzzles, read_puzzles
from lockstep.systems.hrm.data.sudoku_board import SolutionSplit, board_of, to_grids

HEAD = "source,q,a,rating\n"
QUESTION = "12..34....34..12"
ANSWER = "1243342121344312"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "puzzles.csv"


def sudokus(path: Path, content: str | bytes, least_rating: int = 0) -> list[tuple[str, str]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    blocks = list(read_puzzles(path, board_of(4), least_rating))
    return [
        ("".join(map(str, q)), "".join(map(str, a)))
        for block in blocks
        for q, a in zip(block.questions.tolist(), block.answers.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    "content",
    [
        f"{HEAD}x,{QUESTION},{ANSWER},3\n",
        f"{HEAD}x,{QUESTION.replace('.', '0')},{ANSWER},3",
        f"\ufeff{HEAD}x,{QUESTION},{ANSWER},3\n\n",
        f"{HEAD}x,{QUESTION},{ANSWER},3\n".replace("\n", "\r\n"),
        f"{HEAD}x,{QUESTION},{ANSWER},3\n".replace("\n", "\r"),
        f'"rating","answer","question"\n"3","{ANSWER}","{QUESTION}"\n',
        f" Q , A \n{QUESTION},{ANSWER}\n",
    ],
)
def test_all_spellings_of_a_file_are_read(path: Path, content: str) -> None:
    assert sudokus(path, content) == [(QUESTION.replace(".", "0"), ANSWER)]


def test_easier_rows_are_left_out(path: Path) -> None:
    rows = "".join(f"x,{QUESTION},{ANSWER},{rating}\n" for rating in (0, 5, 9))
    assert len(sudokus(path, HEAD + rows, least_rating=5)) == 2
    with pytest.raises(DataError, match="holds no puzzle of rating 10 or more"):
        sudokus(path, HEAD + rows, least_rating=10)
    with pytest.raises(DataError, match="one of them must be rating, once"):
        sudokus(path, f"q,a\n{QUESTION},{ANSWER}\n", least_rating=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; it must begin with a line of column names"),
        (HEAD, "holds no puzzle"),
        ("source,q,rating\n", "one of them must be a or answer, once"),
        ("q,q,a\n", "one of them must be q or question, once"),
        (f"{HEAD}x,{QUESTION},{ANSWER},3\nx,{QUESTION},{ANSWER}\n", "line 3: 3 columns: must be 4"),
        (f"{HEAD}x,{QUESTION},{ANSWER},hard\n", "line 2: rating: 'hard' is not a whole number"),
        (f"{HEAD}x,{QUESTION},{ANSWER},-1\n", "line 2: rating: '-1' is less than 0"),
        (
            f"{HEAD}x,{QUESTION[1:]},{ANSWER},3\n",
            "line 2: question of 15 characters: must be 16 of",
        ),
        (f"{HEAD}x,{QUESTION},{ANSWER}1,3\n", "line 2: answer of 17 characters"),
        (
            f"{HEAD}x,{QUESTION[:-1]}5,{ANSWER},3\n",
            "line 2: question '12..34.*must be of '.', 0 and",
        ),
        (f"{HEAD}x,{QUESTION[:-1]}²,{ANSWER},3\n", "line 2: question .*must be of"),
        (f"{HEAD}x,{QUESTION},{QUESTION},3\n", "line 2: a blank in the answer"),
        (f"{HEAD}x,{QUESTION},{ANSWER[:15]}1,3\n", "line 2: an answer that breaks the rules"),
        (
            f"{HEAD}x,{QUESTION},{ANSWER},3\n\nx,2{QUESTION[1:]},{ANSWER},3\n",
            "line 4: an answer that does not solve the question",
        ),
        (f'{HEAD}x,"{QUESTION},{ANSWER},3\n', "line 2: is no CSV"),
        (f"{HEAD}{'x' * 70_000}\n", "line 2: is longer than 65,536 characters"),
        (HEAD.encode() + b"x,\xff\xfe,1,2\n", "is not UTF-8"),
    ],
)
def test_what_is_wrong_is_told_by_line(path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        sudokus(path, content)
    assert str(raised.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.csv: there is no such file"):
        list(read_rows(tmp_path / "none.csv"))
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        list(read_rows(tmp_path))


@given(st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_anywhere_gives_an_error_or_puzzles(path: Path, data: st.DataObject) -> None:
    good = f"{HEAD}x,{QUESTION},{ANSWER},3\ny,{QUESTION},{ANSWER},4\n".encode()
    place = data.draw(st.integers(0, len(good)))
    noise = data.draw(st.binary(max_size=6) | st.sampled_from([b'"', b"\0", b"\r", b",", b"\n"]))
    skipped = data.draw(st.integers(0, 30))
    found, told = [], f"{path}: "
    try:
        found = sudokus(path, good[:place] + noise + good[place + skipped :])
    except DataError as error:
        told = str(error)
    assert told.startswith(f"{path}: ")
    assert "\n" not in told
    assert all(len(question) == len(answer) == 16 for question, answer in found)


def write_sudokus(path: Path, side: int, use: Use, count: int) -> None:
    rows = [HEAD]
    made = puzzles(board_of(side), 5, use)
    for _ in range(count):
        one = next(made)
        question, answer = ("".join(map(str, grid)) for grid in (one.questions[0], one.answers[0]))
        rows.append(f"x,{question},{answer},1\n")
    path.write_text("".join(rows))


@pytest.mark.parametrize("side", [4, 6])
def test_one_file_is_split_by_solution(tmp_path: Path, path: Path, side: int) -> None:
    other = tmp_path / "other.csv"
    write_sudokus(path, side, Use.TRAIN, 60)
    write_sudokus(other, side, Use.TEST, 60)
    path.write_text(path.read_text() + other.read_text().removeprefix(HEAD))
    build("sudoku", tmp_path / "data", Options(size=side, train=20, test=5, csv=path, augment=3))
    found = read_dataset(tmp_path / "data")
    split = SolutionSplit(board_of(side), 0)
    for name, count in (("train", 80), ("test", 5)):
        labels = found[name].sets["all"].labels
        assert len(labels) == count
        for answer in labels:
            assert split.is_test(to_grids(answer)) == (name == "test")
    with pytest.raises(ConfigError, match=r"--train 900: .* has no more than \d+ puzzles for it"):
        build("sudoku", tmp_path / "more", Options(size=side, train=900, test=9, csv=path))


def test_a_folder_has_the_split_of_its_files(tmp_path: Path) -> None:
    write_sudokus(tmp_path / "train.csv", 4, Use.TRAIN, 40)
    write_sudokus(tmp_path / "test.csv", 4, Use.TRAIN, 15)
    built = build("sudoku", tmp_path / "data", Options(csv=tmp_path, train=20, augment=0))
    assert built.sizes["train"].num_examples == 20
    assert built.sizes["test"].num_examples == 15
    inputs = read_dataset(tmp_path / "data")["train"].sets["all"].inputs
    text = (tmp_path / "train.csv").read_text()
    assert all("".join(map(str, row)) in text for row in to_grids(inputs).tolist())
    with pytest.raises(ConfigError, match=r"--train 41: .*train.csv has no more than 40"):
        build("sudoku", tmp_path / "more", Options(csv=tmp_path, train=41))


def maze_rows(count: int, side: int = 12) -> list[tuple[str, str]]:
    made = mazes(3, Use.TRAIN, 0, side, 15)
    pairs = [next(made) for _ in range(count)]
    return [(to_text(pair.questions), to_text(pair.answers)) for pair in pairs]


def test_mazes_are_read_and_no_turned_one_is_in_both_splits(tmp_path: Path, path: Path) -> None:
    rows = maze_rows(12)
    text = "source,question,answer,rating\n"
    for question, answer in rows:
        mirrored = ["".join(grid[i : i + 12][::-1] for i in range(0, 144, 12)) for grid in
                    (question, answer)]  # fmt: skip
        text += f"x,{question},{answer},9\nx,{mirrored[0]},{mirrored[1]},9\n"
    path.write_text(text)
    assert len(list(read_mazes(path))) == 24
    build("maze", tmp_path / "data", Options(csv=path, train=7, test=5))
    found = read_dataset(tmp_path / "data")
    train = {row.tobytes() for row in found["train"].sets["all"].inputs}
    test = {row.tobytes() for row in found["test"].sets["all"].inputs}
    assert len(test) == 5
    assert not train & test


def changed(text: str, old: str, new: str) -> str:
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, a: (q[:-1], a), "line 2: question of 143 characters: must be a square"),
        (lambda q, a: (q, a[:-1]), "line 2: question of 144, answer of 143"),
        (lambda q, a: (changed(q, "#", "x"), a), "must be of '#', ' ', 'S' and 'G'"),
        (lambda q, a: (changed(q, "S", " "), a), "question has 0 S: must be one"),
        (lambda q, a: (changed(q, " ", "G"), a), "question has 2 G: must be one"),
        (lambda q, a: (q, changed(a, "#", "o")), "the answer is not the question with 'o'"),
        (lambda q, a: (q, changed(a, "o", " ")), "are no shortest path from S to G"),
        (lambda q, a: (q, changed(a, " ", "o")), "are no shortest path from S to G"),
        (lambda q, a: (q.replace(" ", "#"), q.replace(" ", "#")), "there is none"),
    ],
)
def test_what_is_wrong_with_a_maze_is_told_by_line(path: Path, change, message: str) -> None:
    question, answer = change(*maze_rows(1)[0])
    path.write_text(f"source,question,answer,rating\nx,{question},{answer},9\n")
    with pytest.raises(DataError, match=message) as raised:
        list(read_mazes(path))
    assert f"{path}: line 2: " in str(raised.value)
