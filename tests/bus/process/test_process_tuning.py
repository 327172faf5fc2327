"""What the C library keeps of freed memory."""

import subprocess
import sys

import pytest

GROW = """
import os, threading, psutil
from bus.process.process_tuning import return_freed_memory
kept = []
def work():
    blocks = [bytearray(os.urandom(64 << 10)) for _ in range(800)]
    kept.append(blocks[-1])  # above the others, so that the heap cannot shrink
for _ in range(4):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
before = psutil.Process().memory_info().rss
return_freed_memory()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.slow
def test_freed_memory_between_memory_in_use_goes_back_to_the_system():
    done = subprocess.run(
        [sys.executable, "-c", GROW], check=True, capture_output=True, text=True, timeout=60
    )
    assert int(done.stdout) > 20 << 20
