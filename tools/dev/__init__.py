"""The command ./dev, by subject. main.py is where it begins; ./dev help says what it does."""
