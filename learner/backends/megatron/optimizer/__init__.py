"""AdamW, Muon, offloading."""
