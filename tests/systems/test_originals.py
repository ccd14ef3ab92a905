"""`lockstep import`: what the programs that the systems follow have written, by the same numbers.

The originals are made here from their formats, and each import is compared with a few lines of
NumPy or torch of the original's own formulas.
"""

from __future__ import annotations

import json
import math
import pickle
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from tests.conftest import slow
from torch import Tensor, nn

import lockstep as ls
from lockstep.engine.checkpoint.format import read_model
from lockstep.launching import foreign_files
from lockstep.launching.systems import ReadsOriginals, System, readers_of_originals
from lockstep.systems.hrm import SYSTEM as HRM
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.quantum import SYSTEM as QUANTUM
from lockstep.systems.quantum.config import TRAIN
from lockstep.systems.sketched import SYSTEM as SKETCHED
from lockstep.systems.ufs import SYSTEM as UFS
from lockstep.systems.ufs.config import UfsConfig
from lockstep.systems.ufs.fields.rows import Scale
from lockstep.systems.ufs.model import SeaIceNet

Array = Any
NAMES = [
    "sst",
    "sss",
    "tair",
    "tsfc",
    "hi",
    "hs",
    "sice",
    "uocn",
    "vocn",
    "uatm",
    "vatm",
    "qref",
    "flwdn",
    "fswdn",
]


# The quantum transformer


def angles_file(folder: Path, epoch: int = 49, /, **changed: Any) -> Path:
    rng = np.random.default_rng(epoch)
    values = {"params": 0.3 * rng.normal(size=96), "epoch": epoch, "lr": 0.02, "random_state": 7}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"qtransformer_ckpt_epoch{epoch}.npz"
    np.savez(
        path, **{name: value for name, value in (values | changed).items() if value is not None}
    )
    return path


def rotation(angle: float, axis: str) -> Array:
    c, s = math.cos(angle / 2), math.sin(angle / 2)
    return {
        "x": np.array([[c, -1j * s], [-1j * s, c]]),
        "y": np.array([[c, -s], [s, c]]),
        "z": np.array([[c - 1j * s, 0], [0, c + 1j * s]]),
    }[axis]


def unitary(angles: Array) -> Array:
    """The matrix of [L, 2, 1, 4, 3] angles on two qubits, the first one the lowest bit."""
    whole = np.eye(4, dtype=complex)
    flip = {0: [0, 3, 2, 1], 1: [0, 1, 3, 2]}  # CX of control 0 on 1, and of 1 on 0
    for layer in angles:
        for control, block in enumerate(layer[:, 0]):
            for first in (0, 2):
                for qubit, turns in zip(
                    (control, 1 - control), block[first : first + 2], strict=True
                ):
                    one = reduce(
                        lambda m, at: rotation(at[1], at[0]) @ m,
                        zip("xyz", turns, strict=True),
                        np.eye(2),
                    )
                    whole = (np.kron(one, np.eye(2)) if qubit else np.kron(np.eye(2), one)) @ whole
                whole = whole[flip[control]]
    return whole


def quantum_loss(params: Array, vectors: dict[str, Array], sentences: list[str]) -> float:
    V, W = (unitary(part.reshape(-1, 2, 1, 4, 3)) for part in np.split(params, 2))
    losses = []
    for sentence in sentences:
        states = []
        for p, word in enumerate(sentence.split()):
            k = np.arange(2)
            angle = p * 10000.0 ** (-2 * k / 4)
            t = vectors[word] + np.stack([np.sin(angle), np.cos(angle)], 1).ravel()
            states.append(t / np.linalg.norm(t))
        amplitude = 0
        for i in range(1, len(states)):
            psi = sum(np.outer(t, t) for t in states[:i])
            psi = psi / np.linalg.norm(psi)
            amplitude += states[i - 1].conj() @ W @ psi @ V.T @ states[i].conj()
        amplitude /= len(states) - 1
        losses.append(-math.log(abs(amplitude) ** 2 + 1e-12))
    return float(np.mean(losses))


def quantum_gradient(params: Array, vectors: dict[str, Array], chosen: list[int]) -> Array:
    """Some elements of that of the loss of the training sentences, by central differences."""
    shifts = 1e-5 * np.eye(len(params))[chosen]
    losses = [[quantum_loss(params + s * d, vectors, list(TRAIN)) for s in (1, -1)] for d in shifts]
    return np.array([(above - below) / 2e-5 for above, below in losses])


