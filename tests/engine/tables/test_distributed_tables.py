"""Tables distributed over ranks that are threads: fetched, stepped, redistributed, in files."""

import json
import shutil
import threading
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.thread_transport import on_ranks

import lockstep as ls
from lockstep.config import TrainConfig
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.share import exhaust, meet
from lockstep.engine.tables import exchange as messages
from lockstep.engine.tables.files import (
    check_described,
    cuts,
    described,
    load_whole,
    read_fields,
    read_rows,
)
from lockstep.engine.tables.run_tables import check_tables_fit
from lockstep.engine.tables.step_tables import Tables
from lockstep.engine.tables.table import Part, check_row_optimizer
from lockstep.errors import CheckpointError, ConfigError, LockstepError, TaskError
from lockstep.optim import RowAdam, RowOptimizer, RowSGD
from lockstep.parallel.layout import RowLayout, split

CPU = torch.device("cpu")
ROWS, DIM, MICROBATCHES = 75, 3, 5
_GENERATOR = threading.Lock()


def made(num_rows=ROWS, optimizer=None):
    with _GENERATOR:  # there is one for all threads
        torch.manual_seed(4)
        return ls.nn.SparseEmbedding(num_rows, DIM, optimizer or RowAdam(lr=0.1), std=1.0)


def nothing():
    pass


def tables_on(transport, table, buddy=True, is_new=False):
    """The tables of a group of threads."""
    transport.can_regroup = True
    runtime = SimpleNamespace(
        transport=SimpleNamespace(can_regroup=True, is_joining=is_new),
        device=CPU,
        at=lambda moment, step: None,
    )
    turns = SimpleNamespace(skip_forward=nothing)
    places = SimpleNamespace(world=transport, are_coupled=False, stage_order=turns, give_up=nothing)
    config = TrainConfig(num_microbatches=MICROBATCHES, tables={"buddy": buddy})
    tables = Tables(runtime, config, places, {"t": table}, 10)
    tables.use(split(MICROBATCHES, transport.size))
    return tables


def wanted_of(step, number):
    """Rows that a microbatch looks up; none for some."""
    generator = torch.Generator().manual_seed(10 * step + number)
    count = (number * 2 + step) % 6
    return torch.unique(torch.randint(ROWS, (count,), generator=generator))


def one_step(tables, transport, step):
    own = range(*split(MICROBATCHES, transport.size)[transport.rank])
    tables.fetch(step, lambda: {number: {"t": wanted_of(step, number)} for number in own})
    for number in own:
        fetched = tables.of(number)["t"]
        ((fetched.rows * (1 + number)) ** 2 / 2).sum().backward()
        tables.add(number)
    tables.reduce(step)
    norm = tables.norm()
    tables.settle(step, 0, norm, 0.25)
    return norm


def trained(transport, steps=3, buddy=True):
    tables = tables_on(transport, made(), buddy)
    norms = [one_step(tables, transport, step) for step in range(steps)]
    return tables, norms


def weights(tables, transport):
    ((fetched,),) = messages.fetch(transport, tables.each, [[torch.arange(ROWS)]], trains=False)
    return fetched.rows


def reference(steps=3):
    """The same in plain torch, with all rows in one place."""
    table, optimizer = made(), RowAdam(lr=0.1)
    rows = table.start_of(torch.arange(ROWS))
    state = {n: torch.zeros(ROWS, w) for n, w in optimizer.widths(DIM).items()}
    for step in range(steps):
        gradient, touched = torch.zeros(ROWS, DIM), torch.zeros(ROWS, dtype=torch.bool)
        for number in range(MICROBATCHES):
            ids = wanted_of(step, number)
            gradient[ids] += rows[ids] * (1 + number) ** 2
            touched[ids] = True
        part, own = rows[touched], {n: s[touched] for n, s in state.items()}
        optimizer.step(part, own, gradient[touched] * 0.25, 0.1)
        rows[touched] = part
        for name, values in own.items():
            state[name][touched] = values
    return rows


