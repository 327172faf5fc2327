"""An HTTP server by which agents of others ask the policy: sessions, retries, limits."""
