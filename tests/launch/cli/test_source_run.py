"""`launch local --from`: settings of the model come from the run that is named, below files and flags."""

import json
from pathlib import Path

import pytest

from launch.cli import main as cli
from launch.settings.run_config import validate

SOURCE = {"run": "sft", "model": {"scratch": {"layers": 5, "heads": 2}, "freeze": ["embed"]}}


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Return what `--print-config` says of a run that begins with the run `sft`."""
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "runs/sft/checkpoints/step_00000040"
    checkpoint.mkdir(parents=True)
    manifest = {"format": 2, "model": {}, "training": {}, "extra": {"step": 40}, "files": {}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "runs/sft/config.json").write_text(validate(SOURCE).model_dump_json())

    def printed(*arguments: str) -> tuple[int | str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["local", "--run", "rl", "--preset", "sort", "--print-config", *arguments])
        found = capsys.readouterr()
        return ended.value.code or 0, found.out + found.err

    return printed


def test_the_model_is_that_of_the_run_unless_given(printed):
    status, text = printed("--from", "sft", "--model.scratch.heads", "4")
    assert not status
    assert 'from_run = "sft"' in text
    scratch = text.partition("[model.scratch]")[2].partition("[")[0]
    assert "layers = 5" in scratch
    assert "# run sft" in scratch
    assert "heads = 4" in scratch
    assert 'freeze = ["embed"]' in text
    assert not Path("runs/rl").exists()


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("stf", "no run 'stf' in runs: did you mean 'sft'?"),
        ("sft@4", "run 'sft' has no checkpoint of step 4: there are 40;"),
        ("sft@last", "model.from_run: it is RUN or RUN@STEP"),
    ],
)
def test_what_is_not_there_is_refused_by_name(printed, named, said):
    status, text = printed("--from", named)
    assert status == 2
    assert said in " ".join(text.split())
