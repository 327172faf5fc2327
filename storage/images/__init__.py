"""Images in messages: read and checked, their tokens, patches and positions."""
