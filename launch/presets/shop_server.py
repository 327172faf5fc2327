"""An MCP server, the program of the preset `mcp`: three tools that know the goods of a shop.

It speaks over its standard input and output, and ends with the actor that has started it."""

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from storage.built_in_tasks.lookup_tasks import shop_answer

server = MCPServer("shop", log_level="ERROR")


@server.tool()
def price(item: str) -> str:
    """Return what an item costs."""
    return looked_up("price", item)


@server.tool()
def stock(item: str) -> str:
    """Return how many of an item there are."""
    return looked_up("stock", item)


@server.tool()
def weight(item: str) -> str:
    """Return how much an item weighs."""
    return looked_up("weight", item)


def looked_up(tool: str, item: str) -> str:
    """Return what is known about an item; for one that is not sold the call has failed."""
    try:
        return shop_answer(tool, item)
    except KeyError as error:
        raise ToolError("no such item") from error


if __name__ == "__main__":
    server.run()
