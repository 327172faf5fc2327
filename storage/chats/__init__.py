"""What a model's chats are like: its template, the form of tool calls, the tokens that end answers."""
