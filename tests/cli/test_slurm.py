"""`lockstep slurm` without a SLURM: what it writes and what it refuses."""

import subprocess
from pathlib import Path

import pytest
from tests.conftest import target

GIVEN = ("slurm", "digits", "steps=20", "--time", "30")


def test_writes_a_script_that_bash_can_read(here, tmp_path):
    done = here(*GIVEN, "--nodes", "2", "--ntasks-per-node", "3", "threads=2")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "digits.sbatch"
    assert done.stdout == f"wrote {path}\n"
    text = path.read_text()
    assert "#SBATCH --cpus-per-task=2\n" in text
    assert "export OMP_NUM_THREADS=2\n" in text
    assert " -n 6 " in text
    assert "--with-ft ulfm" in text
    assert "export OMPI_MCA_coll='^han'\n" in text
    assert "--resume steps=20 threads=2" in text.replace(" \\\n   ", "")
    subprocess.run(["bash", "-n", path], check=True)


def test_a_script_of_the_user_gets_everything_in_its_environment(here, tmp_path):
    (tmp_path / "my script.py").write_text("")
    done = here("slurm", "my script.py", "lr=0.1", "--time", "30", "--run-dir", "it's mine")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "my_script.sbatch").read_text()
    assert "export LOCKSTEP_SESSION=" in text
    assert "lr=0.1" in text
    assert "-m lockstep" not in text
    subprocess.run(["bash", "-n", tmp_path / "my_script.sbatch"], check=True)


def test_writes_over_its_own_script_only(here, tmp_path):
    assert here(*GIVEN, "--output", "job").returncode == 0
    assert here(*GIVEN, "--output", "job", "lr=0.5").returncode == 0
    assert "lr=0.5" in (tmp_path / "job").read_text()
    (tmp_path / "mine").write_text("#!/bin/bash\necho mine\n")
    done = here(*GIVEN, "--output", "mine")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "choose another --output" in done.stderr
    assert (tmp_path / "mine").read_text() == "#!/bin/bash\necho mine\n"


def test_without_sbatch_the_script_is_written(here, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    done = here(*GIVEN, "--submit")
    assert done.returncode == 2
    assert "slurm-client" in done.stderr
    assert f"`sbatch {tmp_path}/digits.sbatch`" in done.stderr
    assert (tmp_path / "digits.sbatch").exists()


@pytest.mark.parametrize("code", [0, 1])
def test_submits(here, tmp_path, monkeypatch, code):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\necho '17;cluster'; echo 'Invalid account' >&2; exit {code}\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = here(*GIVEN, "--submit")
    assert done.returncode == (2 if code else 0)
    assert ("submitted job 17\n" in done.stdout) == (not code)
    assert ("Invalid account; the script is written" in done.stderr) == bool(code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "0"), "--nodes 0: must be at least 1"),
        (("--ntasks-per-node", "-2"), "--ntasks-per-node -2: must be at least 1"),
        (("--cpus-per-task", "0"), "--cpus-per-task 0: must be at least 1"),
        (("--cpus-per-task", "1", "threads=2"), "is less than threads=2"),
        (("--time", "1h"), "--time 1h: is no time limit"),
        (("--time", "1", "--signal-before", "60"), "no time to train would be left"),
        (("--signal-before", "70000"), "must be at most 65535"),
        (("--partition", "a b"), "--partition 'a b': must be one word"),
        (("--account", "x\n#SBATCH --nodes=9"), "must be one word"),
        (("learning=1",), "unknown key 'learning'"),
        (("--run-dir", "a\nb"), "has a line break"),
        (("--output", "/proc/none/job"), "cannot be written"),
    ],
)
def test_refuses_in_one_message(here, tmp_path, arguments, message):
    done = here(*GIVEN, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["nothing", "nothing.py", target("Nothing")])
def test_refuses_a_target_that_is_not_there(here, tmp_path, wrong):
    done = here("slurm", wrong, "--time", "30")
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)
    assert list(tmp_path.iterdir()) == []


EXAMPLES = Path(__file__).parents[2] / "examples" / "ufs"


@pytest.mark.parametrize(("name", "nodes"), [("one-node", 1), ("two-nodes", 2), ("four-nodes", 4)])
def test_job_files_have_the_modes(here, tmp_path, name, nodes):
    done = here("slurm", "ufs", "seed=1", "--job", EXAMPLES / f"{name}.yaml")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "ufs.sbatch").read_text()
    for option in (f"nodes={nodes}", "ntasks-per-node=1", "cpus-per-task=40", "time=4:00:00"):
        assert f"#SBATCH --{option}\n" in text
    for library in ("OMP", "MKL", "NUMEXPR"):
        assert f"export {library}_NUM_THREADS=40\n" in text
    assert "say \"what:\" 'ufs threads=40 seed=1'\n" in text


def test_the_command_line_comes_before_a_job_file(here, tmp_path):
    job = ("--job", EXAMPLES / "two-nodes.yaml", "--cpus-per-task", "2", "--time", "5")
    assert here("slurm", "ufs", "threads=2", *job).returncode == 0
    text = (tmp_path / "ufs.sbatch").read_text()
    for option in ("nodes=2", "cpus-per-task=2", "time=5"):
        assert f"#SBATCH --{option}\n" in text
    assert "export OMP_NUM_THREADS=2\n" in text


