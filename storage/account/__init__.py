"""Records of what was sent, acknowledged, dropped and trained on, by id and digest."""
