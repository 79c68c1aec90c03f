"""TITLE memory/host"""
