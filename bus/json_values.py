"""Values as JSON has them, for settings and commands too, which load without numpy."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""Values that a metadata field may hold."""
