"""The embedded nats-server, and the directory of credentials that it is secured by."""
