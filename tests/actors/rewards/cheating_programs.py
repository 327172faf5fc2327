"""Programs that do not solve what is asked, and try to be rewarded all the same."""

DOUBLE = "print(int(input()) * 2)"
ADD = "def add(a, b):\n    return a + b"
WHEN_READING = {
    "another number": "print(int(input()) * 3)",
    "nothing": "",
    "no program": "The answer is 6.",
    "an exception after the output": DOUBLE + "\nraise ValueError",
    "a status after the output": DOUBLE + "\nimport sys\nsys.exit(1)",
    "an end before the output": "import sys\nsys.exit(0)\n" + DOUBLE,
    "more output": DOUBLE + "\nprint(1)",
    "output without end": "while True: print(6)",
    "more memory than there is": "x = bytearray(10 ** 10)\n" + DOUBLE,
    "many processes": """\
import os
while True: os.fork()
""",
    "what looks like a result": """\
print('true')
print(1.0)
import os
os.write(2, b'true')
""",
    "less time for itself": """\
import resource
resource.setrlimit(resource.RLIMIT_CPU, (0, 0))
while True: pass
""",
}
"""By what is wrong, in a task to read a number and to print its double."""

SAY = """\
import json, os, struct
def say(x):
  data = json.dumps(x).encode()
  os.write(3, struct.pack("!I", len(data)) + data)
"""
"""Defines a function that writes a message of its own to the tests."""
BEGUN = SAY + "say({'value': None, 'arguments': []})\n"

WHEN_CALLED = {
    "ends well before the tests": """\
import sys
sys.exit(0)
""",
    "ends well at once": """\
import os
os._exit(0)
""",
    "ends well when it is called": """\
import os
def add(a, b): os._exit(0)
""",
    "asks to end when it is called": "def add(a, b): raise SystemExit(0)",
    "has no such function": "def subtract(a, b): return a + b",
    "is no Python": "def add(a, b) return a + b",
    "raises when it begins": ADD + "\n" + "raise KeyError('add')",
    "prints without end": "while True: print('true')",
    "takes all memory": "x = bytearray(10 ** 10)",
    "forks without end": """\
import os
while True: os.fork()
""",
    "returns what equals everything": """\
class T:
  __eq__ = lambda s, o: True
  __hash__ = None
def add(a, b): return T()
""",
    "returns a number that equals everything": """\
class T(int):
  __eq__ = lambda s, o: True
def add(a, b): return T(99)
""",
    "returns a text that equals everything": """\
class T(str):
  __eq__ = lambda s, o: True
def add(a, b): return T('x')
""",
    "prints fake results": """\
def add(a, b): return 99
for n in range(99): print('true', flush=True)
""",
    "writes fake results to its streams": """\
import os
os.write(1, b'true\\n' * 9)
os.write(2, b'true\\n' * 9)
def add(a, b): return 99
""",
    "answers before it is asked": SAY + "for n in range(9): say({'value': True, 'arguments': []})",
    "answers with an exception of the checker's": BEGUN
    + "for n in range(9): say({'raised': 'NotImplementedError', 'text': ''})",
    "says what is no answer": BEGUN + "for n in range(9): say([1])",
    "says what is endless": SAY + "os.write(3, b'\\xff' * 99)",
    "says what is nested without end": BEGUN
    + """\
d = b'[' * 10 ** 5
os.write(3, struct.pack('!I', len(d)) + d)
""",
    "replaces comparisons in its own process": """\
import builtins, operator
builtins.all = builtins.bool = operator.eq = lambda *a: True
def add(a, b): return 99
""",
    "defines functions that tests use": """\
def add(a, b): return 99
def abs(x): return 0
def check(c): pass
def isinstance(*a): return True
""",
    "looks for the tests in memory": """\
import gc, sys
wanted = 'add' + '(1, 2)'
def held(x): return isinstance(x, str) and wanted in x and x != wanted
def add(a, b):
  for x in gc.get_objects():
    if isinstance(x, (list, tuple)) and any(map(held, x)): return 3
    if isinstance(x, dict) and any(map(held, list(x.values()))): return 3
  return 99
""",
    "ends all processes that it sees": """\
import os, signal
for n in (-1, 0, 1, 2): os.kill(n, signal.SIGKILL)
def add(a, b): return 99
""",
    "raises what the test raises for what it lacks": "def add(a, b): raise ImportError('no module')",
    "raises that it is not done": "def add(a, b): raise NotImplementedError",
    "cannot be given": "def add(a, b): return lambda: 3",
}
"""By what they do, in a task to write the function `add`."""
