"""SGLang servers: settings, requests, weights, pairs of servers."""
