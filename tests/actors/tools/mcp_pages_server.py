"""An MCP server over stdio, whose list of tools has three pages and ends with an empty cursor, and whose
answers have other forms."""

import asyncio

from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, Tool

NAMES = "structured", "file", "link"
ANSWERS = {
    "structured": {"content": [], "structured_content": {"rows": [1, "ü"]}},
    "file": {
        "content": [
            {"type": "text", "text": "it is:"},
            {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "whole file"}},
            {"type": "resource", "resource": {"uri": "file:///a.bin", "blob": "AA=="}},
        ]
    },
    "link": {"content": [{"type": "resource_link", "uri": "file:///b.txt", "name": "b"}], "is_error": True},
}


async def listed(_, params):
    at = int(params.cursor) if params is not None and params.cursor else 0
    tool = Tool(name=NAMES[at], input_schema={"type": "object"})
    return ListToolsResult(tools=[tool], next_cursor=str(at + 1) if at + 1 < len(NAMES) else "")


async def called(_, params):
    return CallToolResult.model_validate(ANSWERS[params.name])


async def main():
    server = Server("pages", on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
