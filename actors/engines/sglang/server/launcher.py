"""Starts SGLang with settings that its own command line is asked for first. Run by the interpreter of
SGLang's environment, as a file: it imports nothing of Sluice."""

import argparse
import difflib
import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

UNKNOWN_SETTING = 64
"""Exit status when the installed SGLang has no setting of a name; the reason is the last line it prints."""
MODULE = "sglang.launch_server"
OURS = "sluice_changes."


def main() -> None:
    """Serve with the settings in the first argument, a JSON object, as long as standard input is open."""
    _end_with_stdin()
    here = Path(sys.path.pop(0))  # the directory of this file, whose modules SGLang is not to find
    sys.path.append(str(here.parent / "in_server"))  # SGLang's processes inherit this
    settings = json.loads(sys.argv[1])
    if _lays_out_anew(settings):
        loaders = settings.get("custom_weight_loader", [])
        settings["custom_weight_loader"] = [name for name in loaders if not name.startswith(OURS)]
    actions = _actions()
    for name in settings:
        if name not in actions:
            near = difflib.get_close_matches(name, actions, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "see `python -m sglang.launch_server --help`"
            sys.stderr.write(f"this SGLang has no setting {name!r}: {hint}\n")
            sys.exit(UNKNOWN_SETTING)
    sys.argv = [MODULE, *_flags(settings, actions)]
    runpy.run_module(MODULE, run_name="__main__")


def _lays_out_anew(settings: Mapping[str, object]) -> bool:
    """Return whether kernels have weights in another layout than they are loaded in: changes have no place
    there."""
    import torch
    from sglang.srt.utils import cpu_has_amx_support  # type: ignore[import-not-found,unused-ignore]

    fused = os.environ.get("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "0").lower() in ("1", "true")
    return (
        fused or torch.version.hip is not None or (settings.get("device") == "cpu" and cpu_has_amx_support())
    )


def _end_with_stdin() -> None:
    """Leave a process behind that kills this whole process group when standard input closes. Its other end is
    held by the process that started us, so this is when that one dies, however it does. The kernel's own
    signal for this would miss schedulers that are starting up just then."""
    if os.fork() == 0:
        while os.read(0, 4096):
            continue
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _actions() -> dict[str, argparse.Action]:
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found,unused-ignore]

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {
        option.removeprefix("--").replace("-", "_"): action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def _flags(settings: Mapping[str, object], actions: Mapping[str, argparse.Action]) -> Iterator[str]:
    for name, value in settings.items():
        takes_none = actions[name].nargs == 0
        if takes_none and str(value).lower() == "false":
            continue
        yield "--" + name.replace("_", "-")
        if not takes_none:
            yield from map(str, value if isinstance(value, list) else [value])


if __name__ == "__main__":
    main()
