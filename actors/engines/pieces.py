"""Imports of a benchmark that is being worked on."""

from actors.engines.continued_generation import joined as joined
from actors.engines.continued_generation import next_piece as next_piece
