"""The ranks requested for a notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.kernel.pool_defaults import PoolDefaults, defaults_for_notebook, np_of_request


def notebook(path: Path, hvdlab: object) -> Path:
    path.write_text(json.dumps({"cells": [], "metadata": {"hvdlab": hvdlab}}))
    return path


def test_nothing_said_leaves_all_to_the_pool(tmp_path: Path) -> None:
    assert defaults_for_notebook({}, tmp_path) == PoolDefaults()


def test_the_environment_says_how_many_and_by_what(tmp_path: Path) -> None:
    environ = {"HVDLAB_NP": "4", "HVDLAB_LAUNCHER": "ssh", "HVDLAB_HOSTS": "a:2,b:2"}
    assert defaults_for_notebook(environ, tmp_path) == PoolDefaults(4, "ssh", None, "a:2,b:2")


@pytest.mark.parametrize("name", ["{directory}/a.ipynb", "a.ipynb", "below/the/root/a.ipynb"])
def test_the_notebooks_metadata_goes_first(tmp_path: Path, name: str) -> None:
    notebook(tmp_path / "a.ipynb", {"np": 3, "plane": "gloo"})
    environ = {
        "HVDLAB_NP": "8",
        "HVDLAB_LAUNCHER": "mpi",
        "JPY_SESSION_NAME": name.format(directory=tmp_path),
    }
    assert defaults_for_notebook(environ, tmp_path) == PoolDefaults(3, "mpi", "gloo", None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"metadata": 3}', '{"metadata": {"hvdlab": 3}}'])
def test_what_is_no_notebook_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.ipynb").write_text(text)
    assert defaults_for_notebook({"JPY_SESSION_NAME": "a.ipynb"}, tmp_path) == PoolDefaults()
    assert defaults_for_notebook({"JPY_SESSION_NAME": "other.ipynb"}, tmp_path) == PoolDefaults()


@pytest.mark.parametrize("np", [0, -1, "many", 2.5, True, []])
def test_a_number_that_is_none_is_refused(tmp_path: Path, np: object) -> None:
    notebook(tmp_path / "a.ipynb", {"np": np})
    with pytest.raises(InvalidRequestError, match=r"the notebook's metadata `hvdlab.np` is to be a number"):
        defaults_for_notebook({"JPY_SESSION_NAME": "a.ipynb"}, tmp_path)
    with pytest.raises(InvalidRequestError):
        np_of_request({"hvdlab": {"np": np}})


def test_a_variable_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="HVDLAB_NP is to be a number of ranks from 1, not 'x'"):
        defaults_for_notebook({"HVDLAB_NP": "x"}, tmp_path)


def test_a_launcher_that_is_no_text_is_refused(tmp_path: Path) -> None:
    notebook(tmp_path / "a.ipynb", {"launcher": 3})
    with pytest.raises(InvalidRequestError, match="is to be a text"):
        defaults_for_notebook({"JPY_SESSION_NAME": "a.ipynb"}, tmp_path)


def test_a_client_may_say_it_with_a_cell() -> None:
    assert np_of_request({"cellId": "x", "hvdlab": {"np": 2}}) == 2
    assert np_of_request({"cellId": "x"}) is None
    assert np_of_request(None) is None
