"""The pictures in the documentation are those of the code, and name nothing that is not there."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.pages import docs_module


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return docs_module("pictures")


def test_the_pictures_are_up_to_date(pictures: ModuleType) -> None:
    assert not [*pictures.stale()], "run `make docs-pictures`"


def test_each_picture_is_well_formed_and_used(pictures: ModuleType) -> None:
    page = pictures.PAGE.read_text(encoding="utf-8")
    for name in ("house.svg", "step.svg", "kill.svg", "save.svg"):
        root = ElementTree.parse(pictures.FOLDER / name).getroot()
        width = float(root.attrib["width"])
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            assert float(text.attrib["x"]) + 6.3 * len(text.text or "") <= width, text.text
        assert f"(pictures/{name})" in page


def test_rooms_end_before_the_notes_beside_them(pictures: ModuleType) -> None:
    root = ElementTree.parse(pictures.FOLDER / "house.svg").getroot()
    boxes = root.iter("{http://www.w3.org/2000/svg}rect")
    rooms = [box.attrib for box in boxes if box.attrib["class"] == "room"]
    assert rooms
    assert all(float(r["x"]) + float(r["width"]) < pictures._NOTES_AT for r in rooms)


def test_names_of_columns_end_before_the_next_one(pictures: ModuleType) -> None:
    for name in ("step.svg", "kill.svg", "save.svg"):
        elements = list(ElementTree.parse(pictures.FOLDER / name).getroot())
        stride = next(float(e.attrib["width"]) for e in elements if e.get("class") == "band")
        heads = [e for e in elements if e.get("class") == "note" and float(e.attrib["y"]) < 78]
        assert heads
        assert all(6.3 * len(head.text or "") < stride for head in heads)


def test_a_walk_has_all_calls_and_falls(pictures: ModuleType) -> None:
    walk = pictures.calls(pictures.WALKS["step"])
    assert {"TrainStep.run", "Fold.add", "RunState.commit"} <= {call.name for call in walk}
    assert {call.room for call in walk} >= {"engine/run", "engine/step", "data", "parallel", "comm"}


def test_what_the_code_does_not_have_is_an_error(
    pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = pictures.PAGE.read_text(encoding="utf-8")
    copy = tmp_path / "architecture.md"
    copy.write_text(page.replace("Fold.add ", "Fold.sum "), encoding="utf-8")
    monkeypatch.setattr(pictures, "PAGE", copy)
    with pytest.raises(ValueError, match=r"src/lockstep/parallel/fold.py has no Fold.sum"):
        pictures.pictures()
