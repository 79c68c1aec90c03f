"""TITLE data/folders"""
