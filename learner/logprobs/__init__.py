"""Log-probs under current, frozen and teacher policies, values of a critic; teachers behind servers."""
