"""Requests to an SGLang server, its answers, and what it says of itself."""