def test_threads_of_a_job_file_give_way_to_fewer_cores_of_the_command_line(here, tmp_path):
    job = ("--job", EXAMPLES / "two-nodes.yaml", "--cpus-per-task", "1")
    done = here("slurm", "ufs", *job)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "ufs.sbatch").read_text()
    assert "#SBATCH --cpus-per-task=1\n" in text
    assert "export OMP_NUM_THREADS=1\n" in text
    assert "threads=1" in text
    assert "threads=40" not in text
    # What is asked for beside it on the command line is an error as before.
    done = here("slurm", "ufs", "threads=40", *job)
    assert (done.returncode, "less than threads=40" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: 0", "nodes=0"),
        ("time: 4:00:00", "time=14400"),
        ("node: 2", "unknown key 'node'; did you mean nodes?"),
        ("nodes: 2", "--time: is missing"),
        ("{", "is not valid YAML"),
    ],
)
def test_job_files_that_do_not_fit(here, tmp_path, text, message):
    (tmp_path / "job.yaml").write_text(text)
    done = here("slurm", "digits", "--job", "job.yaml")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "digits.sbatch").exists()


def test_a_doctor_job_trains_nothing(here, tmp_path):
    done = here("slurm", "doctor", "--job", EXAMPLES / "communication.yaml")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "doctor.sbatch").read_text()
    assert "#SBATCH --no-requeue\n" in text
    assert "--signal" not in text
    assert "lockstep doctor --ranks 2" in text.replace(" \\\n   ", "")
    subprocess.run(["bash", "-n", tmp_path / "doctor.sbatch"], check=True)
    done = here("slurm", "doctor", "lr=1", "--time", "5")
    assert (done.returncode, done.stderr) == (2, "error: 'lr=1': the doctor has no config\n")


def test_killed_ranks_are_replaced_if_asked_for(here, tmp_path):
    (tmp_path / "job.yaml").write_text('time: "30"\nreplace: 3\n')
    assert here("slurm", "digits", "--job", "job.yaml").returncode == 0
    assert "LOCKSTEP_MPI_REPLACE=3" in (tmp_path / "digits.sbatch").read_text()
    done = here("slurm", "doctor", "--time", "30", "--replace", "1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--replace 1: the doctor" in done.stderr


def test_options_are_passed_through_and_a_site_adds_its_lines(here, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    site = tmp_path / "config" / "lockstep" / "sites" / "big.sh"
    site.parent.mkdir(parents=True)
    site.write_text("#SBATCH --qos=high\nmodule load gcc\n")
    done = here(*GIVEN, "--setup", "big", "--", "--gpus-per-task=1")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "digits.sbatch").read_text()
    assert "#SBATCH --qos=high\n#SBATCH --gpus-per-task=1\n\nmodule load gcc\n\n" in text
    assert text.index("module load") < text.index("export OMP_NUM_THREADS")
    assert "steps=20" in text
    (tmp_path / "job.yaml").write_text('time: "5"\nsbatch: ["--mem=1G"]\nsetup: lines.sh\n')
    (tmp_path / "lines.sh").write_text("export A=1")
    assert here("slurm", "digits", "--job", "job.yaml").returncode == 0
    text = (tmp_path / "digits.sbatch").read_text()
    assert "#SBATCH --mem=1G\n\nexport A=1\n" in text
    done = here(*GIVEN, "--setup", "nowhere")
    assert (done.returncode, "sites/nowhere.sh: cannot be read" in done.stderr) == (2, True)
    done = here(*GIVEN, "--", "--nodes=3")
    assert (done.returncode, "use --nodes" in done.stderr) == (2, True)


def test_a_sites_options_are_defaults(here, tmp_path):
    (tmp_path / "site.sh").write_text("#SBATCH --qos=low\n#SBATCH --exclusive\n")
    (tmp_path / "job.yaml").write_text("sbatch: [--mem=1G, --qos=middle]\nsetup: ./site.sh\n")
    done = here(*GIVEN, "--job", "job.yaml", "--", "--qos=high")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "digits.sbatch").read_text()
    assert "#SBATCH --qos=high\n#SBATCH --exclusive\n#SBATCH --mem=1G\n" in text
    assert text.count("--qos") == 1
    (tmp_path / "site.sh").write_text("a=1\n#SBATCH --nodes=3\n")
    done = here(*GIVEN, "--setup", "./site.sh")
    assert "error: site.sh, line 2: '--nodes=3': is set by lockstep slurm: use" in done.stderr
    (tmp_path / "job.yaml").write_text("sbatch: [--mem=1G, --mem=2G]\n")
    done = here(*GIVEN, "--job", "job.yaml")
    assert "error: sbatch of the job file: --mem: comes twice" in done.stderr


def test_threads_follow_the_cores_of_a_rank_but_for_a_run_that_has_begun(here, tmp_path):
    assert here(*GIVEN, "--cpus-per-task", "2", "--run-dir", "run").returncode == 0
    text = (tmp_path / "digits.sbatch").read_text()
    assert "threads=2" in text.replace(" \\\n   ", "").split("lockstep train")[1]
    assert "export OMP_NUM_THREADS=2\n" in text
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("threads: 1\n")
    assert here(*GIVEN, "--cpus-per-task", "4", "--run-dir", "run").returncode == 0
    text = (tmp_path / "digits.sbatch").read_text()
    assert "threads=1" in text.replace(" \\\n   ", "").split("lockstep train")[1]
    assert "#SBATCH --cpus-per-task=4\n" in text
    assert here(*GIVEN, "--cpus-per-task", "4", "threads=3").returncode == 0
    assert "threads=3" in (tmp_path / "digits.sbatch").read_text()
