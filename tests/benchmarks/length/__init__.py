"""`launch bench length`: whether answers run away where longer ones pay and the data is old."""
