"""The page in the browser: curves, flow, trajectories; `web/` is what a browser loads."""
