"""Actors look for the run's model on their own host."""

from pathlib import Path

from launch.services.actors import with_model_directory
from launch.settings.run_config import validate


def found(**model):
    return with_model_directory(validate({"model": model})).weights.model


def test_first_weights_are_looked_for_where_the_run_says_if_that_is_here(tmp_path):
    assert found(path=tmp_path) == tmp_path
    assert found(path=tmp_path / "elsewhere/than/here") is None
    assert found() is None
    config = validate({"model": {"path": tmp_path}, "actors": {"weights": {"model": Path("mine")}}})
    assert with_model_directory(config).weights.model == Path("mine")
