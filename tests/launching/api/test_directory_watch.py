"""A missing run directory is reported until the run ends."""

import shutil

from lockstep.engine.checkpoint.run_directory import DIRECTORY_LOST, DirectoryWatch, RunDirectory


def test_it_is_told_again_in_a_step_that_is_done_again(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.lock()
    here = DirectoryWatch(directory)
    assert here.reason() == ""
    shutil.rmtree(directory.path)
    gone = DirectoryWatch(directory)
    assert [gone.reason(), gone.reason()] == [DIRECTORY_LOST, DIRECTORY_LOST]
    directory.close()
