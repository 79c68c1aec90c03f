"""TITLE train/preflight"""
