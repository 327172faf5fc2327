"""The other rewards that are built in, and the table of all of them."""
