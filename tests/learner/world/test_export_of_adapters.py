"""The export of a run that trains adapters."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from bus.errors import StorageError
from learner.backends.megatron.model.lora import ChunkAdapters
from learner.config.lora import LoraConfig
from learner.world import rank as of_ranks
from learner.world.rank import Rank
from tests.learner.backends.divided_adapters import trainer_of
from tests.learner.world.prefetch_settings import settings


async def test_no_rank_waits_for_adapters_that_rank_0_does_not_take(tmp_path, monkeypatch):
    exhausted, totals, streamed = [], [], ChunkAdapters._streamed

    def counted(adapters, dtype):
        yield from streamed(adapters, dtype)
        exhausted.append(dtype)

    def refuse(directory, *_, tensors):
        totals.append(tensors)
        (directory / "config.json").touch()
        raise OSError("no space left")

    monkeypatch.setattr(ChunkAdapters, "_streamed", counted)
    monkeypatch.setattr(of_ranks, "stream_hf_directory", refuse)
    trainer = trainer_of("megatron", LoraConfig(rank=2))
    with ThreadPoolExecutor(1) as thread:
        own = Rank(trainer, settings(tmp_path, 1), reader=None, demonstrations=None, thread=thread)
        await own.copy_weights()
        exhausted.clear()
        export = own._settings.export
        export.mkdir(parents=True)
        (export / "of an earlier end").touch()
        with pytest.raises(StorageError, match=f"cannot write {export}: no space left"):
            await own.export()
    assert [file.name for file in export.iterdir()] == ["of an earlier end"]
    assert [file.name for file in export.parent.iterdir()] == [export.name]
    assert len(exhausted) == 2  # once for the merged weights, and once alone
    assert totals == [None]  # what is published are fewer tensors than the model has
