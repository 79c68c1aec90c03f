"""TITLE memory/swap"""
