"""Requests of each kind, and what they are answered."""

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
GENERATE = "/v1beta/models/gemini-3:generateContent"
HELLO = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {CHAT: HELLO, MESSAGES: {**HELLO, "max_tokens": 9}, RESPONSES: {"model": "any", "input": "hi"}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WRITTEN = '<tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>'


def answering(prompt: str) -> str:
    return "42" if "tool 42" in prompt else f"I add.{WRITTEN}"
