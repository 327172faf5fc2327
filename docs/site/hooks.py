"""Pages of the site that are made when it is built: the quick start of the README, and the reference."""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from reference import commands_page, python_page, quick_start, rooms_page, settings_page

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made; mkdocs calls this."""
    made = {
        "index.md": quick_start((ROOT / "README.md").read_text()),
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
        "reference/rooms.md": rooms_page(),
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files
