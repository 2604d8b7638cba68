"""The variables that ranks on other hosts get."""

from __future__ import annotations

from hvdlab.launch.environment import exported

ENVIRON = {"PATH": "/bin", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x", "DB_PASSWORD": "y", "SSH_TTY": "z"}


def test_variables_of_this_host_stay_here() -> None:
    assert set(exported(ENVIRON)) == {"PATH", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"}


def test_variables_that_the_user_excludes_stay_here() -> None:
    excluding = {**ENVIRON, "HVDLAB_ENV_EXCLUDE": "AWS_*, *_PASSWORD,"}
    assert set(exported(excluding)) == {"PATH", "HVDLAB_ENV_EXCLUDE"}
