"""A question for processes that answer."""

from bus.requests import StoredRequest

ASK = StoredRequest(after=3)
