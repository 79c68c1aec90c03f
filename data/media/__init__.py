"""TITLE data/media"""