def test_angles_of_the_mpi_script(here: Any, tmp_path: Path) -> None:
    angles_file(tmp_path / "checkpoints", 9)
    path = angles_file(tmp_path / "checkpoints")
    done = here("import", "checkpoints", "--to", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "96 angles" in done.stdout.replace("2 layers: ", "")
    assert "50 epochs, lr 0.02, seed 7" in done.stdout
    loaded = ls.load(tmp_path / "run")
    model: Any = loaded.model
    assert (loaded.config.lr, loaded.config.seed, loaded.step) == (0.02, 7, 50)
    vectors = dict(zip(model.words, model.embeddings.numpy(), strict=True))
    wanted = quantum_loss(np.load(path)["params"], vectors, list(TRAIN))
    done = here("eval", "run", "--split", "train")
    assert f"{wanted:.6g}" in done.stdout

    # Written again by `quantum export`, read again, and trained from.
    assert here("quantum", "export", "run", "--output", "again.npz").returncode == 0
    again = np.load(tmp_path / "again.npz")
    assert np.array_equal(again["params"], np.load(path)["params"])
    assert (again["epoch"], again["lr"], again["seed"]) == (50, 0.02, 7)
    assert (tmp_path / "again.csv").read_text() == "epoch,loss,grad_norm,seconds\n"
    assert here("import", "again.npz", "--to", "second").returncode == 0
    second: Any = ls.load(tmp_path / "second")
    assert second.step == 50
    assert torch.equal(second.model.embeddings, model.embeddings)
    for source in (path, "again.npz"):
        done = here(
            "train", "quantum", "--from", str(source), "epochs=1", "--run-dir", str(source)[-9:-4]
        )
        assert done.returncode == 0, done.stderr
    done = here("resume", "run")
    assert (done.returncode, "lockstep train RECIPE --from RUN_DIR" in done.stderr) == (2, True)


def test_a_step_from_a_file_is_gradient_descent_from_its_angles(here: Any, tmp_path: Path) -> None:
    path = angles_file(tmp_path)
    done = here("train", "quantum", "--from", path.name, "epochs=1", "--run-dir", "one")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())
    assert (config["num_layers"], config["lr"], config["seed"]) == (2, 0.02, 7)
    # Where a key is given, it is not the file's.
    done = here("train", "quantum", "--from", path.name, "epochs=1", "lr=0", "--run-dir", "still")
    still: Any = ls.load(tmp_path / "still", "latest").model
    one: Any = ls.load(tmp_path / "one", "latest").model
    assert np.array_equal(still.angles.detach().flatten().numpy(), np.load(path)["params"])
    change = (one.angles - still.angles).detach().flatten().numpy()
    vectors = dict(zip(still.words, still.embeddings.numpy(), strict=True))
    chosen = [*range(0, len(change), 8)]
    rates = -change[chosen] / quantum_gradient(np.load(path)["params"], vectors, chosen)
    assert rates == pytest.approx(rates[0], rel=1e-5)
    assert 0 < rates[0] < 0.02
    assert np.linalg.norm(change) == pytest.approx(0.02)  # the gradient's norm is clipped at 1
    done = here("train", "digits", "--from", path.name)
    assert (done.returncode, "is of the recipe quantum" in done.stderr) == (2, True)
    assert f"lockstep train quantum --from {path.name} goes on with it" in done.stderr


# The sea-ice emulator


def emulator_state(widths: tuple[int, ...] = (14, 16, 8, 1)) -> dict[str, Tensor]:
    torch.manual_seed(1)
    state = {}
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        layer = nn.Linear(inputs, outputs)
        state |= {f"network.{2 * number}.{k}": v.detach() for k, v in layer.state_dict().items()}
    return state | {
        "input_mean": torch.randn(widths[0]),
        "input_std": torch.rand(widths[0]) + 0.5,
        "output_mean": torch.tensor([0.4]),
        "output_std": torch.tensor([0.3]),
    }


def emulator_checkpoint(**changed: Any) -> dict[str, Any]:
    return {
        "model_state_dict": emulator_state(),
        "optimizer_state_dict": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{}]},
        "history": {"val_loss": [0.5, 0.2, 0.3]},
        "config": {
            "variables": {"input_variables": NAMES, "output_variables": ["aice"]},
            "model": {"hidden_size": 16, "hidden_layers": 2},
            "training": {"epochs": 3, "optimizer": {"type": "adam", "learning_rate": 1e-4}},
        },
    } | changed


