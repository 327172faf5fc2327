"""What processes say to each other: messages and their codec, requests, streams as data, errors."""
