"""A second process of a name, which a soak starts beside the first."""

import os
import sys

from soak.run_faults import run_beside


async def test_a_second_process_that_ends_by_itself_tells_its_status_and_output():
    command = (sys.executable, "-c", "import sys; print('refused'); sys.exit(2)")
    assert await run_beside(command, lambda: True, os.environ) == (2, "refused\n")


async def test_a_second_process_ends_with_the_first(tmp_path):
    """Else it would get the name of the first, whose successor is then refused, which ends the run."""
    began = tmp_path / "began"
    command = (sys.executable, "-c", f"import time; open({str(began)!r}, 'w'); time.sleep(600)")
    assert await run_beside(command, lambda: not began.exists(), os.environ) == (None, "")