def emulated(state: dict[str, Tensor], x: Tensor) -> Tensor:
    h = (x - state["input_mean"]) / state["input_std"]
    last = max(int(name.split(".")[1]) for name in state if name.startswith("network"))
    for number in range(0, last + 1, 2):
        h = h @ state[f"network.{number}.weight"].t() + state[f"network.{number}.bias"]
        h = F.gelu(h) if number < last else h
    return h * state["output_std"] + state["output_mean"]


@pytest.mark.parametrize(
    ("content", "items"),
    [
        (emulator_checkpoint(), ()),
        slow(
            {f"module.{k}": v for k, v in emulator_state().items()},
            (f"inputs=[{', '.join(NAMES)}]", "outputs=[aice]"),
        ),
    ],
    ids=["checkpoint", "state dict of DDP"],
)
def test_networks_of_the_emulator(
    here: Any, tmp_path: Path, content: dict[str, Any], items: tuple[str, ...]
) -> None:
    torch.save(content, tmp_path / "best_model.pt")
    for name in ("resource.py", "torch.py"):  # no module beside the file is run
        (tmp_path / name).write_text("raise SystemExit('was run')")
    done = here("import", "best_model.pt" if items else ".", "--to", "run", *items)
    assert (done.returncode, done.stderr) == (0, "")
    assert "14 inputs, 1 outputs, hidden layers [16, 8]" in done.stdout
    assert ("3 epochs; least loss on val 0.2, after 2" in done.stdout) == ("config" in content)
    state, x = emulator_state(), torch.randn(5, 14)
    net = SeaIceNet(NAMES, ["aice"], (16, 8), Scale(np.ones(15), np.ones(15)), squash=False)
    net.load_state_dict(read_model(tmp_path / "run" / "checkpoints" / "step_00000000").model)
    assert torch.allclose(net.predict(x), emulated(state, x), rtol=1e-5, atol=1e-6)
    if items:
        done = here("export", "run", "out")
        assert done.returncode == 0, done.stderr
        script: Any = torch.jit.load(str(tmp_path / "out" / "emulator.ts"))  # type: ignore[no-untyped-call]
        assert torch.allclose(script(x), emulated(state, x), rtol=1e-5, atol=1e-6)


EMULATOR_YAML = """
data: {validation_split: 0.2, num_workers: 2, max_patterns: 5000, mask_mode: both, ice_file: a.nc}
variables: {input_variables: [sst, sss, tair, hi, hs], output_variables: [aice]}
model: {hidden_size: 32, hidden_layers: 3}
training:
  epochs: 100
  batch_size: 500
  loss_function: huber
  optimizer: {type: sgd, learning_rate: 1e-4, momentum: 0.9}
  scheduler: {type: plateau, factor: 0.25, patience: 7}
  early_stopping_patience: 50
output: {model_dir: models}
"""