def test_steps_are_those_of_one_table():
    tables, norms = on_ranks(1, trained)[0]
    torch.testing.assert_close(
        on_ranks(1, lambda t: weights(trained(t)[0], t))[0], reference(), rtol=1e-5, atol=1e-5
    )
    assert all(norm > 0 for norm in norms)
    assert len(tables.digest()) == 64


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("buddy", [True, False])
def test_any_number_of_ranks_has_the_same_bits(size, buddy):
    def call(transport):
        tables, norms = trained(transport, buddy=buddy)
        return tables.digest(), norms, tables.digests()

    alone = on_ranks(1, call)[0]
    there = on_ranks(size, call)
    for digest, norms, _ in there:
        assert digest == alone[0]
        assert norms == alone[1]
    # Neighbours hold the same copies.
    known = {}
    for _, _, own in there:
        for name, digest in own.items():
            assert known.setdefault(name, digest) == digest
    assert len(known) == (size if buddy else 0)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.data())
def test_survivors_have_all_rows_if_no_neighbours_died(former, data):
    """Whoever is left, and joining ranks, own the rows that there were."""
    dead = data.draw(st.sets(st.integers(0, former - 1), max_size=former - 1))
    left = [rank for rank in range(former) if rank not in dead]
    size = len(left) + data.draw(st.integers(0, 2))
    held = {}

    def train(transport):
        held[transport.rank] = trained(transport)[0]
        return held[transport.rank].digest()

    digest = on_ranks(former, train)[0]

    def go_on(transport):
        is_new = transport.rank >= len(left)
        tables = tables_on(transport, made(), is_new=True)
        if not is_new:
            tables.each[0].parts = held[left[transport.rank]].each[0].parts
        before = tables.each[0].parts
        is_lost = tables.redistribute()
        if is_lost:
            assert tables.each[0].parts is before
            return None
        tables.use(split(MICROBATCHES, transport.size))
        found = tables.digest()
        one_step(tables, transport, 3)
        return found, tables.digest()

    found = on_ranks(size, go_on)
    lost = any((rank + 1) % former in dead for rank in dead) and bool(dead)
    if lost:
        assert found == [None] * size
        return
    later = on_ranks(1, lambda t: trained(t, steps=4)[0].digest())[0]
    assert found == [(digest, later)] * size


def written(tables, transport, root):
    """The folder of a checkpoint that all ranks have written."""
    root.mkdir(exist_ok=True)
    begin = partial(checkpoint.begin, root, 3)
    share = meet(transport, begin, tables.scattered(), most_bytes=0)
    own, stream = share.gathered(transport, CPU)
    share.write(own)
    exhaust(stream)
    assert len(share.writers) == min(transport.size, len(cuts(made())))
    transport.gather_json(0)
    if transport.rank == 0:
        meta = {"tables": described({"t": made()})}
        checkpoint.write(root, Snapshot(3, {"w": torch.zeros(1)}, {}, meta), share=share)
    transport.gather_json(0)
    return root / "step_00000003"


def test_files_are_the_same_on_any_number_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.engine.tables.files._FILE_BYTES", 1100)
    assert len(cuts(made())) > 2

    def save(transport):
        is_everywhere = transport.size != 3
        tables, _ = trained(transport)
        folder = written(tables, transport, tmp_path / str(transport.size))
        before = tables.digest()
        tables.start()
        assert tables.digest() != before
        given = (folder if is_everywhere or transport.rank == 0 else None, is_everywhere)
        with tables.temporary(*given):
            assert tables.digest() == before
        assert tables.digest() != before
        tables.load(*given)
        return tables.digest() == before, weights(tables, transport)

    for size in (1, 3, 5):
        shutil.rmtree(tmp_path / str(size), ignore_errors=True)
        assert all(is_same for is_same, _ in on_ranks(size, save))
    one, three = (tmp_path / name / "step_00000003" for name in "13")
    names = sorted(path.name for path in one.glob("table_*"))
    assert names == sorted(path.name for path in three.glob("table_*"))
    assert all((one / name).read_bytes() == (three / name).read_bytes() for name in names)
    whole = {"t": made()}
    load_whole(whole, one, CPU)
    rows = on_ranks(1, save)[0][1]
    assert torch.equal(whole["t"].weight, rows)
    found = list(read_rows(checkpoint.read(three)))
    assert torch.equal(torch.cat([v for _, _, key, v in found if key == "weight"]), rows)
    assert {first for _, first, _, _ in found} == {part.first for part in cuts(whole["t"])}


