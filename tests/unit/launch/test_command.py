"""The variables that ranks on other hosts get."""

from __future__ import annotations

from hvdlab.collectives.settings import host_directory_from, host_directory_variable
from hvdlab.launch.command import excluded_by_user, exported

COORDINATOR = "tls:10.0.0.1:1234"
ENVIRON = {"PATH": "/bin", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x", "DB_PASSWORD": "y", "SSH_TTY": "z"}


def test_variables_of_this_host_stay_here() -> None:
    assert set(exported(ENVIRON)) == {"PATH", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"}


def test_variables_that_the_user_excludes_stay_here() -> None:
    excluding = {**ENVIRON, "HVDLAB_ENV_EXCLUDE": "AWS_*, *_PASSWORD,"}
    assert set(exported(excluding)) == {"PATH", "HVDLAB_ENV_EXCLUDE"}
    assert excluded_by_user(excluding) == {"AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"}
    assert excluded_by_user(ENVIRON) == set()


def test_a_job_that_a_rank_starts_does_not_use_the_directory_of_its_host() -> None:
    inherited = host_directory_variable("/tmp/hvdlab-3", COORDINATOR)
    assert host_directory_from({**inherited, "HVDLAB_COORDINATOR": COORDINATOR}) == "/tmp/hvdlab-3"
    assert host_directory_from({**inherited, "HVDLAB_COORDINATOR": "tls:127.0.0.1:1"}) is None
    assert host_directory_from({"HVDLAB_COORDINATOR": COORDINATOR}) is None
