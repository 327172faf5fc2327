"""Durable streams: publisher, consumer loop, messages in parts, blobs, readers."""