def test_a_damaged_file_is_named(tmp_path):
    def save(transport):
        return written(trained(transport)[0], transport, tmp_path)

    folder = on_ranks(1, save)[0]
    table, path = made(), folder / "table_0.00000.safetensors"
    files = checkpoint.read_manifest(folder)["files"]
    there = read_fields(table, path, cuts(table)[0], files)
    assert set(there) == {"weight", "mean", "square", "steps"}
    with pytest.raises(CheckpointError, match=r"is damaged: holds .* must hold float32"):
        read_fields(made(optimizer=RowSGD()), path, cuts(table)[0], files)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"table_0.00000.safetensors: is damaged: its SHA-256"
    ):
        checkpoint.read(folder)

    def load(transport):
        tables = tables_on(transport, made())
        with pytest.raises(CheckpointError, match=r"table_0.00000.safetensors: is damaged"):
            tables.load(folder if transport.rank == 0 else None)

    on_ranks(2, load)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"table_0.00000.safetensors: cannot be read"):
        checkpoint.read(folder)


KEYS = ("num_rows", "dim", "files", "optimizer", "schedule")


def scheduled(name):
    table = made()
    table.schedule = ls.ScheduleConfig(name=name)
    return described({"t": table})


@dataclass(frozen=True)
class Odd(RowOptimizer):
    """Steps rows otherwise than by themselves."""

    how: str = ""
    period: int = 10

    def widths(self, dim):
        return {"count": 1}

    def _update(self, state, gradients):
        match self.how:
            case "together":
                return gradients - gradients.mean(0)
            case "draws":
                return gradients + torch.randn_like(gradients)
            case "counts":
                COUNTED.append(1)
                return gradients / len(COUNTED)
            case "shape":
                return torch.ones(7)
            case "infinite":
                return gradients * float("nan")
        return gradients * state["count"].add_(1.0)


COUNTED = []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("together", "steps a row differently when others are stepped beside it"),
        ("draws", "made other rows when it stepped the same again"),
        ("counts", "made other rows when it stepped the same again"),
        ("shape", "cannot step rows: RuntimeError"),
        ("infinite", "makes weight NaN or infinite"),
    ],
)
def test_optimizers_step_rows_by_themselves(how, said):
    check_row_optimizer("t", made(optimizer=Odd()))
    for optimizer in (RowAdam(), RowSGD(momentum=0.9)):
        check_row_optimizer("t", made(optimizer=optimizer))
    with pytest.raises(TaskError, match=r"the optimizer of table t \(Odd\): " + said):
        check_row_optimizer("t", made(optimizer=Odd(how=how)))


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({}, "is of another model: it has no table t"),
        ({"t": {}, "u": {}}, "num_rows of table t is None there, 75 here"),
        ([], "is damaged: tables is no object"),
        ({"t": []}, "is damaged: tables: t is no object"),
        (described({"t": made(74)}), "num_rows of table t is 74 there, 75 here"),
        (described({"t": made(optimizer=RowSGD(lr=0.5))}), "optimizer of table t is 'RowSGD"),
        (scheduled("linear"), "schedule of table t is {'name': 'linear'"),
        (described({"t": made(), "u": made()}), "this one has no table u"),
    ],
)
def test_other_tables_are_refused(there, said):
    there = json.loads(json.dumps(there))
    with pytest.raises(CheckpointError, match=said.replace("(", r"\(")):
        check_described({"t": made()}, there, "here", KEYS)
    check_described({"t": made()}, described({"t": made()}), "here", KEYS)


