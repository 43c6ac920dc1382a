"""The command ./dev: one module for each subject. It starts in main.py; ./dev help describes it."""
