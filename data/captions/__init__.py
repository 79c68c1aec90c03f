"""TITLE data/captions"""
