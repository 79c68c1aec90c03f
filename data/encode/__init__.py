"""TITLE data/encode"""
