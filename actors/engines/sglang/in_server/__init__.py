"""What runs inside SGLang's own process."""
