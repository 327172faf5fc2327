"""Text games: those of ours, of textarena, of gymnasium, of your own."""
