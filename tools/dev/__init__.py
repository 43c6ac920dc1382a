# SPDX-License-Identifier: Apache-2.0
"""The command ./dev: one module for each subject. It starts in main.py; ./dev help describes it."""
