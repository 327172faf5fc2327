"""The protocol of an engine, a scripted engine for tests."""
