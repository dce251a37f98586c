"""The command `pretrain` as launchers start it."""

from tests.conftest import run


def test_the_rank_option_of_the_deepspeed_launcher_is_accepted_before_the_subcommand(tmp_path):
    done = run("pretrain", "--local_rank=0", "train", tmp_path / "none.yaml")
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: {tmp_path}/none.yaml: no such file"