def test_batches_are_served_until_all_are_through():
    def call(transport):
        tables, found = tables_on(transport, made()), []
        mine = [(n, n) for n in range(transport.rank * 2)]
        tables.serve(
            mine,
            lambda n, b: {"t": wanted_of(0, n)},
            lambda n, b, fetched: found.append((n, fetched["t"].rows)),
        )
        return found

    whole = made().start_of(torch.arange(ROWS))
    for rank, found in enumerate(on_ranks(3, call)):
        assert [number for number, _ in found] == list(range(rank * 2))
        for number, rows in found:
            assert torch.equal(rows, whole[wanted_of(0, number)])


@pytest.mark.parametrize("where", ["wanted", "used", "both"])
def test_a_batch_that_one_rank_cannot_use_fails_on_all_ranks(where):
    def call(transport):
        tables, done = tables_on(transport, made()), []

        def wanted(number, batch):
            if where != "used" and (transport.rank, number) == (0, 2):
                raise TaskError("no such row")
            return {"t": wanted_of(0, number)}

        def use(number, batch, fetched):
            if where != "wanted" and (transport.rank, number) == (1, 1):
                raise ValueError("no such batch")
            done.append(number)

        with pytest.raises(LockstepError, match=r"no such (row|batch)") as raised:
            tables.serve([(n, n) for n in range(4)], wanted, use)
        assert raised.value.is_shared
        assert str(raised.value).startswith(("no such row", "rank 1 raised"))
        return done

    expected = {"wanted": [[0, 1]] * 3}.get(where, [[0, 1], [0], [0, 1]])
    assert on_ranks(3, call) == expected


def test_a_step_whose_rows_one_rank_does_not_know_fails_on_all():
    def call(transport):
        tables = tables_on(transport, made())

        def find():
            if transport.rank == 1:
                raise TaskError("no such row")
            return {0: {"t": wanted_of(0, 0)}}

        with pytest.raises(TaskError, match="no such row"):
            tables.fetch(0, find)
        return one_step(tables, transport, 0) > 0  # which is then done again

    assert on_ranks(3, call) == [True] * 3


def test_many_norms_come_in_two_messages(monkeypatch):
    monkeypatch.setattr("lockstep.engine.tables.step_tables._AT_ONCE", 2)
    few = [on_ranks(size, lambda t: trained(t)[1])[0] for size in (1, 3)]
    monkeypatch.undo()
    assert few == [on_ranks(1, lambda t: trained(t)[1])[0]] * 2


def test_a_step_that_fp16_skips_steps_no_rows():
    def call(transport):
        tables = tables_on(transport, made())
        before = tables.digest()
        own = range(*split(MICROBATCHES, transport.size)[transport.rank])
        tables.fetch(0, lambda: {number: {"t": wanted_of(0, number)} for number in own})
        for number in own:
            tables.of(number)["t"].rows.sum().mul(float("inf")).backward()
            tables.add(number)
        tables.reduce(0)
        assert not torch.tensor(tables.norm()).isfinite()
        assert not tables.summed()["t"].isfinite().any()
        tables.settle(0, 0, float("inf"), 1.0)
        return tables.digest() == before

    assert on_ranks(2, call) == [True, True]


def test_a_mesh_that_cuts_the_model_is_refused():
    check_tables_fit({"t": made()}, {"mesh.pp": 1, "mesh.tp": 1})
    check_tables_fit({}, {"mesh.pp": 2, "mesh.tp": 1})
    with pytest.raises(ConfigError, match=r"mesh.tp=2: a model with a SparseEmbedding \('t'\) is"):
        check_tables_fit({"t": made()}, {"mesh.pp": 1, "mesh.tp": 2})


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_digests_of_parts_add_up(num_rows, size):
    table = made(num_rows)
    layout = RowLayout(num_rows, size)
    parts = [Part.start(table, layout, owner, CPU) for owner in range(size)]
    whole = Part.start(table, RowLayout(num_rows, 1), 0, CPU)
    assert sum(part.digest() for part in parts) % 2**256 == whole.digest()
    whole.fields["weight"][0, 0] += 1
    assert sum(part.digest() for part in parts) % 2**256 != whole.digest()
