"""Which backend is built (`factory.py`), which models it trains, a directory's model (`model_loading.py`)."""
