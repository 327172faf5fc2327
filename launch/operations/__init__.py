"""Commands that change a run or examine it again, such as `launch retrain`."""
