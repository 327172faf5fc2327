"""Names of JSON's values in error messages."""


def kind_of(value: object) -> str:
    """Return what an error message calls `value`."""
    if value == "":
        return "an empty text"
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(
        type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    )