def test_config_and_statistics_of_the_emulator(here: Any, tmp_path: Path) -> None:
    (tmp_path / "config_aice.yaml").write_text(EMULATOR_YAML)
    done = here("import", "config_aice.yaml", "lr=0.01", "--to", "ice.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "not taken over: data.num_workers, output.model_dir" in done.stdout
    config: UfsConfig = ls.config.load(UfsConfig, tmp_path / "ice.yaml")
    assert (config.inputs, config.hidden, config.lr) == (
        ("sst", "sss", "tair", "hi", "hs"),
        (32,) * 3,
        0.01,
    )
    assert (config.optimizer.name, config.optimizer.momentum, config.loss) == ("sgd", 0.9, "huber")
    assert (config.schedule.name, config.schedule.gamma, config.schedule.patience) == (
        "plateau",
        0.25,
        7,
    )
    assert (config.history, config.val_fraction, config.early_stopping.patience) == (
        ("a.nc",),
        0.2,
        50,
    )
    assert not config.squash

    rows = np.random.default_rng(0).normal(size=(20, 2))
    moments = {"input_mean": rows.mean(0), "input_std": rows.std(0)}
    moments |= {"output_mean": np.zeros(1), "output_std": np.ones(1)}
    extra = {"inputs": rows, "metadata": np.array({"names": ["a"]}, object)}
    np.savez(tmp_path / "rows.npz", **moments, **extra)  # type: ignore[arg-type]
    done = here("import", "rows.npz")
    assert (done.returncode, "inputs: float64 [20, 2]" in done.stdout) == (0, True)
    assert "metadata" not in done.stdout
    np.savez(tmp_path / "rows.npz", **(moments | {"input_std": np.ones(3)}))
    assert "input_std is [3], not [2]" in here("import", "rows.npz").stderr


# The hierarchical reasoning model

DIM, BLOCKS, HEADS = 64, 2, 2


def hrm_state(vocabulary: int = 6, rows: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(2)

    def linear(inputs: int, outputs: int) -> Tensor:
        return torch.randn(outputs, inputs) * inputs**-0.5

    state = {
        "H_init": torch.randn(DIM).bfloat16(),
        "L_init": torch.randn(DIM).bfloat16(),
        "embed_tokens.embedding_weight": linear(DIM, vocabulary),
        "lm_head.weight": linear(DIM, vocabulary),
        "q_head.weight": linear(DIM, 2),
        "q_head.bias": torch.tensor([0.1, -0.2]),
        "puzzle_emb.weights": torch.randn(rows, DIM),
    }
    for module in "HL":
        for block in range(BLOCKS):
            name = f"{module}_level.layers.{block}."
            state |= {
                name + "self_attn.qkv_proj.weight": linear(DIM, 3 * DIM),
                name + "self_attn.o_proj.weight": linear(DIM, DIM),
                name + "mlp.gate_up_proj.weight": linear(DIM, 512),
                name + "mlp.down_proj.weight": linear(256, DIM),
            }
    return state


def saved_hrm(path: Path, state: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save({f"_orig_mod.model.inner.{name}": t for name, t in state.items()}, path)


def solved(state: dict[str, Tensor], tokens: Tensor, segments: int) -> Tensor:
    """Logits of the published model after some segments of 2 x 2 cycles, in float32."""

    def norm(h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)

    length = tokens.shape[1] + 1
    size = DIM // HEADS
    angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, size, 2) / size))
    cos, sin = (f(torch.cat([angle, angle], -1))[:, None] for f in (torch.cos, torch.sin))

    def turned(q: Tensor) -> Tensor:
        return q * cos + torch.cat([-q[..., size // 2 :], q[..., : size // 2]], -1) * sin

    def module(name: str, h: Tensor, injection: Tensor) -> Tensor:
        h = h + injection
        for block in range(BLOCKS):
            of_block = f"{name}_level.layers.{block}."
            w = {n[len(of_block) : -7]: t for n, t in state.items() if n.startswith(of_block)}
            qkv = (h @ w["self_attn.qkv_proj"].t()).view(len(h), length, 3 * HEADS, size)
            q, k, v = qkv[:, :, :HEADS], qkv[:, :, HEADS : 2 * HEADS], qkv[:, :, 2 * HEADS :]
            scores = torch.einsum("bihd,bjhd->bhij", turned(q), turned(k)) * size**-0.5
            mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)
            h = norm(h + mixed @ w["self_attn.o_proj"].t())
            gate, up = (h @ w["mlp.gate_up_proj"].t()).chunk(2, -1)
            h = norm(h + (F.silu(gate) * up) @ w["mlp.down_proj"].t())
        return h

    rows = state["puzzle_emb.weights"][torch.zeros(len(tokens), dtype=torch.int64)]
    x = torch.cat([rows[:, None], state["embed_tokens.embedding_weight"][tokens]], 1) * DIM**0.5
    z_H, z_L = (state[n].float().expand(len(tokens), length, DIM) for n in ("H_init", "L_init"))
    for _ in range(segments):
        for _ in range(2):
            for _ in range(2):
                z_L = module("L", z_L, z_H + x)
            z_H = module("H", z_H, z_L)
    return (z_H @ state["lm_head.weight"].t())[:, 1:]


def test_checkpoints_and_datasets_of_the_hierarchical_model(here: Any, tmp_path: Path) -> None:
    made = here("hrm", "data", "sudoku", "data", "--size", "4", "--train", "20", "--test", "6")
    assert made.returncode == 0, made.stderr
    done = here("import", "data")
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 examples of 16 tokens (of 6)" in done.stdout
    assert "lockstep train hrm data_dir=data" in done.stdout

    state = hrm_state()
    saved_hrm(tmp_path / "old" / "step_10", state | {"H_init": torch.zeros(DIM)})
    saved_hrm(tmp_path / "old" / "step_120", state)
    arch = {"H_cycles": 2, "L_cycles": 2, "num_heads": HEADS, "halt_max_steps": 3, "expansion": 4}
    arch |= {"loss": {"loss_type": "softmax_cross_entropy"}, "forward_dtype": "float32"}
    known = {"arch": arch, "lr": 1e-4, "lr_warmup_steps": 5, "data_path": "data", "beta2": 0.95}
    (tmp_path / "old" / "all_config.yaml").write_text(yaml.safe_dump(known | {"weight_decay": 1.0}))
    done = here("import", "old", "--to", "run")
    assert (done.returncode, done.stderr) == (0, "")
    loaded = ls.load(tmp_path / "run")
    model: Any = loaded.model
    task: Any = loaded.task
    config: Any = loaded.config
    assert isinstance(config, HrmConfig)
    assert (loaded.step, config.eval_segments, config.token_loss) == (120, 3, "softmax")
    tokens, labels = (tensor.long() for tensor in task.dataset("val").tensors[:2])
    with torch.no_grad():
        answers = task.solve(model, tokens, torch.zeros(len(tokens), dtype=torch.int64))
        wanted = [solved(state, tokens, segments) for segments in (1, 2, 3)]
    for ours, theirs in zip(answers.logits, wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-4)
    done = here("eval", "run", "--split", "val")
    right = float((wanted[-1].argmax(-1) == labels).float().mean())
    assert f"token_accuracy   {right:.6g}" in done.stdout
    keys = ("--config", "run/config.yaml", "steps=1", "lr=0", "puzzle_lr=0", "batch_size=8")
    assert here("train", "hrm", *keys, "--from", "run", "--run-dir", "on").returncode == 0
    on: Any = ls.load(tmp_path / "on", "latest").model
    assert torch.equal(on.puzzles.weight, state["puzzle_emb.weights"])
    assert torch.equal(on.H.blocks[0].mixer.qkv.weight, model.H.blocks[0].mixer.qkv.weight)


# Panther's layers


def panther_state(sizes: tuple[int, ...], ranks: tuple[int, ...], terms: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    state = {}
    for number, ((n, m), k) in enumerate(zip(pairwise(sizes), ranks, strict=True)):
        parts = {
            "S1s": torch.randn(terms, n, k),
            "S2s": torch.randn(terms, k, m),
            "U1s": torch.randn(terms, k, m).sign() * k**-0.5,
            "U2s": torch.randn(terms, n, k).sign() * k**-0.5,
            "bias": torch.randn(m),
        }
        state |= {f"model.{2 * number}.{name}": tensor for name, tensor in parts.items()}
    return state


def panther(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    S1, S2, U1, U2 = (state[f"{name}.{part}"] for part in ("S1s", "S2s", "U1s", "U2s"))
    terms = [x @ s1 @ u1 + x @ u2 @ s2 for s1, s2, u1, u2 in zip(S1, S2, U1, U2, strict=True)]
    return torch.stack(terms).mean(0) / 2 + state[f"{name}.bias"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(8, 8, 8), slow((32, 19, 12))], ids=["one rank", "ratios"])
def test_perceptrons_of_panther(here: Any, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    state = panther_state((64, 32, 16, 10), ranks, 2)
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "p.pt")
    done = here("import", "p.pt", "--to", "run")
    assert (done.returncode, done.stderr) == (0, "")
    model = ls.load(tmp_path / "run").model
    x = torch.randn(7, 1, 8, 8)
    h = panther(state, "model.0", x.flatten(1)).relu()
    h = panther(state, "model.4", panther(state, "model.2", h).relu())
    with torch.no_grad():
        assert torch.allclose(model(x), h, rtol=1e-4, atol=1e-3)
    done = here("train", "sketched", "--from", "p.pt", "steps=1", "lr=0", "--run-dir", "on")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert torch.equal(ls.load(tmp_path / "on", "latest").model(x), model(x))


def test_single_layers_of_panther_become_weights(here: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = {n.removeprefix("model.0."): t for n, t in panther_state((12, 5), (3,), 2).items()}
    torch.save(state, tmp_path / "layer.pt")
    done = here("import", "layer.pt", "--to", "layer.safetensors")
    assert (done.returncode, done.stderr) == (0, "")
    layer = ls.sketch.SKLinear(12, 5, 2, 3, sketch="data")
    layer.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = torch.randn(4, 12)
    named = {f"a.{name}": tensor for name, tensor in state.items()}
    assert torch.allclose(layer(x), panther(named, "a", x), rtol=1e-4, atol=1e-4)


# What cannot be read


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


IN_A_PROCESS_OF_THEIR_OWN = (
    "evil_zip.pt", "turned.pt", "text.pt", "short.pt", "long.pt", "nan.pt", "relu.pt",
    "unnamed.pt", "step_7", "lacking.pt",
)  # fmt: skip
"""Files whose readers start one more process; others of this kind are read in fast tests."""


def bad_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Files by name, and what is said of them."""
    whole = angles_file(folder).read_bytes()
    torch.save(emulator_checkpoint(), folder / "whole.pt")
    network = (folder / "whole.pt").read_bytes()
    for name, content in {
        "empty.npz": b"", "cut.npz": whole[:400], "cut.pt": network[:3000], "text.pt": b"hello",
        "ünïcødé.npz": whole[:400], "a.yaml": b"model: [", "b.yaml": b"- 1", "c.txt": b"hello",
    }.items():  # fmt: skip
        (folder / name).write_bytes(content)
    (folder / "nothing").mkdir()
    (folder / "others").mkdir()
    (folder / "others" / "file").touch()
    (folder / "evil.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"a": Evil()}, folder / "evil_zip.pt")
    np.savez(folder / "evil.npz", params=np.array([Evil()], object), epoch=1)
    state = emulator_state()
    for name, changed in {
        "short.pt": {k: v for k, v in state.items() if k != "network.2.bias"},
        "long.pt": state | {"network.6.weight": torch.ones(1, 1)},
        "shapes.pt": state | {"network.2.weight": torch.ones(8, 9)},
        "nan.pt": state | {"network.2.bias": torch.full((8,), math.nan)},
        "relu.pt": {k: v for k, v in state.items() if not k.startswith("output")},
        "unnamed.pt": state,
    }.items():
        torch.save(changed, folder / name)
    torch.save({n: t for n, t in hrm_state().items() if n != "lm_head.weight"}, folder / "step_7")
    panthers = panther_state((64, 10), (8,), 1)
    torch.save(panthers | {"model.0.U2s": torch.ones(1, 8, 64)}, folder / "turned.pt")
    torch.save({"model.0.S1s": torch.ones(1, 4, 2)}, folder / "lacking.pt")
    for epoch, changed in enumerate([
        {"params": np.ones(50)}, {"params": np.ones((2, 48))}, {"lr": None}, {"epoch": "x"},
        {"params": np.full(48, np.nan)}, {"lr": -1.0},
    ]):  # fmt: skip
        angles_file(folder, epoch, **changed)
    ours = "must be 24 numbers"
    npz = "qtransformer_ckpt_epoch{}.npz"
    return {
        "missing.npz": ("", "No such file"), "empty.npz": ("", "is empty"),
        "cut.npz": ("", "is damaged or cut off"), "ünïcødé.npz": ("", "is damaged or cut off"),
        "nothing": ("", "is empty"), "others": ("", "no file that a recipe can take over"),
        "c.txt": ("", "no file that a recipe can take over"), "a.yaml": ("", "is not valid YAML"),
        "b.yaml": ("", "must hold keys and values"), "text.pt": ("", "is damaged"),
        "cut.pt": ("", "is damaged"), "evil.pt": ("", "could run code"),
        "evil_zip.pt": ("", "could run code"), "evil.npz": ("", "no file that a recipe can take"),
        "short.pt": ("full", "has no layers.2.bias"), "long.pt": ("full", "has no layers.6.bias"),
        "shapes.pt": ("full", "layers.2.weight is [8, 9], must be [8, 16]"),
        "nan.pt": ("full", "layers.2.bias holds NaN"), "relu.pt": ("full", "is of a version"),
        "unnamed.pt": ("", "does not say what inputs is; add inputs=…"),
        "step_7": ("", "answer.weight"), "turned.pt": ("", "model.0.U2s is [1, 8, 64]"),
        "lacking.pt": ("", "model.0.S2s is missing"),
        npz.format(0): ("", ours), npz.format(1): ("", ours), npz.format(2): ("", "lr: must be"),
        npz.format(3): ("", "epoch: must be one"), npz.format(4): ("", "angles holds NaN"),
        npz.format(5): ("", "lr=-1.0"),
    }  # fmt: skip


@pytest.mark.parametrize("is_slow", [False, slow(True)])
def test_bad_files_are_one_message_and_leave_nothing(
    here: Any, tmp_path: Path, is_slow: bool
) -> None:
    cases = bad_files(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    for name, (kind, message) in cases.items():
        if (name in IN_A_PROCESS_OF_THEIR_OWN) is not is_slow:
            continue
        items = [f"inputs=[{', '.join(NAMES)}]", "outputs=[aice]"] if kind else []
        done = here("import", name, *items, "--to", "run")
        assert (done.returncode, done.stdout) == (2, ""), name
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1, done.stderr
        assert message in done.stderr, (name, done.stderr)
        assert name in done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_targets_that_cannot_be_written(here: Any, tmp_path: Path) -> None:
    path = angles_file(tmp_path / "ünïcødé ordner")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for target, message in {
        "there": "is there already",
        "file": "is there already",
        "file/run": "cannot be written",
        "/proc/run": "cannot be written",
    }.items():
        done = here("import", str(path), "--to", target)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr, done.stderr
    assert (tmp_path / "there" / "mine").read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "there", "ünïcødé ordner"]
    done = here("import", str(path), "--to", "größe")
    assert done.returncode == 0
    assert (tmp_path / "größe" / "run.json").exists()


def test_bombs_are_not_unpacked(here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", params=np.zeros(1 << 20))
    monkeypatch.setattr(foreign_files, "_MOST_ARRAY_BYTES", 1 << 20)
    assert "unpacks to" in here("import", "bomb.npz").stderr


@pytest.mark.slow
def test_of_a_large_file_that_nobody_knows_names_are_read_and_no_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.pt"
    saved = {"net": {"a": torch.ones(3), "b": torch.zeros(2)}, "epoch": 7}
    torch.save(saved, path)
    asked: list[tuple[str, ...]] = []
    read = foreign_files._read_apart
    monkeypatch.setattr(foreign_files, "_SMALL", 0)
    monkeypatch.setattr(
        foreign_files, "_read_apart", lambda path, *what: asked.append(what) or read(path, *what)
    )
    file = foreign_files.ForeignFile(path)
    assert file.described() == "tensors net/a, net/b"
    assert [reader(file) for reader in readers_of_originals()] == [None] * 4
    assert ("net/a" in file.tensors, "net" in file.tensors) == (True, False)
    assert (file.values["epoch"], len(file.tensors), asked) == (7, 2, [("names",)])
    assert torch.equal(file.tensors["net/a"], torch.ones(3))
    assert asked == [("names",), ()]


@pytest.mark.slow
def test_time_and_memory_are_limited(
    here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A view of one number that stands for 4 GiB, which a copy would allocate.
    torch.save({"network.0.weight": torch.zeros(1).expand(1 << 30)}, tmp_path / "bomb.pt")
    done = here("import", "bomb.pt")
    assert (done.returncode, "times its size of memory" in done.stderr) == (2, True), done.stderr
    monkeypatch.setattr(foreign_files, "_TIME_S", 0.01)
    assert "could not be read within" in here("import", "bomb.pt").stderr


def test_each_system_with_originals_keeps_the_protocol() -> None:
    import importlib

    for system in (HRM, QUANTUM, SKETCHED, UFS):
        reader: ReadsOriginals = importlib.import_module(system.originals)  # type: ignore[assignment]
        assert callable(reader.read_original)
    assert System("a:b", "c").originals == ""


def test_files_of_another_package_are_read_too(
    here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.launching import systems
    from lockstep.launching.systems import Original

    def read(file: foreign_files.ForeignFile) -> Original | None:
        return (
            Original("digits", "a note", [json.dumps(file.path.name)])
            if file.path.suffix == ".note"
            else None
        )

    known = systems.readers_of_originals
    monkeypatch.setattr(
        "lockstep.launching.api.originals.readers_of_originals", lambda: iter([read, *known()])
    )
    (tmp_path / "x.note").write_text("hello")
    done = here("import", "x.note")
    assert (done.returncode, done.stdout) == (0, 'x.note: a note\n  "x.note"\n')
